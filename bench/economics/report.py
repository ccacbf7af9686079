"""Write bench/reports/economics.md's tables: ``python -m bench.economics.report``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from bench.economics.market_simulation import (
    COST_MICRO_USDC,
    Draws,
    Estimate,
    Floats,
    estimate_ratio,
)
from bench.economics.outside_gain import (
    count_executions,
    deter,
    flip_bits,
    lie_for_ever,
)
from bench.economics.scenarios import (
    DEFAULT,
    PUBLISHED,
    SCENARIOS,
    Game,
    Result,
    account,
    compute_threshold,
    draw,
    expect_ring,
    watch,
)

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "bench/reports/economics.md"
PAGES: Final = (PAGE, ROOT / "docs/economics.md")  # the second one has some of the tables
HONEST_HEAD: Final = (
    "honest nodes' profit per task, S = 100 C",
    "honest judges slashed per 1000 tasks",
    "honest executors slashed per 1000 tasks",
)

Games = dict[str, Game]  # by scenario's name
Results = dict[tuple[str, int], Result]  # by scenario's name and S in C


def watch_all(draws: Draws) -> Games:
    return {scenario.name: watch(scenario, draws) for scenario in SCENARIOS}


def account_all(games: Games) -> Results:
    """Settle every scenario at S = 100 C and at S = 10 C."""
    return {
        (name, economics.slash_milli // 1000): account(game, economics)
        for name, game in games.items()
        for economics in (DEFAULT, PUBLISHED)
    }


def find_break_even(game: Game) -> Estimate:
    """Return the S, in C, at which the simulated gain is nothing; the gain is linear in S."""
    low, high = (account(game, e).gain.mean for e in (PUBLISHED, DEFAULT))
    slope = (high - low) / 90
    slash = 10 - low / slope
    there = account(game, replace(DEFAULT, slash_milli=round(slash * 1000)))
    return Estimate(slash, there.gain.half_width / -slope)


# ---- tables ------------------------------------------------------------------------------------


def make_gain_table(results: Results) -> str:
    rows = []
    for scenario in SCENARIOS[1:]:
        row = [scenario.title, "judgement" if scenario.per_judgement else "task"]
        for slash in (100, 10):
            result = results[scenario.name, slash]
            theory = scenario.theory
            expected = f"{theory.expect_gain(result.economics):+.3f}" if theory else ""
            row += [str(result.gain), expected, _compare(result.gain)]
        rows.append(row)
    head = ["cheating", "per", "gain at S = 100 C", "theory", "pays?"]
    return make_table([*head, "gain at S = 10 C", "theory", "pays?"], rows)


def make_condition_table(games: Games) -> str:
    rows = []
    for title, collusion, k, name in (
        ("one liar, honest judges", 0.0, 0, "lazy"),
        ("r = 10 %, k = 1", 0.1, 1, "ring-10"),
        ("the contract's r = 10 %, k = 2", 0.1, 2, None),
        ("r = 30 %, k = 1", 0.3, 1, "ring-30"),
    ):
        slash = 1 / (0.08 * (1 - collusion) ** k) - 1.2
        row = [title]
        row += [f"{100 * compute_threshold(e, collusion, k):.2f} %" for e in (PUBLISHED, DEFAULT)]
        row.append(f"{slash:.1f}")
        theory = games[name].scenario.theory if name else None
        row.append(f"{theory.break_even_slash(DEFAULT):.1f}" if theory else "")
        simulated = find_break_even(games[name]) if name else None
        row.append(f"{simulated.mean:.1f} ± {simulated.half_width:.1f}" if simulated else "")
        rows.append(row)
    head = ["case", "p needed at S = 10 C", "p needed at S = 100 C", "S needed at p = 8 %"]
    return make_table([*head, "exact for this market", "simulated"], rows)


def make_share_table() -> str:
    cases = (("one liar", 0.0, 0), ("r = 10 %, k = 2", 0.1, 2), ("r = 30 %, k = 1", 0.3, 1))
    rows = []
    for sampling in (0.08, 0.2, 0.5, 1.0):
        slashes = (max(0.0, 1 / (sampling * (1 - r) ** k) - 1.2) for _, r, k in cases)
        paid = 1 + sampling
        rows.append([f"{100 * sampling:.0f} %", f"{paid:.2f}", *(f"{s:.1f}" for s in slashes)])
    head = ["tasks verified", "prices paid on average"]
    return make_table([*head, *(f"S needed, {title}" for title, _, _ in cases)], rows)


def make_user_table(results: Results, draws: Draws) -> str:
    rows = []
    for name in ("lazy", "lazy-10", "ring-10", "ring-30", "low-precision"):
        result = results[name, 100]
        wrong = (result.behaviour.claims != 0).any(axis=1)
        found = result.money.from_executors.astype(np.bool_) & (result.behaviour.claims != 0)
        row = [result.scenario.title, f"{100 * np.mean(wrong):.1f} %"]
        row.append(f"{100 * np.mean(found.any(axis=1)[wrong]):.2f} %")
        for slash in (100, 10):
            back, net = compute_user_cost(results[name, slash], draws)
            caught = found.any(axis=1)
            row += [f"{100 * back[caught].mean():.1f} %", f"{100 * net[wrong].mean():.1f} %"]
        rows.append(row)
    head = ["cheating", "executions with a wrong task", "of them found out"]
    for slash in (100, 10):
        head += [f"back when found, S = {slash} C", f"mean net cost, S = {slash} C"]
    return make_table(head, rows)


def compute_user_cost(result: Result, draws: Draws) -> tuple[Floats, Floats]:
    """Return per execution what comes back out of stakes, and the net cost, in model prices."""
    price = COST_MICRO_USDC * result.economics.reward_milli // 1000 * draws.shape[1]
    money = result.money
    return money.to_client / price, (money.from_client - money.to_client) / price


def make_honest_table(results: Results, draws: Draws) -> str:
    rows = []
    for name in ("honest", "lazy-10", "ring-10", "ring-30", "low-10", "low-30", "accusing-30"):
        result = results[name, 100]
        row = [result.scenario.title, str(result.honest_profit)]
        rows.append([*row, *_count_per_1000(result, draws)])
    return make_table(["market", *HONEST_HEAD], rows)


def make_unruled_table(results: Results, draws: Draws) -> str:
    """What happens where no quorum of members can recompute a task."""
    rows = []
    for name in ("lazy", "ring-10", "ring-30", "low-10", "low-30", "accusing-30"):
        game = watch(results[name, 100].scenario, draws, ruled=False)
        result = account(game, DEFAULT)
        row = [game.scenario.title, str(result.gain), str(result.honest_profit)]
        rows.append([*row, *_count_per_1000(result, draws)])
    return make_table(["market", "cheaters' gain", *HONEST_HEAD], rows)


def _count_per_1000(result: Result, draws: Draws) -> list[str]:
    return [f"{1000 * count / draws.executors.size:.2f}" for count in count_wronged(result)]


def count_wronged(result: Result) -> tuple[int, int]:
    """Return how many honest judges and honest executors were slashed."""
    judges = (result.money.from_judges > 0) & ~result.behaviour.cheating_judges
    executors = (result.money.from_executors > 0) & (result.behaviour.claims == 0)
    return int(judges.sum()), int(executors.sum())


def make_holder_table() -> str:
    """The exact break-even S when few nodes hold a task, some of them in one ring."""
    rings = (1, 2, 3, 4)
    rows = []
    for holders in (2, 3, 4, 5, 6, 8, 10, 20):
        row = [str(holders)]
        for ring in rings:
            slash = expect_ring(holders, ring).break_even_slash(DEFAULT)
            row.append("" if ring > holders else "never" if slash == float("inf") else _say(slash))
        rows.append(row)
    return make_table(
        ["nodes that hold the task", *(f"{ring} in the ring" for ring in rings)], rows
    )


def make_cost_table(results: Results, draws: Draws) -> str:
    rows = []
    for name in ("honest", "lazy", "lazy-10", "ring-10", "ring-30"):
        result = results[name, 100]
        cost = estimate_verification_cost(result, draws)
        row = [result.scenario.title, f"{100 * cost.mean:.2f} % ± {100 * cost.half_width:.2f}"]
        row.append(f"{result.verdicts.heard.sum() / len(draws.sampled):.3f}")
        disputes = 1000 * result.verdicts.disputed.sum() / draws.executors.size
        rows.append([*row, f"{disputes:.2f}"])
    head = ["market", "judgements per task", "judges asked per sampled task"]
    return make_table([*head, "committee's recomputations per 1000 tasks"], rows)


def estimate_verification_cost(result: Result, draws: Draws) -> Estimate:
    """Estimate how many recomputations there are per executed task."""
    executions, tasks = draws.shape
    values = draws.add_up(result.verdicts.heard.sum(axis=1).astype(np.float64))
    return estimate_ratio(values, np.full(executions, float(tasks)))


def _compare(gain: Estimate) -> str:
    if gain.mean - gain.half_width > 0:
        return "**yes**"
    return "no" if gain.mean + gain.half_width < 0 else "unclear"


def _say(slash: float) -> str:
    return f"{slash:.1f}" if slash < DEFAULT.slash_milli / 1000 else f"**{slash:.0f}**"


def make_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- gains outside the market, and bit flips ---------------------------------------------------


def make_outside_table() -> str:
    rows = []
    for sampling in (0.08, 0.2, 0.5, 1.0):
        gains = (f"{deter(sampling, offences):.2f}" for offences in range(4))
        rows.append([f"{100 * sampling:.0f} %", *gains])
    head = ["tasks verified", "no offence"]
    return make_table([*head, *(f"after {count}" for count in (1, 2, 3))], rows)


def make_capacity_table() -> str:
    rows = []
    for memory_gb in (1, 12, 24, 80):
        stake = 1000 + 100 * memory_gb
        counts = (f"{count_executions(stake, offences)}" for offences in range(4))
        rows.append([f"{memory_gb} GB", f"{stake}", *counts])
    head = ["memory", "stake, USDC", "no offence"]
    return make_table([*head, *(f"after {count}" for count in (1, 2, 3))], rows)


def make_persistent_table(runs: int = 400) -> str:
    rows = []
    for gain in (0.3, 1.0, 3.0, 10.0):
        for stake in (1100, 2200):
            nets = np.array([lie_for_ever(seed, gain, stake) for seed in range(runs)])
            half_width = 1.96 * nets.std() / runs**0.5
            rows.append([f"{gain:g}", f"{stake}", f"{nets.mean():+.2f} ± {half_width:.2f}"])
    return make_table(["G, USDC", "stake, USDC", "gain per lie, USDC"], rows)


def make_flip_table(runs: int = 2_000) -> str:
    rows = []
    for name, flips in (("once in 20 years", 0.05), ("once a year", 1.0), ("once a month", 12.0)):
        row = [name]
        for stake in (1100, 2200, 3400):
            kept = np.array([flip_bits(seed, flips, stake) for seed in range(runs)])
            row.append(f"{100 * kept.mean():.1f} % ({100 * np.quantile(kept, 0.05):.0f} %)")
        rows.append(row)
    return make_table(["a bit flips", "1100 USDC", "2200 USDC", "3400 USDC"], rows)


# ---- the page ----------------------------------------------------------------------------------


def make_tables(games: Games, results: Results, draws: Draws) -> dict[str, str]:
    """Return every table of the page by the name of its place there."""
    return {
        "gains": make_gain_table(results),
        "condition": make_condition_table(games),
        "shares": make_share_table(),
        "holders": make_holder_table(),
        "cost": make_cost_table(results, draws),
        "users": make_user_table(results, draws),
        "honest": make_honest_table(results, draws),
        "unruled": make_unruled_table(results, draws),
        "outside": make_outside_table(),
        "capacity": make_capacity_table(),
        "persistent": make_persistent_table(),
        "flips": make_flip_table(),
    }


def fill(page: str, tables: dict[str, str]) -> str:
    """Replace these tables of the page; other places stay as they are."""

    def replace_table(match: re.Match[str]) -> str:
        if match[1] not in tables:
            return match[0]
        return f"<!-- {match[1]} -->\n\n{tables[match[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", replace_table, page, flags=re.DOTALL)


def main() -> None:
    draws = draw()
    games = watch_all(draws)
    results = account_all(games)
    tables = make_tables(games, results, draws)
    for page in PAGES:
        page.write_text(fill(page.read_text(), tables))


if __name__ == "__main__":
    main()
