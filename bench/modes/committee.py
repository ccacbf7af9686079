"""The committee: time to a certificate, a large plan, CPU of heartbeats.

    python -m bench.modes.committee URL FILE    # the sender

The sender posts the heartbeats in a file to a member.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from aiohttp import ClientSession, TCPConnector
from splitup_oracle.member.http_server import MemberServer

from bench.report import Bar, Report, say
from splitup.core import event_loop
from splitup.core.codec import encode_canonical
from splitup.crypto.jws import sign_jws, verify_jws
from splitup.crypto.quorum import compute_execution_id
from splitup.messages import api
from splitup.messages.plans import Request
from splitup.messages.snapshots import Heartbeat
from splitup.net.http_server import serve_app
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.committee.events import (
    BlockSeen,
    HeartbeatReceived,
    NodeRecord,
    NodesSeen,
)
from splitup.protocol.member import CommitteeMember
from splitup.protocol.planning.selection import compute_plan
from tests.builders import COMMON_CLASS, make_chain_manifest, make_snapshot
from tests.oracle.committee_network import run_network
from tests.protocol.committees import COMMITTEE, make_committee, make_identity
from tests.protocol.simulator import VERIFY_NONE, read_token

TASKS: Final = 1_000
NODES: Final = 10_000
HELD: Final = (1, 3, 10)  # tasks that each node holds
PLANS: Final = 5
MANY_NODES: Final = 100_000  # more than a committee follows: what a plan itself allows
DISTINCT: Final = 400  # identities; creating ten thousand takes longer than the measurement
RESIDENT: Final = tuple(sorted(f"{n:064x}" for n in range(16)))
HEAD: Final = "0x" + "01" * 32
CLIENTS: Final = 32


async def run(quick: bool) -> Report:
    """Measure all three."""
    certificate = await bench_certificate()
    beats = await bench_heartbeats()
    count = 2 if quick else PLANS
    plans = {held: time_plans(NODES, held, count) for held in HELD}
    many = time_plans(MANY_NODES, 3, count)
    slowest = max(statistics.median(times[1:]) for times in plans.values())
    bars = [
        Bar(
            "finalized request to certificate, n = 4, p50",
            certificate["p50_ms"],
            "ms",
            at_most=60.0,
            beside={"p90, ms": certificate["p90_ms"], "runs": certificate["runs"]},
        ),
        Bar(
            f"plan of {TASKS} tasks over {NODES} nodes",
            round(slowest, 1),
            "ms",
            at_most=150.0,
            beside={
                f"each holds {held}, ms (first call)": [
                    round(statistics.median(times[1:]), 1),
                    round(times[0], 1),
                ]
                for held, times in plans.items()
            },
        ),
        Bar(
            f"plan of {TASKS} tasks over {MANY_NODES} nodes that hold 3 each",
            round(statistics.median(many[1:]), 1),
            "ms",
            at_most=300.0,
            beside={"first call, ms": round(many[0], 1)},
        ),
        Bar(
            f"heartbeats of {NODES} nodes at one member, one in {beats['period_s']:g} s each: CPU",
            beats["cores"],
            "cores",
            at_most=1.0,
            beside={"floor, signature and parsing, µs per beat": beats["verify_us"]},
        ),
        Bar(
            "… received",
            beats["mbit_per_s"],
            "Mbit/s",
            at_most=20.0,
            beside={"bytes of a heartbeat": beats["bytes_per_beat"]},
        ),
    ]
    return Report(bars, {"certificate": certificate, "heartbeats": beats})


# ---- plans ---------------------------------------------------------------------------------


def time_plans(nodes: int, held: int, count: int) -> list[float]:
    """Return the CPU milliseconds of plans over one new snapshot, including the first plan."""
    say(f"plans, {nodes} nodes, {held} tasks held")
    resident = {n: [(n * held + i) % TASKS for i in range(held)] for n in range(1, nodes + 1)}
    snapshot = make_snapshot(nodes, TASKS, resident=resident)
    manifest = make_chain_manifest(TASKS)
    request = Request(
        chain_id=31337,
        market="0x" + "22" * 20,
        execution_id="0x" + os.urandom(32).hex(),
        model_id=manifest.model_id,
        client="0x" + "33" * 20,
        client_key="0x" + "44" * 32,
        steps=1,
        max_price_micro_usdc=10**6,
        deadline=2**31,
        snapshot_sequence=1,
        snapshot_root="0x" + "44" * 32,
        block_hash="0x" + "55" * 32,
        verify_bps=800,
    )
    times = []
    for number in range(count + 1):
        begun = time.process_time()
        compute_plan(request, f"0x{number:064x}", snapshot, manifest)
        times.append(1000 * (time.process_time() - begun))
    return times


# ---- heartbeats and certificates -----------------------------------------------------------


class Absorber:
    """The part of a member that processes heartbeats."""

    audience = COMMITTEE
    chain = None  # heartbeats need none

    def __init__(self) -> None:
        identities, view = make_committee()
        self.member = CommitteeMember(
            identities[0],
            view,
            VERIFY_NONE,
            read_token,
            grace_s=60,
            signing_guard=SigningGuard(),
        )
        heads = self.member.nodes.heads
        self.machine = SimpleNamespace(may_name=heads.is_recent, get_head=lambda: heads.head)
        self.member.handle(BlockSeen(1, 1_000, HEAD), time.monotonic())
        self.beats = 0

    def feed_peer(self, event: HeartbeatReceived) -> None:
        self.member.handle(event, time.monotonic())
        self.beats += 1

    def note_heartbeat(self, node: str) -> None:
        self.member.nodes.is_unprobed(node)

    def get_demand(self, node: str) -> bytes:
        return encode_canonical({"block": HEAD, "tasks": []})


def make_tokens(rounds: int) -> tuple[list[NodeRecord], list[list[str]]]:
    identities = [make_identity(50_000 + n) for n in range(DISTINCT)]
    records = [NodeRecord(i.address, i.signing_key_hex, "http://n", 10**9) for i in identities]
    now = int(time.time())
    tokens = [
        [
            sign_jws(
                identity,
                typ=api.HEARTBEAT.typ,
                audience=COMMITTEE,
                body=Heartbeat(
                    node=identity.address,
                    boot_id="ab" * 32,
                    sequence=number,
                    sent_at_ms=now * 1000 + number,
                    block_hash=HEAD,
                    queue_ms=number % 100,
                    resident=RESIDENT,
                    vram_free_bytes=10**9,
                    determinism=COMMON_CLASS,
                ).model_dump(mode="json"),
                now_s=now,
            )
            for identity in identities
        ]
        for number in range(1, rounds + 1)
    ]
    return records, tokens


async def bench_heartbeats() -> dict[str, Any]:
    """Return the receiving process's CPU seconds per heartbeat; the sender is another process."""
    rounds = 15
    absorber = Absorber()
    records, tokens = make_tokens(rounds)
    others = [NodeRecord(f"0x{n:040x}", f"0x{n:064x}", "http://n", 10**9) for n in range(NODES)]
    absorber.member.handle(NodesSeen(tuple(records + others[DISTINCT:])), 0.0)
    server = await serve_app(MemberServer(absorber).make_app(), "127.0.0.1", 0)  # type: ignore[arg-type]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tokens, file)
        file.flush()
        started_cpu = time.process_time()
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.modes.committee", server.url, file.name
        )
        assert await sender.wait() == 0
        cpu_s = time.process_time() - started_cpu
    await server.close()
    beats = absorber.beats
    assert beats == rounds * DISTINCT
    per_beat, beats_per_s = cpu_s / beats, NODES / absorber.member.nodes.period_s
    size = len(json.dumps({"jws": tokens[0][0]}))
    return {
        "beats": beats,
        "cpu_us_per_beat": round(per_beat * 1e6, 1),
        "period_s": absorber.member.nodes.period_s,
        "cores": round(per_beat * beats_per_s, 2),
        "bytes_per_beat": size,  # of the body; HTTP headers come on top
        "mbit_per_s": round(8e-6 * size * beats_per_s, 1),
        "verify_us": round(time_verify(tokens[0][:200]) * 1e6, 1),
    }


def time_verify(tokens: list[str]) -> float:
    """Return the CPU seconds to verify and parse one token, without HTTP."""
    started = time.process_time()
    for token in tokens:
        claims = verify_jws(token, typ=api.HEARTBEAT.typ, audience=COMMITTEE, now_s=None)
        Heartbeat.from_value(claims.body)
    return (time.process_time() - started) / len(tokens)


async def send(url: str, path: str) -> None:
    """Send the heartbeats of a file to a member."""
    rounds = json.loads(Path(path).read_bytes())  # noqa: ASYNC240  # before there is anybody to wait
    async with ClientSession(connector=TCPConnector(limit=CLIENTS)) as session:

        async def post(token: str) -> None:
            async with session.post(api.HEARTBEAT.url(url), json={"jws": token}) as reply:
                assert reply.status == 200, await reply.text()

        for tokens in rounds:
            for start in range(0, len(tokens), CLIENTS):
                await asyncio.gather(*(post(token) for token in tokens[start : start + CLIENTS]))


async def _see_next(network: Any) -> float:
    """Return when the chain first had the client's next request (monotonic seconds)."""
    deployment = network.deployment
    following = compute_execution_id(
        deployment.chain_id, deployment.market, network.client.address, network.nonce + 1
    )
    while not (await network.client.call("market", "executionOf", following))["status"]:
        pass
    return time.monotonic()


async def bench_certificate() -> dict[str, Any]:
    """Return the milliseconds from the request's block until the client has a valid certificate.

    The chain is polled for the request without pause, because the receipt comes when members have
    already begun.
    """
    samples = []
    with tempfile.TemporaryDirectory() as directory:
        async with run_network(Path(directory)) as network:
            await network.wait_until(network.is_ready, 120)
            for _ in range(60):
                watching = asyncio.create_task(_see_next(network))
                execution_id, _ = await network.request()
                seen = await watching
                await network.fetch_plan(execution_id)
                samples.append((time.monotonic() - seen) * 1000)
                await network.wait_until(lambda e=execution_id: network.find_settlement(e), 60)
    samples = samples[5:]
    return {
        "runs": len(samples),
        "p50_ms": round(statistics.median(samples), 1),
        "p90_ms": round(statistics.quantiles(samples, n=10)[-1], 1),
    }


if __name__ == "__main__":
    event_loop.run(send(*sys.argv[1:]))
