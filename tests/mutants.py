"""Takes out each protection of docs/security.md in a copy, and shows that its test fails.

    python -m tests.mutants            # all; a table: protection, test, killed or not, seconds
    python -m tests.mutants --quick    # the cheapest, which run with the tests; --every 6: some
    python -m tests.mutants NAME …     # these

A protection is a piece of text that stands exactly once in its file, and what the code would say
without it. A line that has moved or changed is an error here: say where it is now.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

ROOT: Final = Path(__file__).parent.parent
COPIED: Final = ("splitup", "node", "oracle", "deploy", "extras", "tests")
LINKED: Final = (
    "bench",
    "contracts",
    "docs",
    "examples",
    ".venv",
    "pyproject.toml",
    "constraints.txt",
)
# Third parties, imported once: every mutant then runs in a fork that imports only our code.
PRELOADED: Final = (
    "numpy",
    "pydantic",
    "pytest",
    "nacl.bindings",
    "coincurve",
    "eth_abi.abi",
    "eth_keys.datatypes",
    "eth_hash.auto",
    "aiohttp",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One protection: ``text`` in ``path`` becomes ``without``, and ``test`` must fail."""

    name: str
    path: str
    text: str
    without: str
    test: str
    is_quick: bool = True


_SETTLEMENT: Final = "splitup/protocol/settlement"
_PLANNING: Final = "splitup/protocol/planning"
_COMMITTEE: Final = "splitup/protocol/committee"
_EXECUTION: Final = "splitup/protocol/execution"
_TESTS: Final = "tests/protocol"

MUTANTS: Final = (
    # ---- what a stranger's message costs --------------------------------------------------------
    Mutant(
        "numbers beyond a table",
        "splitup/cpu/row_copies.py",
        '        asm.jump("jge", "zeros")\n',
        "",
        "tests/cpu/test_row_copies.py::test_rows_that_numbers_name_are_copied",
        is_quick=False,
    ),
    Mutant(
        "form of an endpoint's results",
        "splitup/chain/rpc.py",
        '        check_result(calls[place][0], entry.get("result"))\n',
        "        pass\n",
        "tests/chain/test_rpc.py::test_s54_what_is_no_result_counts_as_no_answer",
    ),
    Mutant(
        "length of an endpoint's answer",
        "splitup/chain/rpc.py",
        "len(text) > limits.MAX_RPC_ANSWER_BYTES",
        "False",
        "tests/chain/test_rpc.py::test_s54_an_answer_has_a_length",
    ),
    Mutant(
        "results that do not fit the ABI",
        "splitup/chain/client.py",
        "except DecodingError as error:",
        "except ZeroDivisionError as error:",
        "tests/chain/test_rpc.py::test_s54_a_result_of_another_form_is_the_endpoints_fault",
    ),
    Mutant(
        "damaged events",
        "splitup/chain/event_stream.py",
        "except DecodingError as error:",
        "except ZeroDivisionError as error:",
        "tests/chain/test_rpc.py::test_s54_a_damaged_event_is_the_endpoints_fault",
    ),
    Mutant(
        "strings of a result",
        "splitup/chain/abi.py",
        "stream.characters > stream.getbuffer().nbytes",
        "False",
        "tests/chain/test_abi.py::"
        "test_s54_a_string_that_is_referred_to_again_and_again_stays_small",
    ),
    Mutant(
        "scans of a JPEG",
        "splitup/client/images/image_reader.py",
        "            if scans * pixels > (most",
        "            if 0 > (most",
        "tests/deploy/frontends/test_images.py::test_s30_scans_of_a_jpeg_are_counted_before_they_are_drawn",
        is_quick=False,
    ),
    Mutant(
        "turns by group",
        "splitup/core/places.py",
        "                self._waiting[group] = turns  # behind all others\n",
        "                self._waiting = OrderedDict({group: turns} | self._waiting)\n",
        "tests/core/test_places.py::test_s30_a_lock_goes_round_by_group",
    ),
    Mutant(
        "sessions of an adapter host by network",
        "extras/private/splitup_private/adapters/host.py",
        "get_admission(request).get_group(request), name)",
        '"", name)',
        "extras/private/private_tests/adapters/test_host.py::test_s31_a_newcomer_gets_a_session_of_the_network_that_has_the_most",
        is_quick=False,
    ),
    Mutant(
        "keys before a process",
        "extras/private/splitup_private/adapters/host.py",
        "        check_rotation_keys(keys, info.parameters, layout)",
        "        pass",
        "extras/private/private_tests/adapters/test_host.py::"
        "test_s55_what_cannot_be_keys_starts_no_process_and_takes_no_place",
        is_quick=False,
    ),
    Mutant(
        "files of devices by key",
        "extras/gateway/splitup_gateway/split/files.py",
        "self._places.take(principal, task)) == (principal, task)",
        'self._places.take("", task)) == ("", task)',
        "extras/gateway/gateway_tests/split/test_files.py::"
        "test_s56_a_key_that_reads_slowly_keeps_files_from_no_other",
        is_quick=False,
    ),
    Mutant(
        "lists that a pickle names again",
        "deploy/splitup_deploy/frontends/pytorch/pickle_reader.py",
        "self.operations += sum(len(one) for one in arguments if isinstance(one, list | tuple))",
        "pass",
        "tests/deploy/frontends/test_state_files.py::"
        "test_s57_a_list_counts_each_time_that_something_is_made_of_it",
        is_quick=False,
    ),
    Mutant(
        "storages that a pickle names again",
        "deploy/splitup_deploy/frontends/pytorch/state_files.py",
        "        self.inner[arguments[0]] = root\n",
        "",
        "tests/deploy/frontends/test_state_files.py::test_s57_a_storage_inside_a_pickle_is_read_once",
        is_quick=False,
    ),
    Mutant(
        "dicts that a pickle names again",
        "deploy/splitup_deploy/frontends/pytorch/state_files.py",
        "{id(root[name]): name",
        "{name: name",
        "tests/deploy/frontends/test_state_files.py::"
        "test_s57_a_dict_under_many_names_is_looked_through_once",
        is_quick=False,
    ),
    Mutant(
        "merges of a tokenizer",
        "deploy/splitup_deploy/frontends/gguf/tokenizer.py",
        "len(merges) <= MAX_ARRAY",
        "True",
        "tests/deploy/frontends/test_gguf.py::"
        "test_s57_a_tokenizer_has_no_more_merges_than_a_file_has_values",
        is_quick=False,
    ),
    Mutant(
        "chunks of one execution",
        "splitup/net/tensor_chunks.py",
        "            self._remove(most, next(reversed(self._incoming[most])))\n",
        "            return False\n",
        "tests/node/execution/test_chunk_transfers.py::test_s32_the_execution_with_the_most_chunks_gives_way_to_others",
        is_quick=False,
    ),
    Mutant(
        "manifests that are passed on",
        "oracle/splitup_oracle/gateway/http_gateway.py",
        "            body=await self._objects.fetch_manifest_file(model_id),\n",
        "            body=(await self._objects.fetch_manifest(model_id)).to_bytes(),\n",
        "tests/oracle/gateway/test_strangers.py::test_s34_who_asks_for_a_manifest_checks_it",
        is_quick=False,
    ),
    Mutant(
        "long texts apart",
        "splitup/client/text/tokenizer.py",
        "        if length <= tuning.LONG_TEXT_CHARS:\n",
        "        if True:\n",
        "tests/client/text/test_tokenizer.py::test_s33_a_long_text_holds_up_no_stream",
        is_quick=False,
    ),
    Mutant(
        "the first wrong entry",
        "splitup/core/records.py",
        '        schema["fail_fast"] = True\n',
        "",
        "tests/fuzz/test_costs.py::test_s20_the_first_wrong_entry_ends_a_check",
        is_quick=False,
    ),
    Mutant(
        "one unknown key",
        "splitup/core/records.py",
        "        return {**kept, unknown: value[unknown]}\n",
        "        return value\n",
        "tests/fuzz/test_costs.py::test_s20_the_first_wrong_entry_ends_a_check",
        is_quick=False,
    ),
    Mutant(
        "brackets that take much memory",
        "splitup/core/codec.py",
        "if (weight := _weigh(bare)) > most:",
        "if (weight := _weigh(bare)) < 0:",
        "tests/core/test_codec.py::test_s20_brackets_are_counted_before_anything_is_built",
    ),
    Mutant(
        "many values",
        "splitup/core/codec.py",
        ">= max_values:\n        raise",
        "< 0:\n        raise",
        "tests/core/test_codec.py::test_s20_values_are_counted_before_anything_is_built",
    ),
    Mutant(
        "order of keys",
        "splitup/core/codec.py",
        "map(operator.lt, found",
        "map(operator.ne, found",
        "tests/core/test_codec.py::test_every_other_spelling_is_refused",
    ),
    Mutant(
        "repeated keys",
        "splitup/core/codec.py",
        "if colons != kept:",
        "if colons < kept:",
        "tests/core/test_codec.py::test_every_other_spelling_is_refused",
    ),
    Mutant(
        "spelling of a manifest",
        "splitup/graph/manifest_rules.py",
        'if value != manifest.model_dump(mode="json"):',
        "if value is None:",
        "tests/graph/test_manifest.py::test_what_may_be_left_out_has_one_spelling",
    ),
    Mutant(
        "number of token biases",
        "extras/gateway/splitup_gateway/apis/requests.py",
        "Field(max_length=MAX_BIASES)",
        "Field()",
        "extras/gateway/gateway_tests/serve/apis/test_requests.py::test_s20_biases_are_counted",
    ),
    Mutant(
        "spelling of signed bytes",
        "splitup/core/codec.py",
        "        _check_spelling(text)\n",
        "",
        "tests/core/test_codec.py::test_every_other_spelling_is_refused",
    ),
    Mutant(
        "a refused manifest",
        "splitup/graph/manifest_rules.py",
        "        _refused[digest] = str(error)\n",
        "",
        "tests/graph/test_manifest.py::test_s20_a_refused_manifest_is_not_read_again",
    ),
    # ---- price, steps, deadline -----------------------------------------------------------------
    Mutant(
        "price of a request",
        f"{_PLANNING}/plan_agreement.py",
        "            _check_price(request, manifest)\n",
        "",
        f"{_TESTS}/planning/test_plan_agreement.py::test_s01_a_request_below_the_models_price_gets_no_plan",
    ),
    Mutant(
        "price of a task",
        "splitup/chain/models.py",
        'model["dagRoot"] == compute_dag_root(manifest)',
        "True",
        "tests/chain/test_models.py::test_s01_a_model_registered_with_other_figures_is_refused",
        is_quick=False,
    ),
    Mutant(
        "paid steps",
        f"{_EXECUTION}/ends.py",
        "if end.steps > request.steps:",
        "if False:",
        f"{_TESTS}/execution/test_ends.py::test_a15_an_end_counts_for_its_execution_client_and_model_alone",
    ),
    Mutant(
        "deadline of a request",
        f"{_PLANNING}/signed_requests.py",
        "if request.deadline <= timestamp_s:",
        "if False:",
        f"{_TESTS}/planning/test_signed_requests.py::test_what_does_not_hold_until_the_deadline_is_refused",
        is_quick=False,
    ),
    # ---- steps and what the client received -----------------------------------------------------
    Mutant(
        "signature of the steps",
        f"{_SETTLEMENT}/collected_commitments.py",
        "        check_end(signed, plan)\n",
        "",
        f"{_TESTS}/settlement/test_commitment_agreement.py::"
        "test_s02_no_executor_invents_an_end_of_the_client",
    ),
    Mutant(
        "one number of steps",
        f"{_SETTLEMENT}/settlement_state.py",
        "next((n for n in finals if n >= self.collected.asked and len(finals) == 1), None)",
        "min(finals, default=None)",
        f"{_TESTS}/settlement/test_unended.py::test_s69_a_client_that_replaces_all_pays_what_it_had_signed_for",
        is_quick=False,
    ),
    Mutant(
        "majority for a number of steps",
        f"{_SETTLEMENT}/settlement_state.py",
        "worth = is_majority, covered * steps, steps",
        "worth = True, covered * steps, steps",
        f"{_TESTS}/settlement/test_unended.py::"
        "test_what_most_executors_committed_to_comes_before_what_pays_one_of_them_more",
        is_quick=False,
    ),
    Mutant(
        "majority for counted steps",
        f"{_SETTLEMENT}/settlement_state.py",
        "                not is_majority\n                or steps",
        "                steps",
        f"{_TESTS}/settlement/test_unended.py::"
        "test_a_minority_counts_no_steps_that_the_client_signed_nothing_for",
        is_quick=False,
    ),
    Mutant(
        "ordered steps",
        f"{_SETTLEMENT}/settlement_state.py",
        "steps > self.collected.ordered",
        "False",
        f"{_TESTS}/settlement/test_unended.py::test_executors_cannot_count_steps_that_the_client_did_not_order",
        is_quick=False,
    ),
    Mutant(
        "signature of an order",
        f"{_EXECUTION}/ends.py",
        "    verify_raw(plan.request.client_key, seal.signed, seal.signature)\n",
        "",
        f"{_TESTS}/settlement/test_unended.py::test_members_take_no_order_but_the_clients_signed_input",
        is_quick=False,
    ),
    Mutant(
        "outputs of ordered steps",
        f"{_SETTLEMENT}/settlement_state.py",
        "or not all(executors[task] in commitments for task in results)",
        "",
        f"{_TESTS}/settlement/test_unended.py::test_nothing_is_owed_for_steps_whose_outputs_were_not_computed",
        is_quick=False,
    ),
    Mutant(
        "counts beside an end",
        f"{_SETTLEMENT}/settlement_state.py",
        "commitments = self.collected.list_finals(steps)",
        "commitments = self.collected.list_commitments(steps)",
        f"{_TESTS}/settlement/test_unended.py::test_a_client_that_ends_below_what_it_ordered_pays_for_what_was_computed",
        is_quick=False,
    ),
    Mutant(
        "commitments passed on",
        f"{_SETTLEMENT}/commitments.py",
        "return [Gossip(None, message) for message in (first, *rest)]",
        "return []",
        f"{_TESTS}/settlement/test_unended.py::test_members_pass_on_what_an_executor_shows_to_some_of_them[2]",
        is_quick=False,
    ),
    Mutant(
        "two commitments count as none",
        f"{_SETTLEMENT}/collected_commitments.py",
        "by_steps[steps] = HeldCommitment({}, (*known.tokens, token), frozenset(), is_final)",
        "pass",
        f"{_TESTS}/settlement/test_unended.py::test_an_executor_that_shows_each_half_of_the_members_another_commitment_is_unpaid",
        is_quick=False,
    ),
    Mutant(
        "what an interim end shows",
        f"{_EXECUTION}/ends.py",
        "not any(_is_signed(key, delivery.seal.signed, delivery.seal.signature) for key in keys)",
        "not keys",
        f"{_TESTS}/execution/test_ends.py::test_a15_an_interim_end_shows_what_was_received_and_follows_the_one_before",
    ),
    Mutant(
        "order of interim ends",
        f"{_EXECUTION}/ends.py",
        "    if before and end.steps != before + limits.INTERIM_STEPS:\n",
        "    if end.steps <= before:\n",
        f"{_TESTS}/execution/test_ends.py::test_a15_an_interim_end_shows_what_was_received_and_follows_the_one_before",
    ),
    Mutant(
        "steps beyond the last end",
        f"{_EXECUTION}/task_queue.py",
        "most = min(self.max_steps, self.delivered + unpaid)",
        "most = self.max_steps",
        f"{_TESTS}/execution/test_task_queue.py::test_steps_beyond_what_was_delivered_are_kept_and_wait",
    ),
    Mutant(
        "steps of a completion",
        f"{_SETTLEMENT}/chain_commitments.py",
        "if completion.steps != steps:",
        "if False:",
        f"{_TESTS}/test_member.py::test_a_completion_must_be_what_was_committed_steps_included",
        is_quick=False,
    ),
    Mutant(
        "steps of an order",
        f"{_COMMITTEE}/certificates.py",
        '            "steps": steps,\n',
        "",
        f"{_TESTS}/settlement/test_steps.py::test_s09_an_order_with_another_number_of_steps_is_refused",
    ),
    Mutant(
        "outputs for the client",
        f"{_SETTLEMENT}/edge_faults.py",
        "        if delivery.total.hex() == claim.outputs[delivery.port]:",
        "        if True:",
        f"{_TESTS}/settlement/test_deliveries.py::"
        "test_s07_who_signs_other_outputs_for_the_client_than_it_commits_to_is_slashed",
    ),
    Mutant(
        "signature of a delivery",
        f"{_SETTLEMENT}/edge_faults.py",
        "            verify_raw(signing_key, delivery.seal.signed, delivery.seal.signature)\n",
        "            pass\n",
        f"{_TESTS}/settlement/test_deliveries.py::"
        "test_s07_no_client_can_frame_a_node_that_sent_what_it_commits_to",
    ),
    Mutant(
        "result that was committed to",
        f"{_SETTLEMENT}/task_checks.py",
        "if known is not None and (fixed == known.root or known.result == answer.result):",
        "if known is not None:",
        f"{_TESTS}/settlement/test_task_checks.py::"
        "test_the_answer_that_was_committed_to_replaces_another_and_is_not_replaced",
    ),
    Mutant(
        "terms of a plan",
        f"{_COMMITTEE}/certificates.py",
        "if plan.terms and len(plan.terms) != len(plan.tasks):",
        "if False:",
        f"{_TESTS}/committee/test_certificates.py::"
        "test_malformed_plans_are_refused_whoever_signed_them",
    ),
    Mutant(
        "lists of a plan",
        "node/splitup_node/settlement/verifier.py",
        "    check_plan(plan)\n",
        "",
        f"{_TESTS}/settlement/test_steps.py::test_an_order_whose_plan_names_no_executor_is_refused",
        is_quick=False,
    ),
    Mutant(
        "words of a request in a vote's slot",
        f"{_COMMITTEE}/equivocation.py",
        'return f"plan/{vote.configuration}/{vote.execution_id}/{vote.request_hash}"',
        'return f"plan/{vote.configuration}/{vote.execution_id}"',
        f"{_TESTS}/committee/test_reorganised_handovers.py::"
        "test_s03_a_reorganisation_across_a_handover_makes_nobody_sign_two_plans",
        is_quick=False,
    ),
    # ---- what the client signs ------------------------------------------------------------------
    Mutant(
        "signature of a request",
        f"{_PLANNING}/signed_requests.py",
        "if signer != request.client:",
        "if False:",
        f"{_TESTS}/planning/test_signed_requests.py::test_a15_a_signature_is_for_its_words_chain_and_market_only",
    ),
    Mutant(
        "id of a request",
        f"{_PLANNING}/signed_requests.py",
        "if request.execution_id != compute_execution_id(*place):",
        "if False:",
        f"{_TESTS}/planning/test_signed_requests.py::test_a15_a_signature_is_for_its_words_chain_and_market_only",
        is_quick=False,
    ),
    Mutant(
        "balance behind a request",
        f"{_PLANNING}/signed_requests.py",
        "if event.balance_micro_usdc < request.max_price_micro_usdc:",
        "if False:",
        f"{_TESTS}/planning/test_signed_requests.py::test_what_does_not_hold_until_the_deadline_is_refused",
        is_quick=False,
    ),
    Mutant(
        "frozen balance",
        f"{_PLANNING}/signed_requests.py",
        "if event.frozen_until <= request.deadline:",
        "if False:",
        f"{_TESTS}/planning/test_signed_requests.py::test_what_does_not_hold_until_the_deadline_is_refused",
        is_quick=False,
    ),
    Mutant(
        "one signed request at a time",
        f"{_PLANNING}/signed_requests.py",
        "if live is not None and live.request != request:",
        "if False:",
        f"{_TESTS}/planning/test_signed_requests.py::test_f08_a_balance_is_promised_once_across_all_partitions[first0]",
        is_quick=False,
    ),
    Mutant(
        "signature of an end",
        f"{_EXECUTION}/ends.py",
        "    verify_raw(request.client_key, message, bytes.fromhex(signed.signature[2:]))\n",
        "",
        f"{_TESTS}/execution/test_ends.py::test_a15_an_end_counts_for_its_execution_client_and_model_alone",
    ),
    Mutant(
        "progress of one's own tasks",
        f"{_EXECUTION}/failover.py",
        "for task in self._tasks[progress.node]:",
        "for task in list(stated):",
        f"{_TESTS}/execution/test_failover.py::test_s40_a_node_speaks_for_its_own_tasks_only",
    ),
    Mutant(
        "progress up to what was sent",
        f"{_EXECUTION}/failover.py",
        "min(own.steps, self._submitted)",
        "own.steps",
        f"{_TESTS}/execution/test_failover.py::test_s40_more_progress_than_steps_were_sent_is_none",
    ),
    Mutant(
        "outputs kept from readers",
        f"{_EXECUTION}/failover.py",
        "able[(self._lost[task] - 1) % len(able)]",
        "task",
        f"{_TESTS}/execution/test_failover.py::test_s40_a_producer_that_says_it_sent_what_two_readers_lack_is_replaced",
    ),
    Mutant(
        "time of many connections",
        f"{_EXECUTION}/failover.py",
        "connected = min(connected, self._asked[node] + tuning.STALL_FIRST_S)",
        "pass",
        f"{_TESTS}/execution/test_failover.py::test_s40_who_drops_connections_one_after_the_other_is_silent",
    ),
    Mutant(
        "signature of a takeover",
        f"{_EXECUTION}/takeovers.py",
        "    verify_raw(request.client_key, message, bytes.fromhex(signed.signature[2:]))\n"
        "    return plan",
        "    return plan",
        f"{_TESTS}/execution/test_takeovers.py::test_a15_takeover_counts_for_its_execution_task_and_candidate_alone",
    ),
    Mutant(
        "candidate of a takeover",
        f"{_EXECUTION}/takeovers.py",
        "if plan.places and takeover.candidate < plan.places[takeover.task]:",
        "if False:",
        f"{_TESTS}/execution/test_takeovers.py::test_who_was_passed_over_for_its_stake_takes_nothing_over",
        is_quick=False,
    ),
    Mutant(
        "loss of a task",
        f"{_EXECUTION}/takeovers.py",
        "and check_takeover(signed, plan) != planned",
        "",
        f"{_TESTS}/execution/test_takeovers.py::test_a_completion_shows_that_a_task_was_given_away_only_by_the_clients_word",
    ),
    # ---- what executors and validators sign -----------------------------------------------------
    Mutant(
        "key of a commitment",
        f"{_SETTLEMENT}/commitments.py",
        "if plan.node_of(commitment.node).signing_key != signing_key:",
        "if False:",
        f"{_TESTS}/settlement/test_commitments.py::test_a15_commitments_and_roots_count_for_their_node_and_execution_alone",
        is_quick=False,
    ),
    Mutant(
        "root of a completion",
        f"{_SETTLEMENT}/chain_commitments.py",
        "if completion.root() != root:",
        "if False:",
        f"{_TESTS}/test_member.py::test_a_completion_must_be_what_was_committed_steps_included",
        is_quick=False,
    ),
    Mutant(
        "tasks of a completion",
        f"{_SETTLEMENT}/proof_of_sampling.py",
        "if not all(planned[t] == node and is_given_away(completion, plan, t) for t in missing):",
        "if False:",
        f"{_TESTS}/settlement/test_proof_of_sampling.py::test_a_completion_must_match_its_root_and_its_plan",
    ),
    Mutant(
        "right to a task",
        f"{_SETTLEMENT}/proof_of_sampling.py",
        "        get_candidate(completion, plan, entry.task)\n",
        "",
        f"{_TESTS}/settlement/test_proof_of_sampling.py::test_a_completion_must_match_its_root_and_its_plan",
        is_quick=False,
    ),
    Mutant(
        "digests of inputs",
        f"{_SETTLEMENT}/edge_faults.py",
        "if sent[port] != claim.inputs[place]:",
        "if False:",
        f"{_TESTS}/execution/test_ends.py::test_a21_who_misstates_what_the_client_sent_is_not_paid[chain]",
        is_quick=False,
    ),
    Mutant(
        "both ends of an edge",
        f"{_SETTLEMENT}/edge_faults.py",
        "differs = said != read and replaced.isdisjoint((source, task))",
        "differs = False",
        f"{_TESTS}/settlement/test_verdicts.py::test_inputs_that_nobody_has_earn_nothing_and_cost_no_stake[chain]",
        is_quick=False,
    ),
    Mutant(
        "tensors of one's own",
        f"{_SETTLEMENT}/edge_faults.py",
        "(stored == said or executors[source] == executors[task])",
        "stored == said",
        f"{_TESTS}/settlement/test_edge_faults.py::test_who_reads_its_own_tensors_was_misled_by_nobody",
    ),
    Mutant(
        "stored outputs",
        f"{_SETTLEMENT}/edge_faults.py",
        "            if stored != said:",
        "            if False:",
        f"{_TESTS}/settlement/test_verdicts.py::test_whose_outputs_nobody_finds_has_withheld_them_and_their_reader_is_paid[0-stores_others-chain]",
        is_quick=False,
    ),
    Mutant(
        "result behind its commitment",
        f"{_SETTLEMENT}/task_checks.py",
        "return answer.result if fixed == answer.root else None",
        "return answer.result",
        f"{_TESTS}/settlement/test_task_checks.py::test_an_answer_that_is_not_what_was_committed_to_is_silence",
    ),
    Mutant(
        "key of a result",
        f"{_SETTLEMENT}/settlement_state.py",
        "if entry.node == result.validator and entry.signing_key == signing_key:",
        "if entry.node == result.validator:",
        f"{_TESTS}/settlement/test_settlement_transitions.py::"
        "test_a_result_counts_under_its_validators_key_alone",
    ),
    Mutant(
        "validator of another operator",
        f"{_PLANNING}/selection.py",
        "        get_operator(validator) != get_operator(executor)\n        and validator",
        "        validator",
        f"{_TESTS}/planning/test_selection.py::test_a22_nobody_checks_its_own_work",
        is_quick=False,
    ),
    # ---- stake ----------------------------------------------------------------------------------
    Mutant(
        "exposure within the free stake",
        "splitup/protocol/planning/exposure.py",
        "if exposures.get(n, floor) + penalty <= free[n]]",
        "]",
        f"{_TESTS}/settlement/test_stakes.py::test_what_no_stake_covers_is_refused_at_once",
        is_quick=False,
    ),
    # ---- the committee --------------------------------------------------------------------------
    Mutant(
        "quorum of a certificate",
        f"{_COMMITTEE}/certificates.py",
        "    _check_quorum(plan_hash, certificate.signatures, committee, scheme)\n",
        "",
        f"{_TESTS}/committee/test_certificates.py::test_every_part_is_bound",
    ),
    Mutant(
        "chain of a certificate",
        f"{_COMMITTEE}/certificates.py",
        "if plan.request.chain_id != committee.domain.chain_id:",
        "if False:",
        f"{_TESTS}/committee/test_certificates.py::test_malformed_plans_are_refused_whoever_signed_them",
        is_quick=False,
    ),
    Mutant(
        "size of a quorum",
        "splitup/crypto/quorum.py",
        "if count < compute_quorum_size(len(members)):",
        "if False:",
        "tests/crypto/test_quorum.py::test_bad_certificates_are_refused_by_name",
        is_quick=False,
    ),
    Mutant(
        "distinct signers",
        "splitup/crypto/quorum.py",
        "if signers and signer <= signers[-1]:",
        "if False:",
        "tests/crypto/test_quorum.py::test_bad_certificates_are_refused_by_name",
        is_quick=False,
    ),
    Mutant(
        "members only",
        "splitup/crypto/quorum.py",
        "if signer not in members:",
        "if False:",
        "tests/crypto/test_quorum.py::test_bad_certificates_are_refused_by_name",
        is_quick=False,
    ),
    Mutant(
        "seed of a plan or draw",
        f"{_COMMITTEE}/certificates.py",
        "if scheme.compute_seed(signature) != seed:",
        "if False:",
        f"{_TESTS}/committee/test_certificates.py::test_draws_are_bound_to_their_commitments",
    ),
    Mutant(
        "randomness of a plan or draw",
        f"{_COMMITTEE}/certificates.py",
        "    scheme.verify_threshold(committee.group_key, RANDOMNESS_DOMAIN, alpha, signature)\n",
        "",
        f"{_TESTS}/committee/test_certificates.py::test_a_quorum_cannot_choose_the_seed",
        is_quick=False,
    ),
    Mutant(
        "draw over the commitments",
        f"{_SETTLEMENT}/draws.py",
        "        if not state.rests_on_chain(draw):\n            return\n",
        "",
        f"{_TESTS}/settlement/test_draws.py::test_a_draw_of_another_member_is_taken_if_it_rests_on_our_chain",
    ),
    Mutant(
        "a stake that is not locked",
        f"{_SETTLEMENT}/chain_commitments.py",
        " if locked.get(node)}",
        "}",
        f"{_TESTS}/settlement/test_commitments.py::test_s19_a_node_without_free_stake_costs_nobody_else_the_pay",
    ),
    Mutant(
        "request of a certificate",
        f"{_PLANNING}/plan_agreement.py",
        "if not is_same(certificate.plan.request, known.request):",
        "if False:",
        f"{_TESTS}/planning/test_plan_agreement.py::test_a_certificate_for_other_words_than_the_requests_is_refused",
        is_quick=False,
    ),
    Mutant(
        "one signature per slot",
        f"{_COMMITTEE}/context.py",
        'return [] if known["digest"] == digest else None',
        "return []",
        f"{_TESTS}/committee/test_context.py::test_a_slot_is_signed_once_and_the_same_again",
    ),
    Mutant(
        "signature of an attestation",
        f"{_SETTLEMENT}/attestations.py",
        "    verify(member.signing_key, ATTESTATION_DOMAIN, payload, "
        "bytes.fromhex(signed.signature[2:]))\n",
        "",
        f"{_TESTS}/settlement/test_attestations.py::test_a15_only_the_member_itself_and_only_these_words",
    ),
    Mutant(
        "all that a member said",
        f"{_SETTLEMENT}/attestations.py",
        "return [one.signed for _, kept in sorted(self._kept.items()) for one in kept]",
        "return [kept[-1].signed for _, kept in sorted(self._kept.items())]",
        f"{_TESTS}/settlement/test_attestations.py::"
        "test_s48_what_a_quorum_rests_on_is_kept_and_shown_however_much_its_member_says",
    ),
    Mutant(
        "size of an attestation",
        f"{_SETTLEMENT}/attestations.py",
        "if len(payload) > limits.MAX_ATTESTATION_BYTES:",
        "if False:",
        f"{_TESTS}/settlement/test_attestations.py::"
        "test_s49_an_attestation_that_would_fill_all_proposals_is_refused",
    ),
    Mutant(
        "proposals in quick succession",
        f"{_SETTLEMENT}/settlement_agreement.py",
        "if now < state.heard_until.get(sender, 0.0):",
        "if False:",
        f"{_TESTS}/settlement/test_contradictions.py::"
        "test_s49_of_proposals_in_quick_succession_one_is_judged",
    ),
    Mutant(
        "age of a snapshot",
        "oracle/splitup_oracle/member/shell.py",
        "if latest - request.snapshot_sequence > limits.SNAPSHOTS_BACK:",
        "if False:",
        "tests/oracle/member/test_requested_snapshots.py::"
        "test_s47_a_request_names_one_of_the_latest_snapshots",
    ),
    Mutant(
        "quorum of a statement",
        f"{_SETTLEMENT}/attestations.py",
        "if len(members) < self._quorum:",
        "if False:",
        f"{_TESTS}/settlement/test_attestations.py::test_three_of_four_make_it_so_whatever_the_fourth_says",
    ),
    Mutant(
        "quorum before reveals",
        f"{_SETTLEMENT}/attestations.py",
        "return steps if count >= self._quorum else 0",
        "return steps",
        f"{_TESTS}/settlement/test_attestations.py::test_three_of_four_make_it_so_whatever_the_fourth_says",
        is_quick=False,
    ),
    Mutant(
        "signature of a commitments vote",
        f"{_SETTLEMENT}/commitments.py",
        "        self._context.check(sender, struct_hash, vote.signature)\n",
        "",
        f"{_TESTS}/settlement/test_commitment_agreement.py::test_votes_for_another_root_do_not_count_and_false_signatures_are_refused",
        is_quick=False,
    ),
    Mutant(
        "settlement from one's own evidence",
        f"{_SETTLEMENT}/proposals.py",
        "            if proposal.settlement_hash == result.settlement_hash:\n",
        "            if True:\n",
        f"{_TESTS}/settlement/test_proposals.py::"
        "test_a_proposal_is_signed_if_the_same_settlement_follows_from_our_evidence",
    ),
    Mutant(
        "settlement from what one had and a proposal adds",
        f"{_SETTLEMENT}/proposals.py",
        "        if proposal.settlement_hash != result.settlement_hash:\n",
        "        if False:\n",
        f"{_TESTS}/settlement/test_proposals.py::"
        "test_a_proposal_may_lack_what_came_later_and_nothing_else",
    ),
    Mutant(
        "slash by a ruling only",
        f"{_SETTLEMENT}/proof_of_sampling.py",
        "    if ruling is None:\n        outvoted",
        "    if ruling is None:\n        return Verdict(task, Outcome.LIED, (), (executor,))\n"
        "    if ruling is None:\n        outvoted",
        f"{_TESTS}/settlement/test_proof_of_sampling.py::"
        "test_without_a_ruling_numbers_decide_the_pay_and_nobody_is_punished",
    ),
    Mutant(
        "time of busy members",
        f"{_SETTLEMENT}/verification_rounds.py",
        "now - max(check.disputed_at, self._ruled_at) >= patience_s",
        "now - check.disputed_at >= patience_s",
        f"{_TESTS}/settlement/test_verdicts.py::"
        "test_many_lies_at_once_do_not_leave_members_without_the_time_to_convict",
    ),
    Mutant(
        "time of slow members",
        f"{_SETTLEMENT}/verification_rounds.py",
        "if check.disputed_at is None or verification.attestations.is_delayed(check.task):",
        "if check.disputed_at is None:",
        f"{_TESTS}/settlement/test_verdicts.py::"
        "test_members_that_are_slow_at_first_convict_a_liar_before_the_deadline",
    ),
    Mutant(
        "time of silent validators",
        f"{_SETTLEMENT}/task_checks.py",
        "now + min(share_s, self._compute_usual_s())",
        "now + self._compute_usual_s()",
        f"{_TESTS}/settlement/test_time_left.py::"
        "test_s41_silent_validators_do_not_leave_an_honest_executor_unpaid",
    ),
    Mutant(
        "time of slow validators",
        f"{_SETTLEMENT}/task_checks.py",
        "        elif self.closed_at is not None:\n            self.given_up |= ",
        "        else:\n            self.given_up |= late or ",
        f"{_TESTS}/settlement/test_time_left.py::"
        "test_a_slow_validator_is_heard_although_others_were_asked_meanwhile",
    ),
    Mutant(
        "late commitments of validators",
        f"{_SETTLEMENT}/task_checks.py",
        "if self.asked_at[v] < self.closed_at}",
        "if not self.closed_at}",
        f"{_TESTS}/settlement/test_task_checks.py::"
        "test_a_late_commitment_is_not_attested_once_we_said_that_reveals_are_due",
    ),
    Mutant(
        "time of silent members",
        f"{_SETTLEMENT}/verification_rounds.py",
        "        return not self._is_impossible(verification, check), False\n",
        "        return False, False\n",
        f"{_TESTS}/settlement/test_time_left.py::"
        "test_s41_a_ring_gains_nothing_by_a_task_that_takes_members_long",
    ),
    Mutant(
        "pay for what nobody could check in time",
        f"{_SETTLEMENT}/proof_of_sampling.py",
        "is_backed = 0 < len(contradicting)",
        "is_backed = 0 <= len(contradicting)",
        f"{_TESTS}/settlement/test_time_left.py::"
        "test_s41_a_liar_gains_nothing_by_silent_validators_and_a_task_that_takes_members_long[0]",
    ),
    Mutant(
        "reveals in a long verification",
        "node/splitup_node/settlement/reports.py",
        "        return self.deadline_s + limits.VERIFICATION_GRACE_S\n",
        "        return self.give_up_s\n",
        "tests/node/settlement/test_reports.py::"
        "test_s41_a_completion_is_revealed_as_long_as_members_may_wait_for_it",
        is_quick=False,
    ),
    Mutant(
        "reads in a long verification",
        "oracle/splitup_oracle/gateway/http_gateway.py",
        "self._compute_expiry_s(request.deadline, limits.VERIFICATION_GRACE_S)",
        "self._compute_expiry_s(request.deadline)",
        "tests/oracle/gateway/test_http_gateway.py::"
        "test_s41_drawn_tasks_are_read_as_long_as_members_may_wait_for_results",
    ),
    Mutant(
        "numbers of a validator",
        f"{_SETTLEMENT}/proof_of_sampling.py",
        "(right if found.outputs else wrong).append(result.validator)",
        "right.append(result.validator)",
        f"{_TESTS}/settlement/test_proof_of_sampling.py::"
        "test_members_of_another_class_judge_each_party_by_the_numbers_that_it_stored",
    ),
    Mutant(
        "stored outputs of a claim",
        "oracle/splitup_oracle/member/rulings.py",
        "        if missing or tuple(digest for _, digest in logs) != claim.outputs:\n",
        "        if missing:\n",
        "tests/oracle/member/test_rulings.py::"
        "test_across_classes_a_member_compares_what_the_executor_stored",
        is_quick=False,
    ),
    Mutant(
        "evidence of two votes",
        f"{_COMMITTEE}/equivocation.py",
        "        for vote in (first, second):\n"
        "            self._context.check(vote.member, compute_vote_hash(vote), vote.signature)\n",
        "",
        f"{_TESTS}/committee/test_equivocation.py::"
        "test_a19_evidence_counts_only_with_both_signatures",
    ),
    Mutant(
        "quorum of observations",
        "splitup/protocol/snapshots/observation_shares.py",
        "if len(observers) < context.view.quorum or any(",
        "if any(",
        f"{_TESTS}/snapshots/test_observation_shares.py::test_a_proposal_rests_on_a_quorum",
        is_quick=False,
    ),
    Mutant(
        "signature of an observation",
        "splitup/protocol/snapshots/observation_shares.py",
        "    context.scheme.verify(\n        member.signing_key,\n        OBSERVATION_DOMAIN,\n"
        "        observation.once(Observation.canonical_bytes),\n"
        "        bytes.fromhex(share.signature[2:]),\n    )\n",
        "",
        f"{_TESTS}/snapshots/test_observation_shares.py::"
        "test_an_observation_counts_as_its_member_signed_it",
        is_quick=False,
    ),
    Mutant(
        "more than f observers",
        "splitup/protocol/snapshots/snapshot_rules.py",
        "if len(seen) > tolerated and n in records)",
        "if n in records)",
        f"{_TESTS}/snapshots/test_snapshot_rules.py::test_a_node_is_in_when_more_observers_than_may_lie_list_it",
        is_quick=False,
    ),
    Mutant(
        "key of a heartbeat",
        "splitup/protocol/snapshots/liveness.py",
        "if node.record.signing_key != signing_key:",
        "if False:",
        f"{_TESTS}/snapshots/test_recent_blocks.py::"
        "test_a_heartbeat_counts_under_the_key_of_the_registry_alone",
        is_quick=False,
    ),
    Mutant(
        "age of a heartbeat",
        "splitup/protocol/snapshots/liveness.py",
        "if not self.heads.is_recent(heartbeat.block_hash, now):",
        "if False:",
        f"{_TESTS}/snapshots/test_recent_blocks.py::test_a15_a_block_of_another_chain_or_of_none_is_refused",
        is_quick=False,
    ),
    # ---- orders, frames, storage ----------------------------------------------------------------
    Mutant(
        "entry of a snapshot",
        "splitup/messages/snapshots.py",
        "merkle.check_proof(entries_root, count, shown.row, _hash_entry(shown.entry, {}), proof)",
        "pass",
        f"{_TESTS}/planning/test_validators.py::test_a15_entries_are_those_of_the_plans_snapshot",
        is_quick=False,
    ),
    Mutant(
        "header of a snapshot",
        "splitup/messages/snapshots.py",
        "if hash_words(_SNAPSHOT, *header).hex() != root[2:]:",
        "if False:",
        f"{_TESTS}/planning/test_validators.py::test_a15_entries_are_those_of_the_plans_snapshot",
        is_quick=False,
    ),
    Mutant(
        "audience of a signed message",
        "splitup/crypto/jws.py",
        "if claims.audience != audience:",
        "if False:",
        "tests/crypto/test_jws.py::test_bad_claims_are_refused_although_signed[change0]",
        is_quick=False,
    ),
    Mutant(
        "type of a signed message",
        "splitup/crypto/jws.py",
        "if _decode(header) != _header(typ, claims.issuer):",
        "if False:",
        "tests/crypto/test_jws.py::test_another_header_is_refused_although_signed[header0]",
        is_quick=False,
    ),
    Mutant(
        "age of a signed message",
        "splitup/crypto/jws.py",
        "if now_s is not None and claims.expires_at_s <= now_s - limits.CLOCK_SKEW_S:",
        "if False:",
        "tests/crypto/test_jws.py::test_bad_claims_are_refused_although_signed[change9]",
        is_quick=False,
    ),
    Mutant(
        "signed messages count once",
        "splitup/crypto/jws.py",
        "        if entry in self._open or claims.token_id in self._seen.get(claims.issuer, ()):",
        "        if False:",
        "tests/crypto/test_jws.py::test_a_token_is_used_once",
        is_quick=False,
    ),
    Mutant(
        "values of a manifest",
        "splitup/graph/manifest_rules.py",
        "decode_canonical(data, max_bytes=limits.MAX_MANIFEST_BYTES)",
        "decode_canonical(data, max_bytes=limits.MAX_MANIFEST_BYTES, max_values=2**30)",
        "tests/graph/test_manifest.py::test_s67_the_values_of_a_manifest_are_counted",
    ),
    Mutant(
        "edges of a manifest",
        "splitup/graph/manifest.py",
        "        return self.readers.get((task, port), [])",
        "        return Manifest.readers.func(self).get((task, port), [])",
        "tests/protocol/execution/test_routes.py::"
        "test_s67_a_models_edges_are_read_once_however_many_outputs_it_has",
    ),
    Mutant(
        "files of outputs",
        "splitup/cli/commands/run.py",
        ".replace('/', '%2F')",
        "",
        "tests/cli/test_run.py::test_s68_an_output_is_written_into_the_directory_that_was_given",
    ),
    Mutant(
        "words in a terminal",
        "splitup/cli/console.py",
        "yield Segment(printable_lines(segment.text), segment.style)",
        "yield segment",
        "tests/cli/test_console.py::test_s65_a_terminal_obeys_nobody_but_the_program",
    ),
    Mutant(
        "lines of a log",
        "splitup/cli/command.py",
        "    handler.addFilter(OneLine())\n",
        "",
        "tests/cli/test_command.py::test_a_program_that_logs_prints_no_warning_beside_its_log",
    ),
    Mutant(
        "owner of a device's session",
        "extras/gateway/splitup_gateway/split/sessions.py",
        "            if known.owner != owner or known.model is not model:",
        "            if False:",
        "extras/gateway/gateway_tests/split/test_sessions.py::test_a_session_belongs_to_its_key",
        is_quick=False,
    ),
    Mutant(
        "sessions of devices by key",
        "extras/gateway/splitup_gateway/split/sessions.py",
        "if not found.is_idle.is_set() and most <= counts[owner]:",
        "if not found.is_idle.is_set():",
        "extras/gateway/gateway_tests/split/test_sessions.py::"
        "test_s64_a_key_whose_sessions_all_compute_keeps_others_from_none",
        is_quick=False,
    ),
    Mutant(
        "connections of devices by key",
        "extras/gateway/splitup_gateway/split/server.py",
        "with hold_place(self._connections, principal, refusal):",
        'with hold_place(self._connections, "", refusal):',
        "extras/gateway/gateway_tests/split/test_sessions.py::"
        "test_s64_a_key_with_many_connections_keeps_others_from_none",
        is_quick=False,
    ),
    Mutant(
        "pages of the explorer by key",
        "extras/gateway/splitup_gateway/explorer_routes.py",
        "async with self._turns.hold(principal):",
        'async with self._turns.hold(""):',
        "extras/gateway/gateway_tests/explorer/test_explorer_routes.py::"
        "test_s66_a_key_that_reads_many_pages_keeps_them_from_no_other",
        is_quick=False,
    ),
    Mutant(
        "manifests that a client keeps",
        "splitup/client/models.py",
        "while len(self._models) > tuning.MAX_CACHED_MANIFESTS:",
        "while False:",
        "tests/client/test_models.py::test_s66_a_connection_keeps_the_latest_manifests",
    ),
    Mutant(
        "position of a device's rows",
        "extras/gateway/splitup_gateway/split/sessions.py",
        "    if request.position != wanted:",
        "    if False:",
        "extras/gateway/gateway_tests/split/test_sessions.py::test_ended_and_replayed_sessions_are_refused",
        is_quick=False,
    ),
    Mutant(
        "price of a device's rows",
        "extras/gateway/splitup_gateway/split/server.py",
        "charge.used = session.compute_cost()",
        "charge.used = 0",
        "extras/gateway/gateway_tests/split/test_sessions.py::test_steps_are_charged_and_the_rate_counts_texts",
        is_quick=False,
    ),
    Mutant(
        "length of an upload",
        "oracle/splitup_oracle/gateway/access.py",
        "if entry.length_bytes > _UPLOAD_BYTES[kind]:",
        "if False:",
        "tests/oracle/gateway/test_http_gateway.py::test_uploads_are_bounded_by_what_they_are",
        is_quick=False,
    ),
    Mutant(
        "digest of an upload",
        "oracle/splitup_oracle/gateway/access.py",
        "if entry.sha256 != match[kind]:",
        "if False:",
        "tests/oracle/gateway/test_http_gateway.py::test_other_upload_keys_are_refused",
        is_quick=False,
    ),
    Mutant(
        "author of a log",
        "oracle/splitup_oracle/gateway/access.py",
        "if not author:",
        "if False:",
        "tests/oracle/gateway/test_http_gateway.py::test_client_writes_inputs_and_reads_outputs",
        is_quick=False,
    ),
    Mutant(
        "length of a log",
        "oracle/splitup_oracle/gateway/access.py",
        "    if write.length_bytes > limit:",
        "    if False:",
        "tests/oracle/gateway/test_log_rights.py::test_a10_what_the_plan_does_not_give_is_refused",
        is_quick=False,
    ),
    Mutant(
        "digest of a download",
        "splitup/net/object_transfer.py",
        "if digest is None or digest.hexdigest() == expected_digest:",
        "if True:",
        "tests/net/test_object_transfer.py::test_f21_a_corrupted_answer_is_fetched_again",
        is_quick=False,
    ),
    Mutant(
        "private addresses",
        "splitup/net/endpoints.py",
        "if is_local and not allow_loopback:",
        "if False:",
        "tests/net/test_endpoints.py::test_a13_private_addresses_need_permission",
        is_quick=False,
    ),
    Mutant(
        "addresses never connected to",
        "splitup/net/endpoints.py",
        "if address in _METADATA or not (is_local or _is_public(address)):",
        "if False:",
        "tests/net/test_endpoints.py::test_a13_metadata_and_link_local_addresses_are_never_connected_to",
        is_quick=False,
    ),
    Mutant(
        "addresses of IPv4 inside those of IPv6",
        "splitup/net/endpoints.py",
        "address.ipv4_mapped is not None or address in _NAT64",
        "address.ipv4_mapped is not None",
        "tests/net/test_endpoints.py::test_s23_a_translated_private_address_needs_permission",
        is_quick=False,
    ),
    Mutant(
        "IPv6 that nobody was given",
        "splitup/net/endpoints.py",
        "isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST",
        "False",
        "tests/net/test_endpoints.py::test_s23_of_ipv6_only_what_iana_has_allotted_is_connected_to",
        is_quick=False,
    ),
    Mutant(
        "networks of IPv6 at the TCP relay",
        "extras/gateway/splitup_gateway/tcp_relay.py",
        "host = get_group(address)",
        "host = address",
        "extras/gateway/gateway_tests/serve/test_tcp_relay.py::"
        "test_s24_a_network_of_ipv6_counts_as_one_address",
        is_quick=False,
    ),
    Mutant(
        "slow connections of one address",
        "splitup/net/admission.py",
        "if (oldest := next(silent, None)) is None:",
        "if (oldest := None) is None:",
        "extras/gateway/gateway_tests/serve/test_hostile_clients.py::test_s24_slow_connections_stop_nobody",
        is_quick=False,
    ),
    Mutant(
        "owner of a lease",
        "splitup/client/leases.py",
        "if lease.principal in (None, waiter.principal) and lease.can_serve(waiter.steps, now)",
        "if lease.can_serve(waiter.steps, now)",
        "tests/client/test_leases.py::test_s21_what_is_cached_tells_of_ones_own_prompts_alone",
        is_quick=False,
    ),
    Mutant(
        "owner of an execution's times",
        "extras/gateway/splitup_gateway/timelines.py",
        "self._owners.get(execution_id) == principal",
        "execution_id in self._owners",
        "extras/gateway/gateway_tests/serve/test_generation.py::test_s21_times_are_shown_to_whose_texts_they_are_of",
        is_quick=False,
    ),
    Mutant(
        "keys that are created later",
        "extras/gateway/splitup_gateway/access.py",
        "            if not await self.has_keys():\n",
        "            if True:\n",
        "extras/gateway/gateway_tests/serve/test_hostile_clients.py::test_s22_a_key_that_is_created_closes_a_server_that_runs",
        is_quick=False,
    ),
    Mutant(
        "owner of a stream",
        "extras/gateway/splitup_gateway/streaming/streams.py",
        "if stream is None or stream.call.owner != owner:",
        "if stream is None:",
        "extras/gateway/gateway_tests/serve/apis/test_streams.py::test_s35_a_stream_is_read_by_its_key_alone",
        is_quick=False,
    ),
    Mutant(
        "files of streams",
        "extras/gateway/splitup_gateway/streaming/stream_files.py",
        "O_CLOEXEC | flags, 0o600)",
        "O_CLOEXEC | flags, 0o644)",
        "extras/gateway/gateway_tests/serve/streaming/test_kept_streams.py::test_s35_files_of_streams_are_private_and_few",
        is_quick=False,
    ),
    Mutant(
        "bytes of a key's streams",
        "extras/gateway/splitup_gateway/streaming/streams.py",
        "if len(ended) - place <= count and size <= most_bytes:",
        "if len(ended) - place <= count:",
        "extras/gateway/gateway_tests/serve/streaming/test_streams.py::test_s35_few_bytes_are_kept",
        is_quick=False,
    ),
    Mutant(
        "tensors of one execution",
        "splitup/protocol/execution/task_queue.py",
        "if largest.buffered_bytes <= execution.buffered_bytes + more:",
        "if largest:",
        "tests/protocol/execution/test_task_queue.py::"
        "test_s38_the_execution_with_the_most_tensors_gives_way_to_others",
    ),
    Mutant(
        "memory of tensors that gave way",
        "splitup/protocol/execution/task_queue.py",
        "            execution.lanes.clear()\n            execution.readers.clear()\n",
        "",
        "tests/protocol/execution/test_task_queue.py::"
        "test_s38_tensors_of_an_execution_that_gave_way_are_freed_at_once",
    ),
    Mutant(
        "tensors that are being fetched",
        f"{_EXECUTION}/task_queue.py",
        "        self._make_room(execution, nbytes)\n        self._count(execution, nbytes)\n",
        "",
        f"{_TESTS}/execution/test_task_queue.py::"
        "test_s50_tensors_that_are_being_fetched_count_as_those_that_wait",
    ),
    Mutant(
        "one fetch of a tensor",
        "node/splitup_node/execution/inbox.py",
        "if (execution.id, name) in self._fetching:",
        "if False:",
        "tests/node/execution/test_chunk_transfers.py::"
        "test_s50_an_input_that_is_announced_again_and_again_is_fetched_once",
        is_quick=False,
    ),
    Mutant(
        "inputs that are not stored",
        "node/splitup_node/execution/inbox.py",
        "except (NotStored, PeerFault) as fault:",
        "except ZeroDivisionError as fault:",
        "tests/node/execution/test_takeover.py::"
        "test_s51_a_tensor_that_is_not_stored_is_no_failure_of_who_reads_it",
        is_quick=False,
    ),
    Mutant(
        "logs of inputs that are damaged",
        "node/splitup_node/execution/catch_up.py",
        "except (NotStored, PeerFault) as fault:",
        "except ZeroDivisionError as fault:",
        "tests/node/execution/test_takeover.py::"
        "test_s51_a_damaged_log_is_no_failure_of_who_reads_it",
        is_quick=False,
    ),
    Mutant(
        "work of tasks that were given away",
        "node/splitup_node/execution/handovers.py",
        "execution.claims.keep_lost(part)",
        "pass",
        "tests/node/execution/test_takeover.py::"
        "test_s53_s61_what_was_computed_before_all_tasks_were_taken_away_is_committed_to",
        is_quick=False,
    ),
    Mutant(
        "work of executions that failed",
        "node/splitup_node/execution/execution_table.py",
        "execution.claims.keep_lost(part)",
        "pass",
        "tests/node/execution/test_takeover.py::"
        "test_s53_s61_what_was_computed_before_a_failure_is_committed_to",
        is_quick=False,
    ),
    Mutant(
        "tasks that come too late",
        "node/splitup_node/execution/kept/claims.py",
        "            elif task in own:\n",
        "            else:\n",
        "tests/node/execution/kept/test_claims.py::test_s60_a_task_that_comes_too_late_takes_nobodys_pay",
    ),
    Mutant(
        "tasks given away before the end",
        "node/splitup_node/execution/kept/claims.py",
        "        parts, own, claims = lost | dict(self._parts), self._list_own(), []\n",
        "        parts, own, claims = dict(self._parts), self._list_own(), []\n",
        "tests/node/execution/kept/test_claims.py::test_s60_the_final_end_covers_what_was_given_away",
    ),
    Mutant(
        "counts of each task",
        "node/splitup_node/execution/kept/claims.py",
        "[min(own)] if own else able.values()",
        "[min(own or able.values(), default=0)]",
        "tests/node/execution/kept/test_claims.py::"
        "test_s60_of_tasks_that_differ_in_their_steps_each_is_counted",
    ),
    Mutant(
        "takeovers of each count",
        "node/splitup_node/settlement/reports.py",
        "pair[1].takeovers, ",
        "",
        "tests/node/execution/kept/test_claims.py::"
        "test_s60_of_tasks_that_differ_in_their_steps_each_is_counted",
    ),
    Mutant(
        "all counts of a node",
        f"{_SETTLEMENT}/collected_commitments.py",
        "for _, held in counts if",
        "for _, held in counts[:1] if",
        f"{_TESTS}/settlement/test_unended.py::"
        "test_s60_a_node_answers_for_other_tasks_at_other_numbers_of_steps",
        is_quick=False,
    ),
    Mutant(
        "an end below the order",
        "node/splitup_node/execution/kept/claims.py",
        "if end.final and end.steps < max(self.ordered, self.delivered):",
        "if False:",
        "tests/node/execution/kept/test_claims.py::test_s63_an_end_below_what_the_client_ordered_is_no_end",
    ),
    Mutant(
        "an end below what others were asked",
        f"{_SETTLEMENT}/settlement_state.py",
        "n >= self.collected.asked and ",
        "",
        f"{_TESTS}/settlement/test_unended.py::test_s69_a_client_that_replaces_all_pays_what_it_had_signed_for",
        is_quick=False,
    ),
    Mutant(
        "answers of replaced nodes",
        f"{_SETTLEMENT}/settlement_state.py",
        "now < self.collected.answer_until and self.list_replaced()",
        "False",
        f"{_TESTS}/settlement/test_unended.py::test_s69_a_client_that_replaces_all_pays_what_it_had_signed_for",
        is_quick=False,
    ),
    Mutant(
        "takeovers that members pass on",
        "oracle/splitup_oracle/member/shell.py",
        "for signed in self.machine.list_replaced(node)]",
        "for signed in ()]",
        "tests/oracle/member/test_heartbeat_answers.py::test_s69_a_node_that_was_replaced_hears_of_it_and_others_do_not",
    ),
    Mutant(
        "what a replaced node was asked",
        "node/splitup_node/execution/handovers.py",
        "            self._table.listener.on_replaced(execution, signed)\n",
        "            pass\n",
        "tests/node/execution/test_takeover.py::test_s69_who_was_replaced_behind_its_back_hears_it_from_members",
        is_quick=False,
    ),
    Mutant(
        "who answers for a task",
        f"{_SETTLEMENT}/settlement_state.py",
        "self.certificate.plan, self.collected.list_taken(steps, commitments)",
        "self.certificate.plan, set(self.collected.takeovers)",
        f"{_TESTS}/settlement/test_unended.py::test_s60_a_node_answers_for_no_task_that_it_was_given_too_late",
        is_quick=False,
    ),
    Mutant(
        "tasks that a node said it answers for",
        f"{_SETTLEMENT}/proof_of_sampling.py",
        "planned[t] == node and is_given_away(completion, plan, t)",
        "is_given_away(completion, plan, t)",
        f"{_TESTS}/settlement/test_unended.py::test_s60_who_says_that_it_answers_for_a_task_and_does_not_pays_for_it",
        is_quick=False,
    ),
    Mutant(
        "final ends alone",
        f"{_SETTLEMENT}/collected_commitments.py",
        "one.is_final and one.roots",
        "one.roots",
        f"{_TESTS}/settlement/test_unended.py::test_s63_commitments_to_an_interim_end_complete_no_final_one",
        is_quick=False,
    ),
    Mutant(
        "newcomers are waited for",
        f"{_SETTLEMENT}/settlement_state.py",
        "known=known, ",
        "",
        f"{_TESTS}/settlement/test_unended.py::test_s63_members_wait_for_who_took_a_task_over",
        is_quick=False,
    ),
    Mutant(
        "takeovers that come too late",
        "node/splitup_node/settlement/reports.py",
        "                    stop()\n",
        "                    pass\n",
        "tests/node/settlement/test_reports.py::test_s63_who_takes_a_task_over_tells_the_members_and_stops_when_they_have_agreed",
        is_quick=False,
    ),
    Mutant(
        "log of a replaced node",
        "oracle/splitup_oracle/gateway/access.py",
        "if executor_map.has_run(write.task, node)",
        "if executor_map.executors[write.task : write.task + 1] == (node,)",
        "tests/oracle/gateway/test_log_rights.py::test_s61_a_replaced_node_may_store_what_it_has_computed",
    ),
    Mutant(
        "the rest of a failed execution",
        "node/splitup_node/execution/execution_table.py",
        "            await writer.finish()\n",
        "            pass\n",
        "tests/node/execution/test_takeover.py::test_s53_s61_what_was_computed_before_a_failure_is_committed_to",
        is_quick=False,
    ),
    Mutant(
        "signature under logged inputs",
        "node/splitup_node/execution/catch_up.py",
        "if entry.step < execution.claims.asked:",
        "if True:",
        "tests/node/execution/test_takeover.py::test_s62_no_step_is_run_that_the_client_has_not_signed_for",
        is_quick=False,
    ),
    Mutant(
        "last input for a newcomer",
        "splitup/client/execution/input_sender.py",
        "self._writer.get_unstored(CLIENT, port) or latest",
        "self._writer.get_unstored(CLIENT, port)",
        "tests/client/execution/test_input_sender.py::test_s62_who_takes_over_gets_the_last_input_although_it_is_stored",
    ),
    Mutant(
        "successors come first",
        "node/splitup_node/settlement/reports.py",
        "        if report.is_held:\n",
        "        if False:\n",
        "tests/node/settlement/test_reports.py::"
        "test_s53_what_a_failed_execution_earned_is_told_when_the_deadline_is_near",
    ),
    Mutant(
        "zeros of a segment",
        f"{_EXECUTION}/log_segments.py",
        'self._check(size <= limits.SEGMENT_BYTES, "has too many bytes, or zeros")',
        "pass",
        f"{_TESTS}/execution/test_log_segments.py::test_s52_impossible_zeros_are_refused",
    ),
    Mutant(
        "times that a node reports",
        "splitup/client/execution/session.py",
        "kept <= self.plan.request.steps * len(self.plan.tasks)",
        "kept",
        "tests/client/execution/test_session.py::"
        "test_s39_a_node_that_reports_times_for_ever_takes_no_memory",
    ),
    Mutant(
        "memory of a template",
        "splitup/client/text/tokenizer_process.py",
        "limit_growth(tuning.TEMPLATE_MEMORY_BYTES)",
        "limit_growth(2**40)",
        "tests/client/text/test_tokenizer.py::test_s37_a_template_s_memory_is_bounded",
    ),
    Mutant(
        "length of what a template makes",
        "splitup/client/text/tokenizer_process.py",
        'len(text) > question["render"]',
        "False",
        "tests/client/text/test_tokenizer.py::"
        "test_s37_what_a_template_makes_is_refused_before_it_is_sent",
    ),
    Mutant(
        "memory of forgotten streams",
        "extras/gateway/splitup_gateway/streaming/streams.py",
        "rest_s, self._forget, ended.id)",
        "rest_s, self._forget, ended)",
        "extras/gateway/gateway_tests/serve/streaming/test_streams.py::test_s35_what_is_forgotten_leaves_memory",
    ),
    Mutant(
        "turns for leases by key",
        "splitup/client/leases.py",
        "self._served.get(one.principal, 0), one",
        "0, one",
        "tests/client/test_leases.py::test_s36_a_key_that_floods_waits_for_its_own_requests",
    ),
    Mutant(
        "times to come back by key",
        "splitup/client/queueing.py",
        "self._due[principal] = due",
        'self._due = {name: due for name in (*self._due, principal, "key bob")}',
        "tests/client/test_leases.py::test_s36_who_is_refused_often_makes_nobody_else_come_later",
    ),
    Mutant(
        "a charge that is closed once",
        "extras/gateway/splitup_gateway/api_keys.py",
        "connection.execute(_CHARGES.delete().where(this)).rowcount != 1",
        "False",
        "extras/gateway/gateway_tests/serve/test_api_keys.py::test_a_budget_holds_under_concurrent_charges",
        is_quick=False,
    ),
    Mutant(
        "steps of earlier requests",
        "extras/gateway/splitup_gateway/charges.py",
        "manifest.cost_micro_usdc(last - order.first)",
        "manifest.cost_micro_usdc(last)",
        "extras/gateway/gateway_tests/serve/apis/test_charges.py::test_an_answer_whose_server_is_killed_costs_what_is_settled",
        is_quick=False,
    ),
    Mutant(
        "what a second server charged",
        "extras/gateway/splitup_gateway/api_keys.py",
        "values(amount_micro_usdc=raised)",
        "values(server=server)",
        "extras/gateway/gateway_tests/serve/apis/test_charges.py::test_a_stream_whose_servers_are_killed_twice_is_charged_once",
        is_quick=False,
    ),
    Mutant(
        "one wait for an execution",
        "splitup/storage/log_patience.py",
        "< ends and",
        "< self._monotonic() + 1 and",
        "tests/storage/test_log_patience.py::test_an_execution_is_waited_for_once",
    ),
    Mutant(
        "no wait after the deadline",
        "splitup/storage/log_patience.py",
        " and self._now_s() < last_s",
        "",
        "tests/storage/test_log_patience.py::test_one_reader_after_the_other_waits_no_longer_after_the_deadline",
    ),
    Mutant(
        "attempts that failed",
        "extras/gateway/splitup_gateway/generation.py",
        "not await charge.cover(lost)",
        "False",
        "extras/gateway/gateway_tests/serve/test_generation.py::test_all_attempts_are_charged_and_shown",
        is_quick=False,
    ),
    Mutant(
        "late evidence while members agree",
        "splitup/protocol/settlement/settlement_agreement.py",
        "            commands += self._proposals.judge(state, phase, sender, found)\n",
        "",
        "tests/protocol/settlement/test_late_answers.py::test_s44_a_member_that_proposes_with_an_answer_each_time_does_not_use_up_the_rounds",
        is_quick=False,
    ),
    Mutant(
        "one member's word against others",
        "splitup/protocol/settlement/verification_rounds.py",
        "is_divided = any(doubts) or stated > 1",
        "is_divided = any(doubts)",
        "tests/protocol/settlement/test_outsiders.py::test_s45_a_member_that_tells_others_different_results_does_not_divide_them",
    ),
    Mutant(
        "statements of a packed attestation",
        "splitup/protocol/committee/settlement_proposals.py",
        "len(set(numbers)) != len(numbers) or ",
        "",
        "tests/protocol/committee/test_settlement_proposals.py::test_s42_an_attestation_unpacks_to_no_more_than_its_proposal_holds",
    ),
    Mutant(
        "room for every liar",
        "splitup/messages/verification.py",
        "Field(max_length=limits.MAX_ASKED + 1)",
        "Field(max_length=limits.MAX_ASKED)",
        "tests/messages/test_largest.py::test_s42_every_validator_of_a_task_may_be_found_lying_with_its_executor",
    ),
    Mutant(
        "signature of a frame",
        "splitup/net/signed_frames.py",
        "        verify_raw(signing_key, seal.signed, seal.signature)\n",
        "",
        "tests/net/test_signed_frames.py::test_a_bundle_carries_its_frames_under_one_signature",
        is_quick=False,
    ),
)


# ---- running -------------------------------------------------------------------------------------


def find_moved(mutant: Mutant, root: Path = ROOT) -> str:
    """Return what is wrong with a mutant's text or test, or ""."""
    file = root / mutant.path
    count = file.read_text().count(mutant.text) if file.is_file() else 0
    if count != 1:
        return f"{mutant.name}: its text stands {count} times in {mutant.path}:\n{mutant.text}"
    test, _, function = mutant.test.partition("::")
    source = (root / test).read_text() if (root / test).is_file() else ""
    if f"def {function.partition('[')[0]}(" not in source:
        return f"{mutant.name}: there is no test {mutant.test}"
    return ""


@contextmanager
def copy_tree() -> Iterator[Path]:
    """Copy what tests import into a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "e2e", "node_modules")
            shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
        shutil.copy(ROOT / "conftest.py", root)
        for part in LINKED:
            (root / part).symlink_to(ROOT / part)
        yield root


def run_test(root: Path, test: str) -> bool:
    """Run tests in a fork, with our code from ``root``; return whether they pass."""
    output = root / "output.txt"
    child = os.fork()
    if child == 0:
        _run_here(root, test, output)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise RuntimeError(f"{test} could not be run:\n{output.read_text()[-2000:]}")
    return code == 0


def _run_here(root: Path, test: str, output: Path) -> NoReturn:
    """Run tests in this process, which is a fork, and end it."""
    code = 99
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(root)
        extras = [path.name for path in (root / "extras").iterdir() if path.is_dir()]
        parts = ("", "node", "oracle", "deploy", *(f"extras/{name}" for name in extras))
        paths = [str(root / part) for part in parts]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        import pytest

        code = int(pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *test.split()]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def try_mutant(root: Path, mutant: Mutant) -> bool:
    """Return whether the mutant's test fails without the protection."""
    file = root / mutant.path
    whole = file.read_text()
    try:
        file.write_text(whole.replace(mutant.text, mutant.without))
        return not run_test(root, mutant.test)
    finally:
        file.write_text(whole)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Takes out protections, one after the other.")
    parser.add_argument("names", nargs="*", help="the protections to take out; default all")
    parser.add_argument("--quick", action="store_true", help="only those with a quick test")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth of them")
    options = parser.parse_args(arguments)
    chosen = [
        m
        for m in MUTANTS
        if (not options.names or m.name in options.names) and (m.is_quick or not options.quick)
    ][:: options.every]
    moved = [text for mutant in chosen if (text := find_moved(mutant))]
    if moved:
        print(*moved, sep="\n")
        return 1
    for name in PRELOADED:
        importlib.import_module(name)
    sys.dont_write_bytecode = False
    failed = 0
    with copy_tree() as root:
        if not run_test(root, " ".join(sorted({mutant.test for mutant in chosen}))):
            print("the tests fail before anything is taken out")
            return 1
        sys.dont_write_bytecode = True  # of what is changed and restored within a second
        width = max(len(mutant.name) for mutant in chosen)
        for mutant in chosen:
            begun = time.monotonic()
            killed = try_mutant(root, mutant)
            failed += not killed
            seconds = time.monotonic() - begun
            word = "killed" if killed else "NOT KILLED"
            print(f"{mutant.name:{width}}  {word:10}  {seconds:5.1f} s  {mutant.test}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} protections are held by their tests")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
