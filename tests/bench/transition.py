"""From the end of a task's compute to the start of its successor's, between two node processes.

Four trivial tasks on two nodes in turn, one step at a time, so that nothing queues. Executions
alternate: one hashes what it consumes and produces and has 8 % of its tasks recomputed by a third
node while the next one runs, as the network does; the other is not verified at all. The bare
exchange, the signature and the hash of the same bytes stand beside it, from the same rounds.
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
from typing import Final

import numpy as np

from splitup import limits
from splitup.client.outcome import Transition, compute_transitions
from splitup.client.session import Session
from splitup.crypto.keys import generate_identity, verify_raw
from splitup.net.http import SignedClient
from splitup.net.objects import get_object, put_object
from splitup.storage.presign import Presigner
from tests.bench.echo import Measure, run_echo
from tests.bench.engines import Engines, Model, fetch_trace, run_engines
from tests.bench.report import Bar, Report, median_ratio, say, summarise_ms
from tests.node.network import make_manifest

RUNS: Final = (0, 1, 0, 1)  # which node runs which task
VALIDATOR: Final = 2
SAMPLING: Final = 0.08
# floats of a tensor -> (rounds, steps of a round)
SIZES: Final = {2_048: (24, 100), 65_536: (10, 60), 524_288: (6, 20)}
WARM_STEPS: Final = 20
CHANGE_BAR_PERCENT: Final = 2.0


@dataclass(slots=True)
class Measured:
    """Everything of one size; rounds are in order in all lists."""

    nbytes: int
    verified: list[list[Transition]] = field(default_factory=list)
    plain: list[list[Transition]] = field(default_factory=list)
    exchange_ms: list[float] = field(default_factory=list)
    signature_ms: list[float] = field(default_factory=list)
    digest_ms: list[float] = field(default_factory=list)
    object_ms: list[float] = field(default_factory=list)  # of tensors too large for a frame

    @property
    def all_verified(self) -> list[Transition]:
        return [transition for row in self.verified for transition in row]

    @property
    def floors(self) -> dict[str, float]:
        """Return what else such a tensor costs, in milliseconds."""
        floors = {
            "floor, PUT + GET of one object, ms": self.object_ms,
            "floor, bare WebSocket exchange (there and back), ms": self.exchange_ms,
            "floor, Ed25519 sign + verify, ms": self.signature_ms,
            "floor, SHA-256, ms": self.digest_ms,
        }
        return {name: _median(values) for name, values in floors.items() if values}

    def compute_change_percent(self) -> float:
        """Return by how much verification moves the median, from round to round."""
        with_, without = ([_p50(row) for row in rows] for rows in (self.verified, self.plain))
        return round(100 * (median_ratio(with_, without) - 1), 2)


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
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        models = {size: save_small_model(size, Path(name) / str(size)) for size in SIZES}
        placement = [(model, range(len(RUNS))) for model in models.values()]
        async with run_engines([placement] * 3) as engines, run_echo(Path(name)) as exchange:
            measured = [
                await measure(engines, model, size, SIZES[size][0] // (4 if quick else 1), exchange)
                for size, model in models.items()
            ]
    return make_report(*measured)


async def measure(
    engines: Engines, model: Model, size: int, rounds: int, exchange: Measure
) -> Measured:
    """Run the rounds of one size."""
    steps = SIZES[size][1]
    found = Measured(4 * size)
    for is_recorded in (True, False):
        await run_steps(engines, model, size, WARM_STEPS, is_recorded)
    due, last = 0.0, None
    for number in range(rounds):
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
            trace = await fetch_trace(session)
            rows = found.verified if is_recorded else found.plain
            rows.append([t for t in compute_transitions(model.manifest, trace) if not t.is_local])
        found.exchange_ms.append(await exchange(found.nbytes, steps))
        _time_crypto(found, steps)
        if found.nbytes > limits.INLINE_TENSOR_BYTES:
            found.object_ms.append(await time_objects(engines, found.nbytes, steps))
    return found


async def time_objects(engines: Engines, nbytes: int, count: int) -> float:
    """Return the median milliseconds of storing an object and reading it back."""
    place, data, times = engines.place, bytes(nbytes), []
    presigner = Presigner.open(place.endpoint_url, place.bucket, Path(place.credentials))
    async with SignedClient() as http:
        for _ in range(count):
            key = f"bench/{secrets.token_hex(8)}"
            put = presigner.presign_put(key, length_bytes=nbytes)
            get = presigner.presign_get(key, length_bytes=nbytes)
            begun = time.perf_counter()
            await put_object(http.session, put, data)
            await get_object(http.session, get, max_bytes=nbytes, expected_digest=None)
            times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1000


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
    """Have the third node recompute a task of an execution that is over."""
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


def make_report(small: Measured, medium: Measured, large: Measured) -> Report:
    """Return bars and figures of the three sizes."""
    bars = []
    for found, at_most in ((small, 1.0), (medium, 2.0)):
        what = f"transition of {found.nbytes // 1024} KiB between two nodes"
        summary = summarise_ms(found.all_verified)
        bars += [
            Bar(f"{what}, p50", summary["p50"], "ms", at_most=at_most, beside=found.floors),
            Bar(f"{what}, p99", summary["p99"], "ms", at_most=5.0),
        ]
    through = f"transition of {large.nbytes // 2**20} MiB through the object store, p50"
    p50 = summarise_ms(large.all_verified)["p50"]
    bars.append(Bar(through, p50, "ms", at_most=15.0, beside=large.floors))
    bars.append(
        Bar(
            "what verification adds to a transition of 8 KiB, p50",
            small.compute_change_percent(),
            "%",
            at_most=CHANGE_BAR_PERCENT,
            beside={
                "p50 with / without, ms": [
                    summarise_ms([t for row in rows for t in row])["p50"]
                    for rows in (small.verified, small.plain)
                ],
                "at 256 KiB, %": medium.compute_change_percent(),
            },
        )
    )
    rows = {
        f"{found.nbytes} bytes": summarise_ms(found.all_verified)
        for found in (small, medium, large)
    }
    return Report(bars, {"transitions_ms": rows})
