"""Handovers of the group key under crashes at every boundary, liars, loss and delay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from splitup.core import limits
from tests.protocol.handovers import Board, Scenario, make_scenario, run_scenario, share_work

JOINS = (1, 2, 3, 4), (1, 2, 3, 5)  # one is replaced


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    with share_work():
        yield


@pytest.mark.parametrize("loses_journal", [False, True])
@pytest.mark.parametrize("number", [1, 4, 5])
def test_f03_a_member_may_die_at_every_boundary_of_a_handover(
    number: int, loses_journal: bool
) -> None:
    """One that stays, the one that leaves, the one that joins."""
    calm = Board(Scenario(seed=1, committees=JOINS)).run()
    boundaries = next(life.boundaries for life in calm.lives if life.number == number)
    assert boundaries >= 2, "it deals or confirms"
    failures = [
        run_scenario(
            Scenario(
                seed=1,
                committees=JOINS,
                crash_at=(number, boundary),
                loses_journal=loses_journal,
            )
        )
        for boundary in range(1, boundaries + 1)
    ]
    assert not any(failures), "\n".join(filter(None, failures))


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 80), marks=pytest.mark.long)])
def test_handovers_keep_the_key_whatever_happens_to_f_members(seeds: range) -> None:
    failures = [run_scenario(make_scenario(seed)) for seed in seeds]
    assert not any(failures), "\n".join(filter(None, failures))


def test_a_broken_handover_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DKG_COMPLAINT_BLOCKS", 0)  # the lie is found too late
    liars = [scenario for scenario in map(make_scenario, range(40)) if scenario.liars]
    assert any("Broken" in run_scenario(scenario) for scenario in liars)
