"""What a stranger's message costs, and where a request is sent."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import SETTLEMENT, TESTS, Mutant

MUTANTS: Final = (
    Mutant(
        "redirects",
        "splitup/core/http_session.py",
        "if 300 <= response.status < 400:",
        "if False:",
        "tests/chain/test_rpc.py::test_s97_an_endpoint_that_redirects_does_not_answer",
    ),
    Mutant(
        "one place of HTTP sessions",
        "splitup/chain/rpc.py",
        "self._session = open_session(raise_for_status=True)",
        "self._session = ClientSession(raise_for_status=True)",
        "tests/core/test_layers.py::test_s97_one_place_makes_http_sessions",
    ),
    Mutant(
        "numbers beyond a table",
        "splitup/cpu/row_copies.py",
        '            asm.jump("jge", "zeros")\n',
        "",
        "tests/cpu/test_row_copies.py::test_rows_that_numbers_name_are_copied",
        is_quick=False,
    ),
    Mutant(
        "bytes of a task's ports",
        "splitup/graph/manifest_rules.py",
        "if nbytes > limits.MAX_TENSOR_BYTES:",
        "if False:",
        "tests/graph/test_manifest.py::test_s74_a_task_has_no_more_bytes_at_once_than_a_node_keeps",
    ),
    Mutant(
        "bytes of one pass",
        "splitup/graph/step_groups.py",
        "self.to_run and self._bytes + sum(map(len, tensors)) > tuning.MERGE_INPUT_BYTES",
        "False",
        "tests/graph/test_step_groups.py::test_s74_steps_that_take_one_pass_have_a_number_of_bytes",
    ),
    Mutant(
        "one answer for many takeovers",
        "node/splitup_node/node.py",
        "        if key in self._untold:\n",
        "        if False:\n",
        "tests/node/test_answers.py::test_s78_a_node_tells_of_many_takeovers_in_few_messages",
    ),
    Mutant(
        "one watch of an execution",
        "node/splitup_node/node.py",
        "        if execution.id not in self._watched:\n",
        "        if True:\n",
        "tests/node/test_answers.py::"
        "test_s82_a_node_watches_an_execution_once_however_many_tasks_it_takes_over",
    ),
    Mutant(
        "tasks of many numbers of steps",
        "splitup/protocol/settlement/collected_commitments.py",
        "if other.get(node) is one:",
        "if False:",
        "tests/protocol/settlement/test_many_numbers.py::"
        "test_s80_hundreds_of_numbers_cost_no_more_than_the_messages_that_name_them",
    ),
    Mutant(
        "one look at many commitments",
        "splitup/protocol/settlement/settlement_agreement.py",
        "state.verification is not None or state.is_late(self._context.timestamp_s)",
        "state.verification is not None",
        "tests/protocol/settlement/test_many_numbers.py::"
        "test_s80_commitments_near_the_deadline_are_looked_at_together",
    ),
    Mutant(
        "routes of many takeovers",
        "node/splitup_node/execution/kept/routing.py",
        "                self.stale.setdefault(source, set()).add(port)\n",
        "                self._connect(self._outlets[source][port])\n",
        "tests/node/execution/kept/test_routing.py::"
        "test_s81_takeovers_do_not_have_the_graph_looked_through_for_each",
    ),
    Mutant(
        "answers to probes",
        "node/splitup_node/execution/inbox.py",
        "        if (wait_s := pause.until - loop.time()) > 0:\n",
        "        if (wait_s := 0.0) > 0:\n",
        "tests/node/execution/test_inbox.py::test_s83_probes_in_quick_succession_get_one_answer",
    ),
    Mutant(
        "accounts of strangers on the chain",
        "oracle/splitup_oracle/gateway/sources.py",
        '            least = await self._chain.call("nodes", "minStake", 1)\n',
        "            self._strangers.release()\n"
        '            least = await self._chain.call("nodes", "minStake", 1)\n',
        "tests/oracle/gateway/test_sources.py::"
        "test_s84_accounts_of_strangers_are_looked_up_a_few_at_a_time",
    ),
    Mutant(
        "one reading of the nodes' keys",
        "oracle/splitup_oracle/gateway/sources.py",
        "        async with self._reading_keys:\n",
        "        if True:\n",
        "tests/oracle/gateway/test_sources.py::"
        "test_s84_keys_of_nodes_are_read_once_however_many_strangers_ask",
    ),
    Mutant(
        "orders that nobody signed",
        "node/splitup_node/settlement/verifier.py",
        "        committee = await self.committees.check_certificate(order.certificate)\n",
        '        await self._context.cache.fetch_manifest("")\n'
        "        committee = await self.committees.check_certificate(order.certificate)\n",
        "tests/node/settlement/test_verifier.py::"
        "test_s79_an_order_costs_no_manifest_before_the_committee_has_signed_it",
    ),
    Mutant(
        "room for a member's journal",
        "oracle/splitup_oracle/member/rulings.py",
        "                        check_space(path, len(tensor))\n",
        "",
        "tests/oracle/member/test_rulings.py::"
        "test_s77_logs_do_not_fill_the_disk_of_a_members_journal",
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
    Mutant(
        "template of a tokenizer",
        "splitup/client/models.py",
        "self._tokenizers.get((info.tokenizer_digest, info.chat))",
        "next(iter(self._tokenizers.values()), None)",
        "tests/client/test_models.py::"
        "test_s103_a_strangers_template_runs_in_no_other_models_process",
    ),
    Mutant(
        "turns at a tokenizer",
        "splitup/client/text/tokenizer.py",
        " here.hold(principal)",
        ' here.hold("")',
        "tests/client/text/test_tokenizer.py::test_s104_texts_of_one_key_hold_up_no_other",
    ),
    Mutant(
        "turns at grammars",
        "splitup/client/text/grammar.py",
        "self._turns.hold(principal)",
        'self._turns.hold("")',
        "tests/client/text/test_grammar.py::test_s104_grammars_of_one_key_hold_up_no_other",
    ),
    Mutant(
        "texts under grammars",
        "splitup/client/text/grammar_process.py",
        "next(each for each in entries if each[0] == largest)",
        "next(iter(entries))",
        "tests/client/text/test_grammar.py::test_s104_texts_of_one_key_displace_no_others",
    ),
    Mutant(
        "long answers in pieces",
        "extras/gateway/splitup_gateway/apis/encoding.py",
        "        await asyncio.sleep(0)\n",
        "",
        "extras/gateway/gateway_tests/serve/apis/test_encoding.py::"
        "test_s105_a_long_answer_is_written_while_others_go_on",
        is_quick=False,
    ),
    Mutant(
        "files of long answers",
        "extras/gateway/splitup_gateway/streaming/kept_streams.py",
        "if self.size > tuning.STREAM_FILE_BYTES:",
        "if False:",
        "extras/gateway/gateway_tests/serve/streaming/test_kept_streams.py::"
        "test_s105_a_long_answer_in_one_piece_has_no_file",
    ),
    Mutant(
        "texts that cannot be",
        "extras/gateway/splitup_gateway/preparing.py",
        "    check_options(model, prepared.texts[0])  # which all have\n",
        "",
        "extras/gateway/gateway_tests/serve/apis/test_charges.py::"
        "test_s106_what_cannot_be_answered_opens_no_execution",
        is_quick=False,
    ),
    Mutant(
        "time of large bodies",
        "splitup/core/places.py",
        "            await asyncio.sleep(self._rests_until.get(group, 0.0) - self._clock())\n",
        "",
        "extras/gateway/gateway_tests/serve/test_hostile_clients.py::"
        "test_s111_who_sends_much_to_parse_is_waited_for_by_nobody_else",
        is_quick=False,
    ),
    Mutant(
        "results before the draw",
        f"{SETTLEMENT}/settlement_state.py",
        "        if self.verification is None:\n            raise Unavailable(",
        "        if False:\n            raise Unavailable(",
        f"{TESTS}/settlement/test_before_the_draw.py::"
        "test_s112_before_the_draw_a_node_leaves_nothing_in_a_members_memory",
    ),
    Mutant(
        "looks at open executions",
        "node/splitup_node/settlement/reports.py",
        "await asyncio.sleep(max(tuning.REPORT_RETRY_S, pause_s))",
        "await asyncio.sleep(tuning.REPORT_RETRY_S)",
        "tests/node/settlement/test_reports.py::"
        "test_s113_an_execution_that_stays_open_takes_few_calls_of_the_endpoint",
    ),
    Mutant(
        "parties of an attestation",
        f"{SETTLEMENT}/settlement_agreement.py",
        "        state.verification.check_attested(signed.attestation)\n",
        "",
        f"{TESTS}/settlement/test_before_the_draw.py::"
        "test_s115_a_member_says_of_an_execution_no_more_than_its_draw_asks",
    ),
    Mutant(
        "digests of a result",
        "splitup/messages/verification.py",
        "    validator: AddressField\n"
        "    inputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)\n",
        "    validator: AddressField\n    inputs: tuple[DigestField, ...]\n",
        f"{TESTS}/settlement/test_before_the_draw.py::"
        "test_s112_a_result_has_no_more_digests_than_a_task_has_ports",
    ),
    Mutant(
        "length of a notice",
        "node/splitup_node/committee/committee_client.py",
        "max_bytes=limits.DUE_NOTICE_BYTES + len(own) * limits.HELD_BYTES,",
        "max_bytes=limits.MAX_ATTESTATION_BYTES,",
        "tests/node/settlement/test_reports.py::"
        "test_s116_a_member_answers_a_waiting_node_no_more_than_it_asked",
    ),
    Mutant(
        "times that a member has no plan",
        "splitup/client/market/plan_requests.py",
        "await asyncio.sleep(0 if waited_s > _PAUSE_S else _PAUSE_S)",
        "await asyncio.sleep(0)",
        "tests/client/market/test_plan_requests.py::"
        "test_s116_a_member_that_knows_no_plan_at_once_is_asked_now_and_then",
    ),
    Mutant(
        "length of a plan",
        "splitup/client/market/plan_requests.py",
        "limits.PLAN_BYTES + wanted.task_count * limits.PLAN_TASK_BYTES",
        "limits.HTTP_BODY_BYTES",
        "tests/client/market/test_plan_requests.py::"
        "test_s116_a_plan_has_no_more_bytes_than_its_model_has_tasks_for",
    ),
    Mutant(
        "length of a stranger's body",
        "splitup/net/http_server.py",
        "        await admission.wait_turn(request, length // tuning.STRANGER_BYTES)\n",
        "",
        "tests/net/test_admission.py::test_s117_a_strangers_body_costs_turns_by_its_length",
    ),
    Mutant(
        "turns of a known party",
        "splitup/net/http_server.py",
        "                await stack.enter_async_context(admission.known_turns.hold(key))\n",
        "",
        "tests/net/test_admission.py::"
        "test_s117_large_bodies_of_a_known_party_wait_for_each_other_only",
    ),
    Mutant(
        "extent of a commitment",
        f"{SETTLEMENT}/settlement_state.py",
        "            check_extent(commitment, self.certificate.plan)\n",
        "            pass\n",
        f"{TESTS}/settlement/test_commitment_agreement.py::"
        "test_s118_a_commitment_holds_no_more_than_its_nodes_tasks_need",
    ),
    Mutant(
        "takeovers of a known name",
        f"{SETTLEMENT}/settlement_state.py",
        "            if signed != known:  #",
        "            if known is None:  #",
        f"{TESTS}/settlement/test_commitment_agreement.py::"
        "test_s118_a_commitment_holds_no_more_than_its_nodes_tasks_need",
    ),
    Mutant(
        "uploads of an account",
        "oracle/splitup_oracle/gateway/http_gateway.py",
        "self._upload_quota.take(account, missing, self._now_s())",
        "self._upload_quota.take(key, missing, self._now_s())",
        "tests/oracle/gateway/test_strangers.py::"
        "test_s119_an_account_stores_no_more_by_having_many_keys",
    ),
    Mutant(
        "encoding of an answer",
        "oracle/splitup_oracle/member/http_server.py",
        "return _json(message.once(_encode))",
        "return _json(_encode(message))",
        "tests/oracle/member/test_http_answers.py::"
        "test_s125_what_strangers_ask_for_is_encoded_once",
    ),
    Mutant(
        "time of large messages of devices",
        "extras/gateway/splitup_gateway/split/server.py",
        "await self._access.parse(key, message.data, decode)",
        "decode(message.data)",
        "extras/gateway/gateway_tests/split/test_sessions.py::"
        "test_s120_a_keys_large_messages_are_parsed_in_turns",
        is_quick=False,
    ),
    Mutant(
        "readings of a call",
        "extras/gateway/splitup_gateway/apis/tools.py",
        "if not is_end and not self._has_end(text):",
        "if not is_end and not text.endswith('}'):",
        "extras/gateway/gateway_tests/serve/apis/test_tools.py::"
        "test_s124_a_bare_call_is_read_once_however_many_objects_it_has",
        is_quick=False,
    ),
    Mutant(
        "arguments of calls",
        "extras/gateway/splitup_gateway/apis/requests.py",
        "check_structure(texts, max_growth=limits.DENSE_GROWTH)",
        "pass",
        "extras/gateway/gateway_tests/serve/apis/test_tools.py::"
        "test_s121_arguments_of_calls_are_no_larger_together_than_a_message",
        is_quick=False,
    ),
    Mutant(
        "time of conversations",
        "extras/gateway/splitup_gateway/apis/requests.py",
        "        _ = self.template_messages\n",
        "",
        "extras/gateway/gateway_tests/serve/apis/test_requests.py::"
        "test_s121_a_request_is_converted_where_it_is_parsed[/v1/chat/completions]",
        is_quick=False,
    ),
    Mutant(
        "bytes of large requests",
        "extras/gateway/splitup_gateway/access.py",
        "if theirs.size and theirs.size + size > MOST_BYTES_OF_ONE:",
        "if False:",
        "extras/gateway/gateway_tests/serve/test_hostile_clients.py::"
        "test_s122_a_key_fills_no_memory_by_large_requests_that_wait",
        is_quick=False,
    ),
    Mutant(
        "one count of holders",
        "extras/gateway/splitup_gateway/explorer/descriptions.py",
        "snapshot.once(_count_residents) if",
        "_count_residents(snapshot) if",
        "extras/gateway/gateway_tests/explorer/test_views.py::"
        "test_s131_holders_are_counted_once_for_each_list_of_nodes",
        is_quick=False,
    ),
)
