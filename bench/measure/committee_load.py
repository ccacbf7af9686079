"""A committee member's load: CPU per heartbeat, time from a finalized request to its certificate.

    python -m bench.measure.committee_load heartbeats    # 10,000 nodes, 16 resident tasks each
    python -m bench.measure.committee_load certificate   # four processes on the loopback

Prints JSON. Run it on a quiet machine; the load average stands beside the figures.
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
from typing import Any, Final

import uvloop
from aiohttp import ClientSession, TCPConnector
from splitup_oracle.member.http_server import MemberServer

from splitup.core.codec import encode_canonical
from splitup.crypto.jws import sign_jws, verify_jws
from splitup.crypto.quorum import compute_execution_id
from splitup.messages import api
from splitup.messages.snapshots import Heartbeat
from splitup.net.http import serve_app
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.committee.events import (
    BlockSeen,
    HeartbeatReceived,
    NodeRecord,
    NodesSeen,
    RttMeasured,
    Tick,
)
from splitup.protocol.member import CommitteeMember
from tests.builders import COMMON_CLASS
from tests.protocol.committees import COMMITTEE, make_committee, make_identity
from tests.protocol.simulator import VERIFY_NONE, read_token

NODES: Final = 10_000
DISTINCT: Final = 400  # identities; creating ten thousand takes longer than the measurement
TASKS: Final = tuple(sorted(f"{n:064x}" for n in range(16)))
HEAD: Final = "0x" + "01" * 32
CLIENTS: Final = 32


class Absorber:
    """The part of a member that processes heartbeats."""

    audience = COMMITTEE
    chain = None  # heartbeats need none

    def __init__(self) -> None:
        identities, view = make_committee()
        self.machine = CommitteeMember(
            identities[0],
            view,
            VERIFY_NONE,
            read_token,
            grace_s=60,
            signing_guard=SigningGuard(),
        )
        self.machine.handle(BlockSeen(1, 1_000, HEAD), time.monotonic())
        self.beats = 0

    def feed_peer(self, event: HeartbeatReceived) -> None:
        self.machine.handle(event, time.monotonic())
        self.beats += 1

    def note_heartbeat(self, node: str) -> None:
        self.machine.is_unprobed(node)

    def get_demand(self) -> bytes:
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
                    resident=TASKS,
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
    absorber.machine.handle(NodesSeen(tuple(records + others[DISTINCT:])), 0.0)
    server = await serve_app(MemberServer(absorber).make_app(), "127.0.0.1", 0)  # type: ignore[arg-type]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tokens, file)
        file.flush()
        started_cpu, started = time.process_time(), time.monotonic()
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.measure.committee_load", "send", server.url, file.name
        )
        assert await sender.wait() == 0
        cpu_s, wall_s = time.process_time() - started_cpu, time.monotonic() - started
    await server.close()
    beats = absorber.beats
    assert beats == rounds * DISTINCT
    for record in records:
        absorber.machine.handle(RttMeasured(record.node, 3), time.monotonic())
    look = time.process_time()
    absorber.machine.handle(Tick(), time.monotonic())
    per_beat, beats_per_s = cpu_s / beats, NODES / absorber.machine.get_heartbeat_period_s()
    size = len(json.dumps({"jws": tokens[0][0]}))
    return {
        "beats": beats,
        "cpu_us_per_beat": round(per_beat * 1e6, 1),
        "period_s": absorber.machine.get_heartbeat_period_s(),
        "cores": round(per_beat * beats_per_s, 2),
        "bytes_per_beat": size,  # of the body; HTTP headers come on top
        "mbit_per_s": round(8e-6 * size * beats_per_s, 1),
        "verify_us": round(time_verify(tokens[0][:200]) * 1e6, 1),
        "look_ms_per_400_live": round((time.process_time() - look) * 1e3, 1),
        "wall_s": round(wall_s, 2),
    }


def time_verify(tokens: list[str]) -> float:
    """Return the CPU seconds to verify and parse one token, without HTTP."""
    started = time.process_time()
    for token in tokens:
        claims = verify_jws(token, typ=api.HEARTBEAT.typ, audience=COMMITTEE, now_s=None)
        Heartbeat.from_value(claims.body)
    return (time.process_time() - started) / len(tokens)


async def send(url: str, path: str) -> dict[str, Any]:
    rounds = json.loads(Path(path).read_bytes())  # noqa: ASYNC240  # before there is anybody to wait
    async with ClientSession(connector=TCPConnector(limit=CLIENTS)) as session:

        async def post(token: str) -> None:
            async with session.post(api.HEARTBEAT.url(url), json={"jws": token}) as reply:
                assert reply.status == 200, await reply.text()

        for tokens in rounds:
            for start in range(0, len(tokens), CLIENTS):
                await asyncio.gather(*(post(token) for token in tokens[start : start + CLIENTS]))
    return {}


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
    from tests.oracle.committee_network import run_network

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
        "min_ms": round(min(samples), 1),
    }


def main() -> None:
    mode, *rest = sys.argv[1:]
    run = {"heartbeats": bench_heartbeats, "certificate": bench_certificate, "send": send}[mode]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run(*rest))
    if result:
        print(json.dumps({**result, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
