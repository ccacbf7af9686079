"""What the benchmarks compute from what they measured."""

from __future__ import annotations

from dataclasses import asdict

from bench.modes.money import BYTES_BAR, measure_bytes
from bench.modes.slowlink import list_cases, make_report
from bench.modes.transition import Measured
from bench.report import (
    Bar,
    Report,
    compute_median_interval,
    describe_bars,
    median_ratio,
    spread,
    summarise_ms,
)
from splitup.client.outcome import Transition


def test_a_bar_is_met_up_to_its_bound() -> None:
    assert Bar("b", 1.0, "ms", at_most=1.0).is_met
    assert not Bar("b", 1.01, "ms", at_most=1.0).is_met
    assert Bar("b", 1.5, "×", at_least=1.5).is_met
    assert not Bar("b", 1.49, "×", at_least=1.5).is_met
    assert not Bar("b", None, "×", at_least=1.5).is_met


def test_a_missed_bar_says_so_with_what_stands_beside_it() -> None:
    bars = [
        Bar("transition", 2.5, "ms", at_most=1.0, beside={"floor": 0.07}),
        Bar("peer", None, "×", at_least=0.6, note="no peer is installed"),
    ]
    text = describe_bars(Report(bars).to_dict()["bars"])
    assert "MISSED  transition: 2.5 ms (bar ≤ 1)\n          floor: 0.07" in text
    assert "MISSED  peer: not measured × (bar ≥ 0.6)\n          no peer is installed" in text


def test_ratios_are_taken_within_rounds() -> None:
    assert median_ratio([1, 20, 3], [2, 40, 4]) == 0.5
    assert spread([3.0, 1.0, 2.0004]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def make_transitions(times_ns: list[int]) -> list[Transition]:
    return [Transition(0, 1, step, False, ns) for step, ns in enumerate(times_ns)]


def test_transitions_are_summed_up_in_milliseconds() -> None:
    times = [(n + 1) * 1_000_000 for n in range(100)]
    assert summarise_ms(make_transitions(times)) == {"p50": 50.0, "p99": 99.0, "count": 100}


def test_what_verification_adds_is_a_median_of_rounds() -> None:
    found = Measured(8)
    found.plain = [make_transitions([n]) for n in (100, 1_000, 200)]  # a busy round in the middle
    found.verified = [make_transitions([n]) for n in (101, 1_100, 202)]
    assert found.describe_change() == (1.0, [1.0, 10.0])


def test_the_interval_of_a_median_narrows_with_the_number_of_values() -> None:
    assert compute_median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert compute_median_interval([float(n) for n in range(100)]) == (40.0, 59.0)


def test_ways_to_decode_are_compared_with_sequential() -> None:
    rows = []
    for case in list_cases(quick=False):
        steps = 64 if case.decoder == "sequential" else 32
        seconds = steps * (5 + case.link.round_trip_ms) / 1000
        tokens = list(range(65))
        rows.append({**asdict(case), "seconds": seconds, "steps": steps, "found": tokens})
    code, prose = make_report(rows).bars
    assert code.measured == prose.measured == 2.0 and code.beside["tokens equal"]
    assert make_report(rows).figures["at_80_ms"]["records"]["lookahead"] == {
        "gain": 2.0,
        "tokens_per_round_trip": 2.0,
    }
    rows[-1]["found"] = [7]
    assert not make_report(rows).bars[0].beside["tokens equal"]


def test_commitments_are_measured_on_the_messages_themselves() -> None:
    completion, pledge = measure_bytes()
    assert 32 < completion < BYTES_BAR and 32 < pledge
