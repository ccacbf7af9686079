"""From the end of a task's compute to the start of its successor's, between two node processes.

Four trivial tasks on two nodes in turn, one step at a time, so that nothing queues. Short
executions alternate: one hashes what it consumes and produces and has 8 % of its tasks recomputed
by a third node while the next one runs, as the network does; the other is not verified at all. The
bare exchange, the signature and the hash of the same bytes stand beside it, from the same rounds.

Tensors too large for a frame are measured twice, as nodes send them and by the object store alone,
with the store's own PUT and GET beside. The store gives way to the nodes (see ``run_engines``).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from splitup_oracle.gateway.access import Right
from splitup_oracle.gateway.presigning import Presigner

from bench.report import Bar, Report, compute_median_interval, say, summarise_ms
from bench.testbed.echo import Measure, run_echo
from bench.testbed.engines import Engines, Model, fetch_trace, run_engines
from splitup.client.execution.session import Session
from splitup.client.outcome import Transition, compute_transitions
from splitup.core import limits
from splitup.crypto.keys import generate_identity, verify_raw
from splitup.net.http import SignedClient
from splitup.net.object_transfer import get_object, put_object
from tests.node.network import make_manifest

RUNS: Final = (0, 1, 0, 1)  # which node runs which task
VALIDATOR: Final = 2
SAMPLING: Final = 0.08
# floats of a tensor -> (pairs of executions, steps of an execution)
SIZES: Final = {2_048: (160, 25), 65_536: (160, 16)}
SMALLEST: Final = limits.INLINE_TENSOR_BYTES // 4 + 1  # the smallest tensor that no frame carries
LARGE: Final = {SMALLEST: (8, 12), 524_288: (8, 12), 2_097_152: (6, 8)}
WARM_STEPS: Final = 20
CHANGE_BAR_PERCENT: Final = 2.0
OBJECT_BAR_MS: Final = 15.0


@dataclass(slots=True)
class Measured:
    """All measurements of one size; rounds are in the same order in all lists."""

    nbytes: int
    verified: list[list[Transition]] = field(default_factory=list)
    plain: list[list[Transition]] = field(default_factory=list)
    exchange_ms: list[float] = field(default_factory=list)
    signature_ms: list[float] = field(default_factory=list)
    digest_ms: list[float] = field(default_factory=list)

    @property
    def all_verified(self) -> list[Transition]:
        return [transition for row in self.verified for transition in row]

    @property
    def floors(self) -> dict[str, float]:
        """Return the bare costs of such a tensor, in milliseconds."""
        return {
            "floor, bare WebSocket exchange (there and back), ms": _median(self.exchange_ms),
            "floor, Ed25519 sign + verify, ms": _median(self.signature_ms),
            "floor, SHA-256, ms": _median(self.digest_ms),
        }

    def compute_changes_percent(self) -> list[float]:
        """Return the relative change of the median by verification, for each pair of executions."""
        pairs = zip(self.verified, self.plain, strict=True)
        return [100 * (_p50(verified) / _p50(plain) - 1) for verified, plain in pairs]

    def describe_change(self) -> tuple[float, list[float]]:
        """Return the median change in percent and its 95 % confidence interval."""
        changes = self.compute_changes_percent()
        interval = compute_median_interval(changes)
        return round(statistics.median(changes), 2), [round(end, 2) for end in interval]


@dataclass(slots=True)
class Large:
    """A tensor too large for a frame, by both routes; ``object_ms`` is the store's PUT and GET."""

    nbytes: int
    sent: list[Transition] = field(default_factory=list)
    stored: list[Transition] = field(default_factory=list)
    object_ms: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the table, in milliseconds."""
        return {
            "as nodes send it": summarise_ms(self.sent),
            "by the store alone": summarise_ms(self.stored),
            "PUT + GET": _median(self.object_ms),
        }


def save_small_model(size: int, folder: Path) -> Model:
    """Write four tasks that pass ``size`` floats on."""
    manifest, graphs = make_manifest(size, tasks=len(RUNS))
    folder.mkdir(parents=True)
    (folder / "manifest").write_bytes(manifest.to_bytes())
    for task_id, graph in graphs.items():
        (folder / task_id).write_bytes(graph.to_bytes())
    return Model(manifest, folder)


async def run(quick: bool) -> Report:
    """Measure all sizes."""
    share = 8 if quick else 1
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        sizes = [*SIZES, *LARGE]
        models = {size: save_small_model(size, Path(name) / str(size)) for size in sizes}
        placement = [(model, range(len(RUNS))) for model in models.values()]
        large = {size: Large(4 * size) for size in LARGE}
        async with (
            run_engines([placement] * 3, store_gives_way=True) as engines,
            run_echo() as exchange,
        ):
            measured = [
                await measure(engines, models[size], size, SIZES[size][0] // share, exchange)
                for size in SIZES
            ]
            for size, found in large.items():
                found.sent = await measure_large(engines, models[size], size, share)
        async with run_engines([placement] * 2, direct_bytes=0) as engines:
            for size, found in large.items():
                found.stored = await measure_large(engines, models[size], size, share)
                found.object_ms = await time_objects(engines, found.nbytes, 80 // share)
    return make_report(measured[0], measured[1], list(large.values()))


async def measure(
    engines: Engines, model: Model, size: int, rounds: int, exchange: Measure
) -> Measured:
    """Run the pairs of executions of one size."""
    steps = SIZES[size][1]
    found = Measured(4 * size)
    for is_recorded in (True, False):
        await run_steps(engines, model, size, WARM_STEPS, is_recorded)
    due, last = 0.0, None
    for number in range(rounds):
        if number % 20 == 0:
            say(f"{found.nbytes} bytes: round {number + 1} of {rounds}")
        for is_recorded in (True, False) if number % 2 else (False, True):
            check = None
            if is_recorded and last is not None and due >= 1:
                due -= 1
                check = asyncio.create_task(recompute(engines, last, number % len(RUNS), steps))
            session = await run_steps(engines, model, size, steps, is_recorded)
            if check is not None:
                await check
            if is_recorded:
                last, due = session, due + SAMPLING * len(RUNS)
            rows = found.verified if is_recorded else found.plain
            rows.append(await fetch_transitions(session, model))
        if number % 8 == 0:
            found.exchange_ms.append(await exchange(found.nbytes, steps))
            _time_crypto(found, steps)
    return found


async def measure_large(engines: Engines, model: Model, size: int, share: int) -> list[Transition]:
    """Return the transitions of one size of large tensors, of the first step on."""
    rounds, steps = LARGE[size]
    found: list[Transition] = []
    await run_steps(engines, model, size, steps, True)
    for number in range(max(1, rounds // share)):
        say(f"{4 * size} bytes: round {number + 1} of {max(1, rounds // share)}")
        session = await run_steps(engines, model, size, steps, True)
        found += await fetch_transitions(session, model)
    return found


async def fetch_transitions(session: Session, model: Model) -> list[Transition]:
    """Return the transitions between the nodes."""
    trace = await fetch_trace(session)
    return [t for t in compute_transitions(model.manifest, trace) if not t.is_local]


async def time_objects(engines: Engines, nbytes: int, count: int) -> list[float]:
    """Return the milliseconds of storing an object and reading it back, repeatedly."""
    place, data, times = engines.place, bytes(nbytes), []
    presigner = Presigner.open(place.endpoint_url, place.bucket, Path(place.credentials))
    async with SignedClient() as http:
        for _ in range(count):
            key = f"bench/{secrets.token_hex(8)}"
            put = presigner.presign(Right("PUT", key, nbytes))
            get = presigner.presign(Right("GET", key, nbytes))
            begun = time.perf_counter()
            await put_object(http.session, put, data)
            await get_object(http.session, get, max_bytes=nbytes, expected_digest=None)
            times.append(1000 * (time.perf_counter() - begun))
    return times


async def run_steps(
    engines: Engines, model: Model, size: int, steps: int, is_recorded: bool
) -> Session:
    """Run one execution, step by step."""
    x = np.ones(size, np.float32)
    async with engines.session(model.manifest, RUNS, steps, is_recorded=is_recorded) as session:
        for _ in range(steps):
            await session.step({"x": x})
    return session


async def recompute(engines: Engines, session: Session, task: int, steps: int) -> None:
    """Let the third node recompute a task of a finished execution."""
    order = {
        "certificate": session.certificate.model_dump(mode="json"),
        "task": task,
        "steps": steps,
    }
    url = f"{engines.nodes[VALIDATOR].entry.endpoint}/bench/recompute"
    async with SignedClient() as http:
        await http.post_json(url, order, timeout_s=60)


def _time_crypto(found: Measured, count: int) -> None:
    identity, header = generate_identity(), bytes(200)
    data = bytes(found.nbytes)

    def sign_and_verify() -> None:
        verify_raw(identity.signing_key_hex, header, identity.sign_raw(header))

    found.signature_ms.append(_time_ms(sign_and_verify, count))
    found.digest_ms.append(_time_ms(lambda: hashlib.sha256(data).digest(), count))


def _time_ms(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1000


def _p50(transitions: list[Transition]) -> float:
    return statistics.median(transition.nanoseconds for transition in transitions)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def make_report(small: Measured, medium: Measured, large: list[Large]) -> Report:
    """Return bars and figures of all sizes."""
    bars = []
    for found, at_most in ((small, 1.0), (medium, 2.0)):
        what = f"transition of {found.nbytes // 1024} KiB between two nodes"
        summary = summarise_ms(found.all_verified)
        bars += [
            Bar(f"{what}, p50", summary["p50"], "ms", at_most=at_most, beside=found.floors),
            Bar(f"{what}, p99", summary["p99"], "ms", at_most=5.0),
        ]
    for row in large:
        figures, size = row.to_dict(), f"{row.nbytes / limits.MIB:.6g} MiB"
        for way in ("as nodes send it", "by the store alone"):
            p50 = figures[way]["p50"]
            beside = {"PUT + GET of one such object, ms": figures["PUT + GET"]}
            name = f"transition of {size}, {way}, p50"
            bars.append(Bar(name, p50, "ms", at_most=OBJECT_BAR_MS, beside=beside))
    for found in (small, medium):
        change, interval = found.describe_change()
        both = [
            summarise_ms([t for row in rows for t in row])["p50"]
            for rows in (found.verified, found.plain)
        ]
        bars.append(
            Bar(
                f"what verification adds to a transition of {found.nbytes // 1024} KiB, p50",
                change,
                "%",
                at_most=CHANGE_BAR_PERCENT,
                beside={
                    "95 % confidence interval, %": interval,
                    "pairs of executions": len(found.plain),
                    "p50 with / without, ms": both,
                },
            )
        )
    rows = {f"{found.nbytes} bytes": summarise_ms(found.all_verified) for found in (small, medium)}
    tables = {f"{row.nbytes} bytes": row.to_dict() for row in large}
    return Report(bars, {"transitions_ms": rows, "large_ms": tables})
