"""Write bench/reports/selection.md's tables, and check that the draw is fair."""

from __future__ import annotations

from statistics import median

from bench.lottery.lottery import compute_ks_distance
from bench.lottery.report import (
    KS_BOUND,
    PAGE,
    STAKES,
    compute_split,
    draw_shares,
    make_page,
    run_both,
)
from bench.report import Bar, Report


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
