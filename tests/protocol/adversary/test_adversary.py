"""Worlds with one dishonest party each, and proof that missing protections are found.

A hundred here, ten thousand with ``make test-all``, more with ``python -m
tests.protocol.adversary.search --seeds N``; a find prints the line that replays it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from splitup_node.execution.kept.claims import EarnedClaims

from splitup.messages.completions import End, SignedEnd
from splitup.messages.verification import SignedAttestation
from splitup.protocol.committee import equivocation
from splitup.protocol.planning import plan_agreement
from splitup.protocol.settlement import (
    collected_commitments,
    proof_of_sampling,
    verification_state,
)
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.collected_commitments import CollectedCommitments
from splitup.protocol.settlement.settlement_state import SettlementState
from splitup.protocol.settlement.task_checks import TaskCheck, ValidatorAnswer
from tests.protocol.adversary import market, reports, world
from tests.protocol.adversary.deviations import KINDS, Adversary
from tests.protocol.adversary.mutations import Pool, mutate
from tests.protocol.adversary.promises import REMAINS
from tests.protocol.adversary.search import run_world, search
from tests.protocol.committee.test_histories import run_all

LONG: Final = pytest.mark.long
SECURITY: Final = Path(__file__).parents[3] / "docs" / "security.md"


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 10_000), marks=LONG)])
def test_no_deviation_of_thousands_breaks_a_promise(seeds: range) -> None:
    assert run_all(search, seeds) == []


# ---- the search can fail -------------------------------------------------------------------------


def _allow(*arguments: Any) -> None:
    """Check nothing."""


def _without_price(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan_agreement, "_check_price", _allow)


def _without_signed_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collected_commitments, "check_end", _allow)
    patch.setattr(proof_of_sampling, "check_end", _allow)

    def find_steps(state: SettlementState) -> int | None:
        return min(state.collected.finals, default=None)

    patch.setattr(SettlementState, "find_steps", find_steps)


def _without_words_in_the_slot(patch: pytest.MonkeyPatch) -> None:
    get_slot = equivocation.get_slot

    def get_short_slot(vote: Any) -> str:
        return getattr(vote, "execution_id", None) or get_slot(vote)

    patch.setattr(equivocation, "get_slot", get_short_slot)
    patch.setattr(world, "get_slot", get_short_slot)


def _without_deliveries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verification_state, "find_output_faults", lambda *arguments: set())


def _without_the_draws_signature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reports, "check_draw", _allow)


def _without_the_inputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verification_state, "find_input_faults", lambda *arguments: set())


def _without_the_edges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verification_state, "find_edge_faults", lambda *arguments: {})


def _without_a_second_answer(patch: pytest.MonkeyPatch) -> None:
    """A member keeps the first answer that it hears, whatever its validator committed to."""

    def add(check: TaskCheck, answer: ValidatorAnswer, attestations: Attestations) -> bool:
        return check.answers.setdefault(answer.result.validator, answer) is answer

    patch.setattr(TaskCheck, "add", add)


def _without_replacement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proof_of_sampling, "is_given_away", lambda *arguments: False)


def _without_comparisons(patch: pytest.MonkeyPatch) -> None:
    """Members that cannot compute in the executor's class believe it."""

    def believe(task: int, executor: str, usable: Any, ruling: Any, compared: Any) -> Any:
        validators = tuple(result.validator for result in usable)
        return proof_of_sampling.Verdict(task, proof_of_sampling.Outcome.HONEST, validators, ())

    patch.setattr(proof_of_sampling, "_judge_numbers", believe)


def _without_a_majority(patch: pytest.MonkeyPatch) -> None:
    """Members settle nothing unless all executors committed to the client's final end."""
    patch.setattr(SettlementState, "is_late", lambda *arguments: False)


def _without_orders(patch: pytest.MonkeyPatch) -> None:
    """Only what the client acknowledged counts."""
    patch.setattr(collected_commitments, "check_order", lambda *arguments: 0)


def _without_a_last_call(patch: pytest.MonkeyPatch) -> None:
    """The chain never commits executors without the one whose stake is not free."""
    patch.setattr(market, "LAST_CALL_S", -1_000)


def _without_all_that_was_said(patch: pytest.MonkeyPatch) -> None:
    """A proposal carries one attestation of each member."""

    def get_latest(self: Attestations) -> list[SignedAttestation]:
        return [kept[-1].signed for _, kept in sorted(self._kept.items())]

    patch.setattr(Attestations, "get_all", get_latest)


def _without_lost_work(patch: pytest.MonkeyPatch) -> None:
    """Nodes forget what they computed of tasks that were given away, or failed."""
    patch.setattr(EarnedClaims, "keep_lost", _allow)


def _with_all_tasks_or_none(patch: pytest.MonkeyPatch) -> None:
    """Nodes commit to nothing while a task that they were given lacks its inputs."""
    list_own = EarnedClaims._list_own
    patch.setattr(EarnedClaims, "_list_own", lambda claims: list_own(claims) | claims._parts.keys())


def _with_everybodys_takeovers(patch: pytest.MonkeyPatch) -> None:
    """Whoever was given a task answers for it if it committed to anything."""
    patch.setattr(
        CollectedCommitments, "list_taken", lambda collected, *arguments: set(collected.takeovers)
    )


def _without_reservations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(market.Market, "reserve", lambda *arguments: 0)


def find_first(party: str, seeds: range) -> str:
    """Return the first find among the worlds in which this party deviates."""
    return next((f for s in seeds if Adversary(s).party == party and (f := search(s))), "")


@pytest.mark.parametrize(
    ("remove", "party", "first", "expected"),
    [
        (_without_price, "client", 0, "nodes computed below the price"),
        (_without_signed_steps, "executor", 800, "honest work is unpaid"),
        (_without_words_in_the_slot, "client", 1_300, "its bond is lost"),
        (_without_deliveries, "executor", 100, "the client received other outputs"),
        (_without_the_draws_signature, "relay", 6_800, "honest validation is unpaid"),
        pytest.param(
            *(_without_the_inputs, "executor", 3_600, "a node is paid for inputs that nobody sent"),
            marks=LONG,
        ),
        (_without_the_edges, "executor", 1_200, "a node is paid for inputs that nobody sent"),
        pytest.param(
            *(_without_a_second_answer, "validator", 16_600, "it was not settled"), marks=LONG
        ),
        (_without_replacement, "client", 400, "an honest node's stake was slashed"),
        (_without_a_majority, "client", 0, "the client ordered it"),
        (_without_orders, "client", 0, "the client ordered it"),
        (_without_a_majority, "executor", 400, "somebody did not commit in time"),
        (_without_comparisons, "executor", 0, "a drawn lie is paid"),
        (_without_a_last_call, "executor", 0, "honest work is unpaid"),
        pytest.param(*(_without_all_that_was_said, "member", 20, "it was not settled"), marks=LONG),
        (_without_lost_work, "client", 0, "the client gave it away"),
        (_with_all_tasks_or_none, "client", 1_000, "nobody answers for its task"),
        (_with_everybodys_takeovers, "client", 0, "stake was slashed"),
        (_without_reservations, "client", 0, "stake was reserved for nothing"),
    ],
    ids=[
        *("price", "steps", "bonds", "outputs", "order", "inputs", "edges", "answers"),
        *("replaced", "acknowledged", "ordered", "majority", "numbers", "stakes", "said"),
        *("lost", "all", "taken", "reserved"),
    ],
)
def test_a_missing_protection_is_found(
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[pytest.MonkeyPatch], None],
    party: str,
    first: int,
    expected: str,
) -> None:
    """In few hundred worlds; ``first`` saves the test those that are known to show nothing."""
    remove(monkeypatch)
    assert expected in find_first(party, range(first, first + 400))


def test_a_world_replays_exactly() -> None:
    for seed in (7, 1_300):
        first, second = run_world(seed), run_world(seed)
        assert (first.notes, first.broken) == (second.notes, second.broken)
        assert first.world is not None and second.world is not None
        assert first.world.now == second.world.now
        assert first.world.market.balances == second.world.market.balances


def test_every_field_of_every_message_is_changed_sooner_or_later() -> None:
    """The walk needs no list: it reaches all leaves of a message that holds others."""
    signed = SignedEnd(
        end=End(execution_id="0x" + "ee" * 32, steps=3, inputs=("ab" * 32,)),
        signature="0x" + "00" * 64,
    )
    pool = Pool()
    pool.note(signed)
    rng = random.Random(1)
    changes = [mutate(signed, rng, pool) for _ in range(400)]
    found = {change[1] for change in changes if change is not None}
    assert {"end.execution_id", "end.steps", "end.inputs", "end.inputs.0", "signature"} <= found


def test_every_party_takes_its_turn() -> None:
    assert {Adversary(seed).party for seed in range(200)} == KINDS.keys()


def test_a_party_changes_only_what_there_is() -> None:
    names = {kind.split()[-1] for kinds in KINDS.values() for kind in kinds}
    assert {
        name for name in names if not any(hasattr(m, name) for m in [*sys.modules.values()])
    } == set()


def test_what_remains_is_said_in_the_security_page() -> None:
    text = " ".join(SECURITY.read_text().split())
    assert [sentence for sentence in REMAINS.values() if sentence not in text] == []
