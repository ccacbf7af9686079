"""Who gets the work: write bench/reports/selection.md's tables, and check that the draw is fair."""

from __future__ import annotations

import functools
from statistics import median
from typing import Final

from bench.economics.lottery import (
    History,
    Kind,
    compute_ks_distance,
    compute_p_value,
    compute_shares,
    count_wins,
    make_market,
    run_market,
)
from bench.economics.report import fill, make_table
from bench.report import ROOT, Bar, Report

PAGE: Final = ROOT / "bench/reports/selection.md"

SEEDS: Final = 20
SLOW_SEEDS: Final = 5  # for each of six markets
DRAWS: Final = 3_000  # per seed
KS_BOUND: Final = 0.294  # of 20 uniform values, exceeded in 5 % of cases
ROUNDS: Final = 400
TASKS: Final = 12  # per snapshot: one for each node of the market below

MIXED: Final = (
    *(Kind(1), Kind(2), Kind(4), Kind(8)),
    *(Kind(1, rtt_ms=24), Kind(1, rtt_ms=49), Kind(1, rtt_ms=399)),
    *(Kind(1, credit_milli=8_000), Kind(1, credit_milli=-8_000)),
)
MIXED_NAMES: Final = (
    *("stake 1", "stake 2", "stake 4", "stake 8: capped at 4"),
    *("four times as fast: counts as twice", "twice as fast", "four times as slow: as half"),
    *("owed 8 rounds", "8 rounds ahead"),
)
# eight ordinary nodes, one fast, one slow, one rich, one both slow and poor
UNEQUAL: Final = (*[Kind(2)] * 8, Kind(2, rtt_ms=9), Kind(2, rtt_ms=999), Kind(4), Kind(1, 999))
UNEQUAL_NAMES: Final = {0: "ordinary", 8: "ten times as fast", 9: "ten times as slow"} | {
    10: "double stake",
    11: "half stake, ten times as slow",
}
SLOWNESS: Final = (1, 1.5, 2, 4, 10, 100)
STAKES: Final = (1, 2, 4, 8, 16)
OTHERS: Final = 10  # nodes of 4 units each


# ---- figures -----------------------------------------------------------------------------------


@functools.cache
def draw_shares() -> tuple[list[list[int]], list[float]]:
    """Return the wins of every seed in the mixed market, and the p-value of each."""
    market = make_market(MIXED)
    shares = compute_shares(market)
    wins = [count_wins(market, seed, DRAWS) for seed in range(SEEDS)]
    return wins, [compute_p_value(won, shares) for won in wins]


@functools.cache
def run_both() -> tuple[History, History]:
    """Return the unequal market's history without and with credits."""
    plain = run_market(UNEQUAL, rounds=ROUNDS, tasks=TASKS, seed=1, is_fair=False)
    return plain, run_market(UNEQUAL, rounds=ROUNDS, tasks=TASKS, seed=1)


def compute_split(stake: float) -> tuple[float, float]:
    """Return an operator's share as one node, and as nodes of one unit each."""
    others = [Kind(4)] * OTHERS
    one = compute_shares(make_market([Kind(stake), *others]))[0]
    count = round(stake)
    many = compute_shares(make_market([*[Kind(1)] * count, *others]))[:count]
    return one, sum(many)


# ---- tables ------------------------------------------------------------------------------------


def make_share_table(wins: list[list[int]]) -> str:
    shares = compute_shares(make_market(MIXED))
    rows = [
        [name, _percent(share), _percent(sum(won[row] for won in wins) / (SEEDS * DRAWS))]
        for row, (name, share) in enumerate(zip(MIXED_NAMES, shares, strict=True))
    ]
    return make_table(["node", "share of the weight", "share of the tasks"], rows)


def make_p_table(p_values: list[float]) -> str:
    row = [
        f"{min(p_values):.3f}",
        f"{median(p_values):.3f}",
        f"{max(p_values):.3f}",
        f"{sum(p < 0.05 for p in p_values)} of {SEEDS}",
        f"{compute_ks_distance(p_values):.3f} (5 % bound {KS_BOUND})",
    ]
    head = ["least p", "median p", "greatest p", "below 0.05", "distance from uniform"]
    return make_table(head, [row])


def make_history_table(plain: History, fair: History) -> str:
    rows = [
        [
            name,
            _percent(plain.shares[row]),
            _percent(fair.shares[row]),
            str(plain.longest_gaps[row]),
            str(fair.longest_gaps[row]),
        ]
        for row, name in UNEQUAL_NAMES.items()
    ]
    head = ["node", "share without credit", "with", "longest wait without", "with"]
    return make_table(head, rows)


def make_slow_table() -> str:
    rows = []
    for times in SLOWNESS:
        market = make_market([Kind(rtt_ms=round(100 * times) - 1), *[Kind()] * 9])
        share = compute_shares(market)[0]
        won = sum(count_wins(market, 100 + seed, DRAWS)[0] for seed in range(SLOW_SEEDS))
        rows.append([f"{times:g} ×", _percent(share), _percent(won / (SLOW_SEEDS * DRAWS))])
    return make_table(["its time", "share of the weight", "share of the tasks"], rows)


def make_split_table() -> str:
    rows = []
    for stake in STAKES:
        one, many = compute_split(stake)
        rows.append([str(stake), _percent(one), _percent(many), f"{many / one:.2f}"])
    return make_table(["stake", "as one node", "as nodes of stake 1", "gain"], rows)


def make_quitter_table() -> str:
    rows = []
    for name, row in (("ordinary", 0), ("ten times as fast", 8)):
        stays = run_market(UNEQUAL, rounds=ROUNDS, tasks=TASKS, seed=2).shares[row]
        quits = run_market(UNEQUAL, rounds=ROUNDS, tasks=TASKS, seed=2, quitters=[row])
        rows.append([name, _percent(stays), _percent(quits.shares[row])])
    return make_table(["node", "share when it stays", "when it leaves to drop debts"], rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ---- the page ----------------------------------------------------------------------------------


def make_page(page: str) -> str:
    """Return the page with its tables filled."""
    wins, p_values = draw_shares()
    plain, fair = run_both()
    tables = {
        "shares": make_share_table(wins),
        "chi": make_p_table(p_values),
        "starvation": make_history_table(plain, fair),
        "slow": make_slow_table(),
        "split": make_split_table(),
        "quitters": make_quitter_table(),
    }
    return fill(page, tables)


def run(quick: bool) -> Report:
    """Simulate the draw, and write the page."""
    PAGE.write_text(make_page(PAGE.read_text()))
    _, p_values = draw_shares()
    plain, fair = run_both()
    within_cap = [stake for stake in STAKES if stake <= 4]
    gain = max(many / one for one, many in map(compute_split, within_cap))
    bars = [
        Bar(
            "p-values of shares against weights: distance from uniform",
            round(compute_ks_distance(p_values), 3),
            "",
            at_most=KS_BOUND,
            beside={"median p": round(median(p_values), 3), "least p": round(min(p_values), 3)},
        ),
        Bar(
            "longest wait for work, of any node",
            float(max(fair.longest_gaps)),
            "snapshots",
            at_most=float(max(plain.longest_gaps)),
            note="bounded by what it is without credit",
        ),
        Bar("least share of the tasks", round(100 * min(fair.shares), 2), "%", at_least=0.01),
        Bar("gain of a stake within the cap from splitting", round(gain, 3), "×", at_most=1.01),
    ]
    return Report(bars)
