"""What a lie gains or loses in C, the cost of its task, in closed form: docs/economics.md.

Judges are drawn without replacement from the holders of a task but for its executor. One honest
judge that is heard first is enough, because the committee then recomputes the task.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from splitup.chain.deployment import MarketParameters
from splitup.core import limits
from splitup.protocol.settlement.proof_of_sampling import MAX_JUDGES

DEPLOYED = MarketParameters()
FLOOR_USDC = limits.EXPOSURE_FLOOR_MICRO_USDC / 1e6
HONEST = (1 - DEPLOYED.collusion_bps / 10_000) ** DEPLOYED.tie_breakers  # (1-r)^k
PAGE = (Path(__file__).resolve().parents[3] / "docs/economics.md").read_text()


def compute_gain(
    holders: int, ring: int, *, slash: float = DEPLOYED.slash_milli / 1000, saves: float = 1.0
) -> float:
    """Return what a ring gains per lie, in C; its judges repeat the lie if they are heard first.

    Whoever is heard after an accusation knows that the committee recomputes, and is honest.
    """
    p, reward = DEPLOYED.sampling_bps / 10_000, DEPLOYED.reward_milli / 1000
    others = holders - 1
    honest, copied = (holders - ring) / others, (ring - 1) / others
    later = min(MAX_JUDGES, others) - 1
    confirming = honest * later * (ring - 1) / max(1, others - 1)
    return saves + p * (copied + confirming * (reward - 1) - honest * (reward + slash))


@pytest.mark.parametrize("ring", [1, 2, 10, 30])
def test_every_lie_loses_at_the_deployed_parameters(ring: int) -> None:
    assert compute_gain(100, ring) < -4
    assert compute_gain(100, ring, slash=10) > 0, "and pays at a tenth of the slash"


def test_low_precision_loses_too() -> None:
    assert compute_gain(100, 1, saves=0.5) < compute_gain(100, 1, slash=10, saves=0.5) < 0


def test_one_honest_judge_of_two_holders_is_enough_and_none_never_is() -> None:
    assert compute_gain(2, 1) == pytest.approx(compute_gain(100, 1))
    assert compute_gain(3, 3, slash=1e6) > 0


def test_the_contract_s_condition_has_a_margin() -> None:
    p = DEPLOYED.sampling_bps / 10_000
    at_stake = (DEPLOYED.reward_milli + DEPLOYED.slash_milli) / 1000
    assert p > 6 / (HONEST * at_stake), "estimates of C may be wrong by a factor of six"


def test_s14_the_deployed_parameters_deter_the_gain_that_they_declare() -> None:
    declared = DEPLOYED.outside_gain_micro_usdc / 1e6
    assert declared <= DEPLOYED.sampling_bps / 10_000 * HONEST * FLOOR_USDC < 1.1 * declared


@pytest.mark.parametrize("share", [0.08, 0.2, 0.5, 1.0])
def test_s14_what_is_deterred_grows_fourfold_with_every_offence(share: float) -> None:
    gains = (f"{share * HONEST * FLOOR_USDC * 4**offences:.2f}" for offences in range(4))
    assert f"| {100 * share:.0f} % | {' | '.join(gains)} |" in PAGE
