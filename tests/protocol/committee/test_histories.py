"""Seeded histories of a committee, and proof that the checker would find a fault.

A failure prints the line that replays it exactly.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import combinations, product
from multiprocessing import get_context
from typing import Any

import pytest

from splitup.crypto.signature_scheme import REAL
from splitup.protocol.committee.commands import Command, Persist, SubmitEvidence
from splitup.protocol.committee.events import Tick
from splitup.protocol.member import CommitteeMember
from tests.parameters import some_of
from tests.protocol.histories import History, run_scenario, run_seed
from tests.protocol.scenarios import Broken, Partition, Scenario, make_scenario

# beside the systematic ones below, and the worlds in ``tests/protocol/adversary``; more by the
# environment, for long searches
HISTORIES = int(os.environ.get("SPLITUP_HISTORIES", "1000"))
FEW = 30
LONG = pytest.mark.long
PROCESSES = 2


def run_all(run: Any, work: Sequence[Any]) -> list[str]:
    """Run histories on both cores; return the failures, each with the line that replays it."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # the other core is busy; and it has threads, no forks
        return list(filter(None, map(run, work)))
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        return [failure for failure in pool.map(run, work, chunksize=50) if failure]


@pytest.mark.parametrize("seeds", [range(FEW), pytest.param(range(FEW, HISTORIES), marks=LONG)])
def test_seeded_histories_are_safe_and_live(seeds: range) -> None:
    """f03, f06 – f09, f10, f14, a18 – a20 in all mixtures; ``make_scenario`` draws them."""
    assert run_all(run_seed, seeds) == []


def iter_boundaries() -> Iterator[Scenario]:
    """A quiet history, and one death at every boundary that a member comes by in it."""
    quiet = Scenario(seed=3)
    history = History(quiet).run()
    for life in history.lives:
        for boundary in range(life.boundaries):
            yield replace(quiet, crash_at=(life.place, boundary))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=LONG) for part in range(1, 4))])
def test_f03_a_member_may_die_at_every_boundary_between_persisting_and_sending(part: int) -> None:
    """Every fourth of them, which meets each member."""
    scenarios = list(iter_boundaries())
    assert len(scenarios) > 250
    assert run_all(run_scenario, scenarios[part::4]) == []


def iter_partitions() -> Iterator[Scenario]:
    """n = 4: every two-way partition, twice in a row, under every first leader, with every twin."""
    sides = [frozenset(s) for k in (0, 1, 2) for s in combinations(range(4), k)]
    sides = [s for s in sides if len(s) < 2 or 0 in s]  # a side and its complement are one split
    for first, second, leader in product(sides, sides, range(4)):
        twins = [frozenset[int]()] + [frozenset({place}) for place in range(4)]
        for twin in twins:
            yield Scenario(
                seed=leader,
                partitions=(Partition(0, 5, first), Partition(5, 10, second)),
                twins=twin,
                first_epoch=leader,
            )


@pytest.mark.parametrize("part", [slice(64), pytest.param(slice(64, None), marks=LONG)])
def test_f08_a19_all_partitions_under_all_leaders_with_every_member_doubled(part: slice) -> None:
    """A twentieth of them meets each partition, leader and double."""
    scenarios = list(iter_partitions())
    assert len(scenarios) == 8 * 8 * 4 * 5
    random.Random(1).shuffle(scenarios)
    assert run_all(run_scenario, scenarios[part]) == []


@pytest.mark.parametrize("seed", some_of(range(6), 0, 1))
def test_real_signatures_change_nothing(seed: int) -> None:
    """With ECDSA, Ed25519 and BLS seeds are others, but what is decided is the same."""
    scenario = replace(make_scenario(seed), size=4, twins=frozenset(), liars=frozenset())
    cheap = History(scenario).run()
    real = History(scenario, scheme=REAL).run()
    assert cheap.plans.keys() == real.plans.keys()


def test_thirty_one_members() -> None:
    mute, twins, liars = frozenset({1, 2, 3}), frozenset({7, 8}), frozenset({11, 30})
    history = History(
        Scenario(1, size=31, loss=0.05, mute=mute, twins=twins, liars=liars, first_epoch=1)
    ).run()
    assert len(history.plans) == 2


def test_a19_equivocating_members_are_found_and_only_they() -> None:
    """Every one accused is guilty (the checker says); most that sign two things are accused."""
    accused = 0
    for seed in range(20):
        history = History(Scenario(seed, liars=frozenset({seed % 4}), requests=3)).run()
        accused += len(history.accused)
        for life in history.lives:
            kept = [key for kind, key in life.journal if kind == "evidence"]
            assert not life.machine or len(kept) >= bool(life.machine.detector.list_evidence())
    assert accused > 10


def test_a19_evidence_is_brought_to_the_chain_again_after_a_restart() -> None:
    """The report may have been lost with the process that made it; the chain takes it once."""
    history = next(
        found
        for seed in range(40)
        if (found := History(Scenario(seed, liars=frozenset({seed % 4}), requests=3)).run()).accused
    )
    life = next(a for a in history.lives if any(kind == "evidence" for kind, _ in a.journal))
    history._start(life)
    assert life.machine is not None and life.machine.detector.list_evidence()
    reports = [
        [c for c in life.machine.handle(Tick(), history.now) if isinstance(c, SubmitEvidence)]
        for _ in range(2)
    ]
    assert [report.evidence for report in reports[0]] == life.machine.detector.list_evidence()
    assert not reports[1]


def test_a_history_replays_exactly() -> None:
    for seed in (4, 11, 12):
        first, second = (History(make_scenario(seed), verbose=True).run() for _ in range(2))
        assert first.notes and first.trace.hexdigest() == second.trace.hexdigest()
    other = History(make_scenario(13), verbose=True).run()
    assert first.trace.hexdigest() != other.trace.hexdigest()


def test_f07_more_than_f_members_down_stall_and_break_nothing() -> None:
    with pytest.raises(Broken, match="no snapshot after"):
        History(Scenario(1, mute=frozenset({0, 1}))).run()


# ---- the checker can fail ------------------------------------------------------------------------


class _SignsTwice(CommitteeMember):
    """Forgets that it signed already."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.context.signing_guard.claim = _claim_always  # type: ignore[method-assign]


def _claim_always(slot: str, digest: str, until_s: int = 0) -> list[Command] | None:
    return [Persist("signed", slot, {"digest": digest, "until_s": until_s})]


def find_broken(seeds: range, **options: Any) -> str:
    for seed in seeds:
        try:
            History(make_scenario(seed), **options).run()
        except Broken as broken:
            return str(broken)
    return ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quorum": 2}, "rests on 2 signers"),
        ({"member_type": _SignsTwice}, "signed two things for"),
        ({"keeps_journal": False}, "signed two things for"),
    ],
    ids=["quorum of f+1", "signs twice", "forgets its journal"],
)
def test_a_broken_protocol_is_found_out(options: dict[str, Any], expected: str) -> None:
    assert expected in find_broken(range(600), **options)
