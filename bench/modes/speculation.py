"""Speculative against sequential decoding on four nodes behind a slow link, with equal tokens.

The example's draft model runs on the client. Kinds of speculation take turns with the sequential
decoder, round trip by round trip. The nodes, the proxy and the draft model share the processors of
one machine, which on a real network they do not.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.modes.slowlink import CHUNK, CODE, Link
from bench.report import Bar, Report, say
from bench.testbed.delay import Quality, run_delay
from bench.testbed.engines import run_engines
from bench.testbed.models import DRAFT, cut_example, load_draft, place_tasks
from splitup.client.private.private_tasks import ClientPrograms
from splitup.client.text.drafting import LocalModel, Speculation
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.decoder import Experience
from splitup.graph.manifest import Manifest

ROUND_TRIPS_MS: Final = (0, 20, 80, 150)
COMPARED_MS: Final = (0, 80)  # with all prompts; the others with one of each kind of text
PROSE: Final = ("network monitoring tool that", "library for")
TEMPERATURES: Final = (0.0, 0.8)
SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to decode: its name in the figures, and what it drafts with."""

    name: str
    experience: Experience | None = None


@dataclass(slots=True)
class Drafts:
    """The draft model, loaded once."""

    manifest: Manifest
    programs: ClientPrograms

    def speculate(self, kind: Kind) -> Speculation | None:
        """Return what a text of this kind drafts with."""
        if kind.experience is None:
            return None
        text = self.manifest.text
        assert text is not None
        local = LocalModel(DRAFT, self.manifest, text, self.programs)
        return Speculation(local, kind.experience)


async def run(quick: bool) -> Report:
    """Measure every kind at every round trip."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        model = await asyncio.to_thread(cut_example, Path(name) / "cut", CHUNK)
        manifest, programs = await load_draft(Path(name) / "draft", CHUNK)
        async with run_engines(place_tasks([model])) as engines:
            async with run_delay(engines.ports) as (ports, set_quality):
                with closing(programs), closing(Link(engines, model, ports)) as link:
                    drafts = Drafts(manifest, programs)
                    rows, times = await measure(link, drafts, set_quality, quick)
    report = make_report(rows)
    report.figures["ms of a step, its rows, a draft, its rows"] = times
    return report


async def measure(
    link: Link, drafts: Drafts, set_quality: Any, quick: bool
) -> tuple[list[dict[str, Any]], dict[int, list[float]]]:
    """Return one row for each round trip, prompt, temperature and kind; kinds alternate.

    Also return the milliseconds of steps that the decoder learnt, by round trip.
    """
    rows: list[dict[str, Any]] = []
    times: dict[int, list[float]] = {}
    for round_trip_ms in COMPARED_MS[-1:] if quick else ROUND_TRIPS_MS:
        await set_quality(Quality(round_trip_ms))
        is_short = quick or round_trip_ms not in COMPARED_MS
        prompts = (PROSE[0], CODE[0]) if is_short else PROSE + CODE[:1]
        known = Experience()  # what is learnt at one round trip is forgotten at the next
        kinds = Kind("sequential"), Kind("speculative", known)
        for kind in kinds:  # everything is loaded, and rates are learnt
            await link.generate("utility to convert", *_choose(kind, drafts, TEMPERATURES[0]))
        for prompt in prompts:
            for temperature in TEMPERATURES:
                say(f"{round_trip_ms} ms, T = {temperature}: {prompt[:30]!r}")
                for kind in kinds:
                    chosen = _choose(kind, drafts, temperature)
                    seconds, steps, tokens = await link.generate(prompt, *chosen)
                    rows.append(
                        {
                            "round_trip_ms": round_trip_ms,
                            "text": "code" if prompt in CODE else "prose",
                            "prompt": prompt,
                            "temperature": temperature,
                            "kind": kind.name,
                            "seconds": round(seconds, 3),
                            "steps": steps,
                            "tokens": tokens,
                        }
                    )
        learnt = *known.steps.line, *known.drafts.line
        times[round_trip_ms] = [round(seconds * 1e3, 2) for seconds in learnt]
    return rows, times


def _choose(kind: Kind, drafts: Drafts, temperature: float) -> tuple[Any, ...]:
    speculation = drafts.speculate(kind)
    decode = SequentialDecoder if speculation is None else speculation.make_decoder
    return decode, Sampler(temperature, SEED), speculation


def make_report(rows: list[dict[str, Any]]) -> Report:
    """Return the gains over sequential decoding at 80 and 0 ms, and all of them as figures."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = row["round_trip_ms"], row["text"], row["temperature"], row["prompt"]
        groups.setdefault(place, {})[row["kind"]] = row
    equal = all(
        row["tokens"] == group["sequential"]["tokens"]
        for group in groups.values()
        for row in group.values()
    )
    gains: dict[tuple[Any, ...], list[float]] = {}
    for (round_trip_ms, text, temperature, _), group in groups.items():
        for kind, row in group.items():
            gain = group["sequential"]["seconds"] / row["seconds"]
            gains.setdefault((round_trip_ms, text, temperature, kind), []).append(gain)
    medians = {place: round(statistics.median(values), 2) for place, values in gains.items()}

    def find(*place: Any) -> float | None:
        return medians.get((*place, "speculative"))

    idle = [medians[place] for place in medians if place[0] == 0 and place[3] == "speculative"]
    bars = [
        Bar("prose at 80 ms, greedy", find(80, "prose", 0.0), "×", at_least=5.0),
        Bar("prose at 80 ms, T = 0.8", find(80, "prose", 0.8), "×", at_least=3.3),
        Bar("code at 80 ms, greedy", find(80, "code", 0.0), "×", at_least=6.0),
        Bar("at 0 ms, the least", min(idle, default=None), "×", at_least=0.97),
        Bar("texts equal to sequential's", float(equal), "", at_least=1.0),
    ]
    for row in rows:
        row["tokens"] = len(row["tokens"])
    table = {" / ".join(map(str, place)): gain for place, gain in medians.items()}
    return Report(bars, {"gain": table, "rows": rows})
