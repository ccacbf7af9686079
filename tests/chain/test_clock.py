from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.chain.clock import ChainClock
from splitup.core import tuning

START = 1_700_000_000


@dataclass
class Machine:
    """A machine whose wall clock may be wrong, and be set."""

    skew_s: float = 0.0
    true_s: float = float(START)
    chain_ahead_s: float = 0.0  # of everybody's clock

    def __post_init__(self) -> None:
        self.clock = ChainClock(
            wall=lambda: self.true_s + self.skew_s, monotonic=lambda: self.true_s - START
        )
        self.number = 0

    def mine(self, wait_s: float = 1.0) -> None:
        """Let time pass and look at a block that was made just now."""
        self.true_s += wait_s
        self.number += 1
        self.clock.observe(self.number, int(self.true_s + self.chain_ahead_s))

    @property
    def error_s(self) -> float:
        return self.clock.now_s() - self.true_s - self.chain_ahead_s


def test_f24_clock_that_is_right_is_left_alone() -> None:
    machine = Machine()
    for _ in range(10):
        machine.mine()
        assert machine.error_s == 0
    assert machine.clock.describe_skew() == ""


@pytest.mark.parametrize("skew_s", [-300, 300])
def test_f24_clock_that_is_five_minutes_off_is_corrected_and_named(skew_s: int) -> None:
    machine = Machine(skew_s)
    machine.mine()
    machine.mine()
    assert abs(machine.error_s) <= tuning.BLOCK_DELAY_S + 1
    side = "ahead of" if skew_s > 0 else "behind"
    assert f"s {side} the chain's" in machine.clock.describe_skew()
    assert abs(abs(machine.clock.skew_s) - 300) <= tuning.BLOCK_DELAY_S + 1


@pytest.mark.parametrize("step_s", [-300, 300])
def test_f24_clock_that_is_set_moves_no_deadline(step_s: int) -> None:
    machine = Machine()
    machine.mine()
    machine.skew_s = step_s
    assert machine.error_s == 0 and machine.clock.describe_skew()
    machine.skew_s = 0
    assert machine.clock.describe_skew() == ""


def test_idle_chain_does_not_hold_the_clock_back() -> None:
    machine = Machine()
    machine.mine()
    machine.true_s += 3600
    machine.clock.observe(machine.number, START)  # the same block as an hour ago
    machine.clock.observe(machine.number - 1, START - 100)  # an endpoint that lags behind
    assert machine.error_s == 0


def test_chain_that_is_set_to_another_time_is_followed() -> None:
    machine = Machine()
    for ahead_s in (1000, -1000):
        machine.mine()
        machine.chain_ahead_s = ahead_s
        machine.mine()
        assert abs(machine.error_s) <= tuning.BLOCK_DELAY_S + 1


@given(st.floats(-(10**6), 10**6), st.lists(st.floats(0.1, 60), min_size=2, max_size=30))
def test_f24_error_is_never_more_than_the_looks_are_apart(
    skew_s: float, waits: list[float]
) -> None:
    machine = Machine(skew_s)
    for wait_s in waits:
        machine.mine(wait_s)
    assert abs(machine.error_s) <= max(waits) + tuning.BLOCK_DELAY_S + 1


def test_s03_the_time_of_a_block_is_the_shortest_seen() -> None:
    """A slot may be empty, and a look may miss blocks; signed requests must wait for three."""
    clock = ChainClock()
    assert clock.block_time_s == 0.0
    for number, timestamp_s in ((10, 1_000), (10, 1_000), (11, 1_024), (13, 1_048), (12, 1_036)):
        clock.observe(number, timestamp_s)
    assert clock.block_time_s == 12.0
