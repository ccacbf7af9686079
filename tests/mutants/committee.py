"""What members sign and agree on."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import COMMITTEE, PLANNING, SETTLEMENT, TESTS, Mutant

MUTANTS: Final = (
    Mutant(
        "manifests of models in use",
        "splitup/protocol/committee/context.py",
        "next(each for each in self._manifests if each not in self._planned)",
        "next(iter(self._manifests))",
        f"{TESTS}/committee/test_context.py::test_s94_strangers_models_displace_none_in_use",
    ),
    Mutant(
        "use of a manifest",
        "splitup/protocol/planning/plan_agreement.py",
        "        self._context.contents.note_plan(request.model_id)\n",
        "",
        f"{TESTS}/planning/test_plan_agreement.py::"
        "test_s94_the_manifest_of_a_planned_execution_is_kept",
    ),
    Mutant(
        "manifests that are fetched ahead",
        "oracle/splitup_oracle/member/service.py",
        "        most //= 2",
        "        pass",
        "tests/oracle/member/test_latest_models.py::"
        "test_s94_of_too_many_models_the_latest_are_fetched_and_no_retired_one",
    ),
    Mutant(
        "quorum of a certificate",
        f"{COMMITTEE}/certificates.py",
        "    _check_quorum(plan_hash, certificate.signatures, committee, scheme)\n",
        "",
        f"{TESTS}/committee/test_certificates.py::test_every_part_is_bound",
    ),
    Mutant(
        "chain of a certificate",
        f"{COMMITTEE}/certificates.py",
        "if plan.request.chain_id != committee.domain.chain_id:",
        "if False:",
        f"{TESTS}/committee/test_certificates.py::test_malformed_plans_are_refused_whoever_signed_them",
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
        f"{COMMITTEE}/certificates.py",
        "if scheme.compute_seed(signature) != seed:",
        "if False:",
        f"{TESTS}/committee/test_certificates.py::test_draws_are_bound_to_their_commitments",
    ),
    Mutant(
        "randomness of a plan or draw",
        f"{COMMITTEE}/certificates.py",
        "    scheme.verify_threshold(committee.group_key, RANDOMNESS_DOMAIN, alpha, signature)\n",
        "",
        f"{TESTS}/committee/test_certificates.py::test_a_quorum_cannot_choose_the_seed",
        is_quick=False,
    ),
    Mutant(
        "draw over the commitments",
        f"{SETTLEMENT}/draws.py",
        "        if not state.rests_on_chain(draw):\n            return\n",
        "",
        f"{TESTS}/settlement/test_draws.py::test_a_draw_of_another_member_is_taken_if_it_rests_on_our_chain",
    ),
    Mutant(
        "a stake that is not locked",
        f"{SETTLEMENT}/chain_commitments.py",
        " if locked.get(node)}",
        "}",
        f"{TESTS}/settlement/test_commitments.py::test_s19_a_node_without_free_stake_costs_nobody_else_the_pay",
    ),
    Mutant(
        "request of a certificate",
        f"{PLANNING}/plan_agreement.py",
        "if not is_same(certificate.plan.request, known.request):",
        "if False:",
        f"{TESTS}/planning/test_plan_agreement.py::test_a_certificate_for_other_words_than_the_requests_is_refused",
        is_quick=False,
    ),
    Mutant(
        "one signature per slot",
        f"{COMMITTEE}/context.py",
        'return [] if known["digest"] == digest else None',
        "return []",
        f"{TESTS}/committee/test_context.py::test_a_slot_is_signed_once_and_the_same_again",
    ),
    Mutant(
        "signature of an attestation",
        f"{SETTLEMENT}/attestations.py",
        "    verify(member.signing_key, ATTESTATION_DOMAIN, payload, "
        "bytes.fromhex(signed.signature[2:]))\n",
        "",
        f"{TESTS}/settlement/test_attestations.py::test_a15_only_the_member_itself_and_only_these_words",
    ),
    Mutant(
        "signature of a notice",
        f"{SETTLEMENT}/attestations.py",
        "    verify(member.signing_key, _NOTICE_DOMAIN, payload, signature)\n",
        "",
        f"{TESTS}/settlement/test_attestations.py::"
        "test_a_node_reveals_by_notices_of_a_quorum_that_its_members_signed",
    ),
    Mutant(
        "all that a member said",
        f"{SETTLEMENT}/attestations.py",
        "return [one.signed for _, kept in sorted(self._kept.items()) for one in kept]",
        "return [kept[-1].signed for _, kept in sorted(self._kept.items())]",
        f"{TESTS}/settlement/test_attestations.py::"
        "test_s48_what_a_quorum_rests_on_is_kept_and_shown_however_much_its_member_says",
    ),
    Mutant(
        "size of an attestation",
        f"{SETTLEMENT}/attestations.py",
        "if len(payload) > limits.MAX_ATTESTATION_BYTES:",
        "if False:",
        f"{TESTS}/settlement/test_attestations.py::"
        "test_s49_an_attestation_that_would_fill_all_proposals_is_refused",
    ),
    Mutant(
        "proposals in quick succession",
        f"{SETTLEMENT}/settlement_agreement.py",
        "if now < state.heard_until.get(sender, 0.0):",
        "if False:",
        f"{TESTS}/settlement/test_contradictions.py::"
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
        f"{SETTLEMENT}/attestations.py",
        "if len(members) < self._quorum:",
        "if False:",
        f"{TESTS}/settlement/test_attestations.py::test_three_of_four_make_it_so_whatever_the_fourth_says",
    ),
    Mutant(
        "quorum before reveals",
        f"{SETTLEMENT}/attestations.py",
        "return steps if count >= quorum else 0",
        "return steps",
        f"{TESTS}/settlement/test_attestations.py::test_three_of_four_make_it_so_whatever_the_fourth_says",
        is_quick=False,
    ),
    Mutant(
        "signature of a commitments vote",
        f"{SETTLEMENT}/commitments.py",
        "        self._context.check(sender, struct_hash, vote.signature)\n",
        "",
        f"{TESTS}/settlement/test_commitment_agreement.py::test_votes_for_another_root_do_not_count_and_false_signatures_are_refused",
        is_quick=False,
    ),
    Mutant(
        "settlement from one's own evidence",
        f"{SETTLEMENT}/proposals.py",
        "            if proposal.settlement_hash == result.settlement_hash:\n",
        "            if True:\n",
        f"{TESTS}/settlement/test_proposals.py::"
        "test_a_proposal_is_signed_if_the_same_settlement_follows_from_our_evidence",
    ),
    Mutant(
        "settlement from what one had and a proposal adds",
        f"{SETTLEMENT}/proposals.py",
        "        if proposal.settlement_hash != result.settlement_hash:\n",
        "        if False:\n",
        f"{TESTS}/settlement/test_proposals.py::"
        "test_a_proposal_may_lack_what_came_later_and_nothing_else",
    ),
    Mutant(
        "slash by a ruling only",
        f"{SETTLEMENT}/proof_of_sampling.py",
        "    if ruling is None:\n        outvoted",
        "    if ruling is None:\n        return Verdict(task, Outcome.LIED, (), (executor,))\n"
        "    if ruling is None:\n        outvoted",
        f"{TESTS}/settlement/test_proof_of_sampling.py::"
        "test_without_a_ruling_numbers_decide_the_pay_and_nobody_is_punished",
    ),
    Mutant(
        "time of busy members",
        f"{SETTLEMENT}/verification_rounds.py",
        "now - max(check.disputed_at, self._ruled_at) >= patience_s",
        "now - check.disputed_at >= patience_s",
        f"{TESTS}/settlement/test_verdicts.py::"
        "test_many_lies_at_once_do_not_leave_members_without_the_time_to_convict",
    ),
    Mutant(
        "time of slow members",
        f"{SETTLEMENT}/verification_rounds.py",
        "if check.disputed_at is None or verification.attestations.is_delayed(check.task):",
        "if check.disputed_at is None:",
        f"{TESTS}/settlement/test_verdicts.py::"
        "test_members_that_are_slow_at_first_convict_a_liar_before_the_deadline",
    ),
    Mutant(
        "time of silent validators",
        f"{SETTLEMENT}/task_checks.py",
        "now + min(share_s, self._compute_usual_s())",
        "now + self._compute_usual_s()",
        f"{TESTS}/settlement/test_time_left.py::"
        "test_s41_silent_validators_do_not_leave_an_honest_executor_unpaid",
    ),
    Mutant(
        "time of slow validators",
        f"{SETTLEMENT}/task_checks.py",
        "        elif self.closed_at is not None:\n            self.given_up |= ",
        "        else:\n            self.given_up |= late or ",
        f"{TESTS}/settlement/test_time_left.py::"
        "test_a_slow_validator_is_heard_although_others_were_asked_meanwhile",
    ),
    Mutant(
        "late commitments of validators",
        f"{SETTLEMENT}/task_checks.py",
        "if self.asked_at[v] < self.closed_at}",
        "if not self.closed_at}",
        f"{TESTS}/settlement/test_task_checks.py::"
        "test_a_late_commitment_is_not_attested_once_we_said_that_reveals_are_due",
    ),
    Mutant(
        "time of silent members",
        f"{SETTLEMENT}/verification_rounds.py",
        "        return not self._is_impossible(verification, check), False\n",
        "        return False, False\n",
        f"{TESTS}/settlement/test_time_left.py::"
        "test_s41_a_ring_gains_nothing_by_a_task_that_takes_members_long",
    ),
    Mutant(
        "pay for what nobody could check in time",
        f"{SETTLEMENT}/proof_of_sampling.py",
        "is_backed = 0 < len(contradicting)",
        "is_backed = 0 <= len(contradicting)",
        f"{TESTS}/settlement/test_time_left.py::"
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
        f"{SETTLEMENT}/proof_of_sampling.py",
        "(right if found.outputs else wrong).append(result.validator)",
        "right.append(result.validator)",
        f"{TESTS}/settlement/test_proof_of_sampling.py::"
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
        f"{COMMITTEE}/equivocation.py",
        "        for vote in (first, second):\n"
        "            self._context.check(vote.member, compute_vote_hash(vote), vote.signature)\n",
        "",
        f"{TESTS}/committee/test_equivocation.py::"
        "test_a19_evidence_counts_only_with_both_signatures",
    ),
    Mutant(
        "quorum of observations",
        "splitup/protocol/snapshots/observation_shares.py",
        "if len(observers) < context.view.quorum or any(",
        "if any(",
        f"{TESTS}/snapshots/test_observation_shares.py::test_a_proposal_rests_on_a_quorum",
        is_quick=False,
    ),
    Mutant(
        "signature of an observation",
        "splitup/protocol/snapshots/observation_shares.py",
        "    context.scheme.verify(\n        member.signing_key,\n        OBSERVATION_DOMAIN,\n"
        "        observation.once(Observation.canonical_bytes),\n"
        "        bytes.fromhex(share.signature[2:]),\n    )\n",
        "",
        f"{TESTS}/snapshots/test_observation_shares.py::"
        "test_an_observation_counts_as_its_member_signed_it",
        is_quick=False,
    ),
    Mutant(
        "more than f observers",
        "splitup/protocol/snapshots/snapshot_rules.py",
        "if len(seen) > tolerated and n in records)",
        "if n in records)",
        f"{TESTS}/snapshots/test_snapshot_rules.py::test_a_node_is_in_when_more_observers_than_may_lie_list_it",
        is_quick=False,
    ),
    Mutant(
        "key of a heartbeat",
        "splitup/protocol/snapshots/liveness.py",
        "if node.record.signing_key != signing_key:",
        "if False:",
        f"{TESTS}/snapshots/test_recent_blocks.py::"
        "test_a_heartbeat_counts_under_the_key_of_the_registry_alone",
        is_quick=False,
    ),
    Mutant(
        "age of a heartbeat",
        "splitup/protocol/snapshots/liveness.py",
        "if not self.may_name(heartbeat.block_hash, now):",
        "if False:",
        f"{TESTS}/snapshots/test_recent_blocks.py::test_a15_a_block_of_another_chain_or_of_none_is_refused",
        is_quick=False,
    ),
)
