"""A gain outside the market: what deters it, and what that costs honest nodes."""

from __future__ import annotations

import numpy as np
import pytest

from bench.economics.outside_gain import (
    FLOOR,
    WINDOW_H,
    Record,
    count_executions,
    deter,
    flip_bits,
    lie_for_ever,
)
from splitup.chain.deployment import MarketParameters


def test_s14_the_default_parameters_deter_the_gain_that_they_declare() -> None:
    parameters = MarketParameters()
    declared = parameters.outside_gain_micro_usdc / 1e6
    assert declared <= deter(parameters.sampling_bps / 10_000) < 1.1 * declared
    assert deter(1.0) == pytest.approx(0.81 * FLOOR)


def test_s14_a_node_serves_hundreds_of_executions_at_once() -> None:
    assert count_executions(1_100) == 200
    assert count_executions(2_200) == 420
    assert 9 <= count_executions(1_100, 3) < count_executions(1_100, 1) < 200


def test_s14_offences_raise_the_floor_to_half_of_the_free_stake_and_fade() -> None:
    record, floors = Record(), []
    for hour in range(6):
        floors.append(record.get_floor(hour, 2_200))
        record.convict(hour, floors[-1], 3)
    assert floors == [5, 20, 80, 320, 1_050, 1_050]
    assert record.lost == 3 * sum(floors)
    assert record.get_floor(5 + WINDOW_H, 2_200) == FLOOR


@pytest.mark.parametrize("stake", [1_100, 2_200])
def test_s14_lying_again_and_again_loses_although_each_lie_earns_ten_dollars(stake: float) -> None:
    assert np.mean([lie_for_ever(seed, 10.0, stake) for seed in range(100)]) < -2


def test_s14_an_honest_node_keeps_nearly_all_of_its_stake() -> None:
    def keep(flips: float) -> np.ndarray:
        return np.array([flip_bits(seed, flips, 2_200) for seed in range(400)])

    assert keep(0.05).mean() > 0.995
    assert keep(1.0).mean() > 0.97
    assert np.quantile(keep(1.0), 0.05) > 0.9
