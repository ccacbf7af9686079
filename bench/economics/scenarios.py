"""The scenarios of cheating: what is claimed, what is saved, and the gain that theory expects.

"Alone" means that in every execution exactly one role cheats while all others are honest, on
different tasks in turn, so that every execution is one trial. A ring of g nodes is nodes 0 … g-1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bench.economics.market_simulation import (
    LOW_PRECISION,
    NOBODY,
    RING_LIE,
    Behaviour,
    Bools,
    Draws,
    Estimate,
    Floats,
    Ints,
    Money,
    Verdicts,
    behave_honestly,
    compute_profit,
    draw_market,
    estimate_ratio,
    get_sampled,
    judge_all,
    make_garbage,
    settle,
)
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.settlement.proof_of_sampling import MAX_JUDGES

SEED: Final = 20_240_601
NODES: Final = 100
TASKS: Final = 10  # in a chain, so that most tasks have two neighbours
EXECUTIONS: Final = 40_000
LOW_PRECISION_COST: Final = 0.5

# without the floor of exposures: whether S alone deters who wants to save compute
DEFAULT: Final = Economics(
    sampling_bps=800, reward_milli=1_200, slash_milli=100_000, floor_micro_usdc=0
)
PUBLISHED: Final = replace(DEFAULT, slash_milli=10_000)
COLLUSION: Final = 0.1  # r, as the contract assumes it
TIE_BREAKERS: Final = 2  # k


@dataclass(frozen=True, slots=True)
class Theory:
    """The saving per lie (in C), and the probability that all judges that must be honest are."""

    saves: float
    honest_judges: float  # the exact value of what the contract's condition calls (1-r)^k; k = 1
    copied: float = 0.0  # chance that the first judge is in the ring and need not compute
    confirming: float = 0.0  # of the ring's judges that are heard after it, and paid for the truth

    def expect_gain(self, economics: Economics) -> float:
        """Return the expected gain over honesty per lie, in C."""
        p, reward = economics.sampling_bps / 10_000, economics.reward_milli / 1000
        slash = economics.slash_milli / 1000
        lost = self.honest_judges * (reward + slash)
        return self.saves + p * (self.copied + self.confirming * (reward - 1) - lost)

    def break_even_slash(self, economics: Economics) -> float:
        """Return the S, in C, at which lying neither pays nor costs."""
        free = replace(economics, slash_milli=0)
        sampled_honest = economics.sampling_bps / 10_000 * self.honest_judges
        return self.expect_gain(free) / sampled_honest if sampled_honest else float("inf")


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    behave: Callable[[Draws], Behaviour]
    theory: Theory | None  # where a lie by an executor has a closed form
    per_judgement: bool = False  # a judge cheats; otherwise an executor


@dataclass(frozen=True, slots=True)
class Game:
    """One scenario up to its verdicts, which do not depend on S."""

    scenario: Scenario
    draws: Draws
    behaviour: Behaviour
    verdicts: Verdicts
    honest_profit: Floats  # [E], in C: of the cheaters' roles if they were honest
    cheats: Floats  # [E]: the number of cheated tasks or judgements


@dataclass(frozen=True, slots=True)
class Result:
    """One scenario under one set of parameters; amounts in C."""

    scenario: Scenario
    economics: Economics
    behaviour: Behaviour
    verdicts: Verdicts
    money: Money
    gain: Estimate  # of cheating over honesty, per cheated task or judgement
    honest_profit: Estimate | None  # of the honest roles, per task they executed


def expect_ring(nodes: int, ring: int) -> Theory:
    """Return the theory of a ring whose executors lie and whose first judges copy the lie.

    Exact for nodes of equal weight: judges are drawn without replacement from all but the executor.
    Who is heard later knows that somebody accused, and that the committee will recompute.
    """
    others = nodes - 1
    if not others:
        return Theory(1.0, 0.0)
    honest = nodes - ring
    later = min(MAX_JUDGES, others) - 1
    return Theory(
        saves=1.0,
        honest_judges=honest / others,
        copied=(ring - 1) / others,
        confirming=honest / others * later * (ring - 1) / max(1, others - 1),
    )


# ---- behaviours --------------------------------------------------------------------------------


def _in_turn(draws: Draws) -> Bools:
    executions, tasks = draws.shape
    turn = np.arange(executions)[:, None] % tasks
    return np.asarray(np.arange(tasks)[None, :] == turn)


def lie_alone(draws: Draws, cost: float = 0.0) -> Behaviour:
    """One executor returns something else than the task's output; every judge is honest."""
    garbage, _ = make_garbage(draws)
    return _lie(behave_honestly(draws), _in_turn(draws), garbage, cost)


def _lie(honest: Behaviour, who: Bools, lies: Ints, cost: float) -> Behaviour:
    return replace(
        honest,
        claims=np.where(who, lies, honest.claims),
        execution_cost=np.where(who, cost, honest.execution_cost),
        cheating_executors=who,
    )


def judge_blindly(draws: Draws) -> Behaviour:
    """The first judge of every sampled task answers without computing; the others are honest."""
    honest = behave_honestly(draws)
    _, garbage = make_garbage(draws)
    who = np.zeros(draws.judges.shape, dtype=np.bool_)
    who[:, 0] = True
    return _misjudge(honest, who, garbage, 0.0)


def _misjudge(honest: Behaviour, who: Bools, says: Ints, cost: float) -> Behaviour:
    return replace(
        honest,
        answers=np.where(who, says, honest.answers),
        answer_cost=np.where(who, cost, honest.answer_cost),
        cheating_judges=who,
    )


def be_lazy(draws: Draws, lazy: int) -> Behaviour:
    """Nodes 0 … lazy-1 return garbage as executors and, blindly, as judges; each its own."""
    claims, answers = make_garbage(draws)
    executing = draws.executors < lazy
    judging = _are_members(draws, lazy)
    return _misjudge(_lie(behave_honestly(draws), executing, claims, 0.0), judging, answers, 0.0)


def copy_in_pairs(draws: Draws) -> Behaviour:
    """One executor lies; the node next to it by number copies the lie as the first judge."""
    behaviour = lie_alone(draws)
    executor = get_sampled(draws, draws.executors)
    partner = (draws.judges != NOBODY) & (draws.judges == (executor ^ 1))
    lying = get_sampled(draws, behaviour.cheating_executors.astype(np.int64)) == 1
    claims = get_sampled(draws, behaviour.claims)
    return _misjudge(behaviour, partner & lying & _are_first(draws), claims, 0.0)


def collude(draws: Draws, ring: int) -> Behaviour:
    """Executors of the ring lie; its judges copy the lie when they are the first to be heard.

    Later ones know that the lie is found out, and are honest, as they are about everybody else.
    """
    executing = draws.executors < ring
    lies = np.full(draws.shape, RING_LIE, dtype=np.int64)
    behaviour = _lie(behave_honestly(draws), executing, lies, 0.0)
    ours = get_sampled(draws, draws.executors) < ring
    who = ours & _are_members(draws, ring) & _are_first(draws)
    return _misjudge(behaviour, who, lies.reshape(-1)[:1, None], 0.0)


def copy_only(draws: Draws, ring: int) -> Behaviour:
    """Executors of the ring are honest; its judges copy from them instead of computing."""
    honest = behave_honestly(draws)
    ours = get_sampled(draws, draws.executors) < ring
    behaviour = _misjudge(honest, ours & _are_members(draws, ring), honest.answers, 0.0)
    return replace(behaviour, cheating_executors=draws.executors < ring)


def accuse_falsely(draws: Draws, ring: int) -> Behaviour:
    """Judges of the ring say one and the same wrong output about everybody outside it."""
    honest = behave_honestly(draws)
    others = get_sampled(draws, draws.executors) >= ring
    lies = np.full(draws.judges.shape, RING_LIE, dtype=np.int64)
    return _misjudge(honest, others & _are_members(draws, ring), lies, 0.0)


def compute_cheaply(draws: Draws, members: int) -> Behaviour:
    """Nodes 0 … members-1 use low precision in every role; their bytes agree with each other."""
    executing, judging = draws.executors < members, _are_members(draws, members)
    cheap = np.full(draws.shape, LOW_PRECISION, dtype=np.int64)
    behaviour = _lie(behave_honestly(draws), executing, cheap, LOW_PRECISION_COST)
    answers = np.full(draws.judges.shape, LOW_PRECISION, dtype=np.int64)
    return _misjudge(behaviour, judging, answers, LOW_PRECISION_COST)


def _are_members(draws: Draws, ring: int) -> Bools:
    return np.asarray((draws.judges != NOBODY) & (draws.judges < ring))


def _are_first(draws: Draws) -> Bools:
    first = np.zeros(draws.judges.shape, dtype=np.bool_)
    first[:, 0] = True
    return first


SCENARIOS: Final = (
    Scenario("honest", "honest", behave_honestly, None),
    Scenario("lazy", "lazy executor, alone", lie_alone, Theory(1.0, 1.0)),
    Scenario("lazy-10", "10 % lazy, not colluding", lambda d: be_lazy(d, NODES // 10), None),
    Scenario("lazy-judge", "lazy judge, alone", judge_blindly, None, per_judgement=True),
    Scenario("copying", "copying pair", copy_in_pairs, expect_ring(NODES, 2)),
    Scenario(
        "ring-10",
        "coalition of 10 %",
        lambda d: collude(d, NODES // 10),
        expect_ring(NODES, NODES // 10),
    ),
    Scenario(
        "ring-30",
        "coalition of 30 %",
        lambda d: collude(d, 3 * NODES // 10),
        expect_ring(NODES, 3 * NODES // 10),
    ),
    Scenario(
        "low-precision",
        "low precision, alone",
        lambda d: lie_alone(d, LOW_PRECISION_COST),
        Theory(1.0 - LOW_PRECISION_COST, 1.0),
    ),
    Scenario("low-10", "10 % low precision", lambda d: compute_cheaply(d, NODES // 10), None),
    Scenario("low-30", "30 % low precision", lambda d: compute_cheaply(d, 3 * NODES // 10), None),
    Scenario(
        "accusing-30",
        "coalition of 30 % that accuses falsely",
        lambda d: accuse_falsely(d, 3 * NODES // 10),
        None,
        per_judgement=True,
    ),
    Scenario(
        "copying-30",
        "coalition of 30 % that only copies",
        lambda d: copy_only(d, 3 * NODES // 10),
        None,
    ),
)


# ---- running the scenarios ---------------------------------------------------------------------


def draw(executions: int = EXECUTIONS, seed: int = SEED) -> Draws:
    """Draw the market in which all scenarios are played: equal nodes, p = 8 %."""
    weights = np.full(NODES, 1000.0)
    return draw_market(seed, NODES, executions, TASKS, DEFAULT.sampling_bps, weights=weights)


def watch(scenario: Scenario, draws: Draws, *, ruled: bool = True) -> Game:
    """Play a scenario up to its verdicts, which do not depend on S, and its honest counterpart.

    ``ruled``: whether the committee can recompute what is disputed.
    """
    behaviour = scenario.behave(draws)
    verdicts = judge_all(draws, behaviour, ruled=ruled)
    honest = replace(
        behave_honestly(draws),
        cheating_executors=behaviour.cheating_executors,
        cheating_judges=behaviour.cheating_judges,
    )
    honest_verdicts = judge_all(draws, honest)
    honest_money = settle(draws, honest_verdicts, DEFAULT)
    return Game(
        scenario,
        draws,
        behaviour,
        verdicts,
        compute_profit(draws, honest, honest_verdicts, honest_money, of_cheats=True),
        count_cheats(scenario, draws, behaviour, verdicts),
    )


def account(game: Game, economics: Economics) -> Result:
    """Settle a game, and compare the cheaters' profits with those of the same roles when honest."""
    draws, behaviour, verdicts = game.draws, game.behaviour, game.verdicts
    money = settle(draws, verdicts, economics)
    of_cheats, of_others = (
        compute_profit(draws, behaviour, verdicts, money, of_cheats=who) for who in (True, False)
    )
    others: Floats = (~behaviour.cheating_executors).sum(axis=1).astype(np.float64)
    return Result(
        game.scenario,
        economics,
        behaviour,
        verdicts,
        money,
        estimate_ratio(of_cheats - game.honest_profit, game.cheats)
        if game.cheats.any()
        else Estimate(0.0, 0.0),
        estimate_ratio(of_others, others) if others.any() else None,
    )


def play(scenario: Scenario, draws: Draws, economics: Economics) -> Result:
    """Watch and account."""
    return account(watch(scenario, draws), economics)


def count_cheats(
    scenario: Scenario, draws: Draws, behaviour: Behaviour, verdicts: Verdicts
) -> Floats:
    """Return per execution [E] the number of cheated tasks or judgements."""
    if not scenario.per_judgement:
        return np.asarray(behaviour.cheating_executors.sum(axis=1), dtype=np.float64)
    asked = (behaviour.cheating_judges & verdicts.heard).sum(axis=1)
    return draws.add_up(asked.astype(np.float64))


def compute_threshold(
    economics: Economics, collusion: float = COLLUSION, tie_breakers: int = TIE_BREAKERS
) -> float:
    """Return the p that the contract demands: C / ((1-r)^k (R + S)), with C = 1 and B = 0."""
    at_stake = (economics.reward_milli + economics.slash_milli) / 1000
    return 1 / ((1 - collusion) ** tie_breakers * at_stake)
