"""Transitions while strangers flood the nodes' ports with requests (A25).

    python -m bench.modes.flood URL ADDRESS…    # the flood itself, until it is stopped

A third process sends bodies that are no plan and data handshakes with forged and with valid tokens
(anybody has a key), each on a connection of its own, from many addresses, at a fixed rate that does
not wait for answers. It shares the processors with the nodes, so a part of what it costs them here
is the machine's size.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import uvloop

from bench.modes.transition import RUNS, fetch_transitions, run_steps, save_small_model
from bench.report import Bar, Report, read_rss_bytes, say, summarise_ms
from bench.testbed.engines import Engines, run_engines
from splitup.client.outcome import Transition
from splitup.core import limits
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import generate_identity
from splitup.devnet.processes import DevnetProcess, spawn
from splitup.messages import api

SIZE: Final = 2_048  # floats of a tensor
STEPS: Final = 25
PAIRS: Final = 16
RATE: Final = 3_700  # messages of the flood a second, to both nodes
ADDRESSES: Final = 32  # from which they come
AT_ONCE: Final = 2_000  # connections that wait for an answer of one node
PATIENCE_S: Final = 5.0  # of a connection without an answer
TICK_S: Final = 0.005
TOKENS: Final = 256
P99_BAR_MS: Final = 5.0  # that of a transition without a flood
GROWTH_BAR_MB: Final = 64.0
_BEGUN: Final = "the flood has begun"


async def run(quick: bool) -> Report:
    """Measure with and without a flood, in turn."""
    pairs = 4 if quick else PAIRS
    rows: dict[bool, list[Transition]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        model = save_small_model(SIZE, Path(name) / "model")
        placement = [(model, range(len(RUNS)))]
        async with run_engines([placement] * 2, store_gives_way=True) as engines:
            await run_steps(engines, model, SIZE, STEPS, True)
            before = [read_rss_bytes(node.child.pid) for node in engines.nodes]
            flooded_s = 0.0
            async with run_flood(engines, Path(name) / "flood.log") as flood:
                for number in range(pairs):
                    say(f"round {number + 1} of {pairs}")
                    for is_flooded in (True, False) if number % 2 else (False, True):
                        flood.child.process.send_signal(
                            signal.SIGCONT if is_flooded else signal.SIGSTOP
                        )
                        begun = time.monotonic()
                        session = await run_steps(engines, model, SIZE, STEPS, True)
                        rows[is_flooded] += await fetch_transitions(session, model)
                        flooded_s += (time.monotonic() - begun) * is_flooded
            answers = flood.answers
            after = [read_rss_bytes(node.child.pid) for node in engines.nodes]
    growth = max(a - b for a, b in zip(after, before, strict=True)) / 1e6
    calm, flooded = summarise_ms(rows[False]), summarise_ms(rows[True])
    beside = {
        "flooded, p50, ms": flooded["p50"],
        "without, p50 / p99, ms": [calm["p50"], calm["p99"]],
        "messages a second, both nodes": round(
            sum(count for answer, count in answers.items() if answer != "unsent") / flooded_s
        ),
        "answers": answers,
    }
    what = "transition of 8 KiB between two nodes that are flooded, p99"
    bars = [
        Bar(what, flooded["p99"], "ms", at_most=P99_BAR_MS, beside=beside),
        Bar("growth of a flooded node", round(growth, 1), "MB", at_most=GROWTH_BAR_MB),
    ]
    return Report(bars, {"calm": calm, "flooded": flooded})


@dataclass(slots=True)
class Flood:
    """The flooding process, and after its end the counts of its answers."""

    child: DevnetProcess
    answers: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def run_flood(engines: Engines, log: Path) -> AsyncIterator[Flood]:
    """Flood all nodes until the block is left."""
    targets = [text for node in engines.nodes for text in (node.entry.endpoint, node.entry.node)]
    child = spawn("flood", [sys.executable, "-m", "bench.modes.flood", *targets], log=log)
    flood = Flood(child)
    try:
        while _BEGUN not in await asyncio.to_thread(log.read_text):
            child.check_running()
            await asyncio.sleep(0.02)
        yield flood
    finally:
        child.process.send_signal(signal.SIGCONT)
        child.request_stop()
        await asyncio.to_thread(child.stop)
    flood.answers = json.loads((await asyncio.to_thread(log.read_text)).splitlines()[-1])


# ---- the flood ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Target:
    """A flooded node, and the messages that are sent to it."""

    port: int
    messages: list[bytes]
    open: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def count(self, answer: str) -> None:
        """Note how a message ended."""
        self.open -= 1
        self.answers[answer] += 1


async def flood(targets: list[Target]) -> None:
    """Send RATE messages a second to the nodes until SIGTERM; print the counts of the answers."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    print(_BEGUN, flush=True)
    works: set[asyncio.Task[None]] = set()
    due, at_s, unsent = 0.0, loop.time(), 0
    while not stopping.is_set():
        await asyncio.sleep(TICK_S)
        now_s = loop.time()
        due += min(now_s - at_s, 10 * TICK_S) * RATE  # not what it missed while it was stopped
        at_s = now_s
        for number in range(int(due)):
            target = targets[number % len(targets)]
            if target.open >= AT_ONCE:
                unsent += 1
                continue
            target.open += 1
            work = loop.create_task(_send(target))
            works.add(work)
            work.add_done_callback(works.discard)
        due %= 1
    answers = sum((target.answers for target in targets), Counter({"unsent": unsent}))
    print(json.dumps(answers), flush=True)


async def _send(target: Target) -> None:
    source = (f"127.0.0.{random.randrange(2, 2 + ADDRESSES)}", 0)
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(
            lambda: _Message(target), "127.0.0.1", target.port, local_addr=source
        )
    except OSError as error:
        target.count(type(error).__name__)


class _Message(asyncio.Protocol):
    """One connection, one message; it ends with the answer, or after PATIENCE_S."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._answer = "closed"
        self._handle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        reset = struct.pack("ii", 1, 0)  # so that no port is held after the end
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self._handle = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up)
        self._transport.write(random.choice(self._target.messages))

    def data_received(self, data: bytes) -> None:
        self._answer = data[9:12].decode(errors="replace")
        if self._answer == "101":  # let in: send nonsense, and wait to be sent away
            self._answer = "101 and closed"
            self._transport.write(b"\x82\xfe\x07\xd0" + bytes(2_004))
        elif self._answer.isdigit():
            self._transport.abort()

    def _give_up(self) -> None:
        self._answer = "no answer"
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._target.count(self._answer)


def make_messages(address: str) -> list[bytes]:
    """Return what strangers send to a node: bodies that are no plan, and handshakes."""
    bodies = [b"{", b"[" * 2_000, b'{"plan":' + b"1" * 60_000 + b"}", b"\xff" * 999]
    head = f"POST {api.PLAN_CERTIFICATE.path} HTTP/1.1\r\nHost: x\r\n"
    posts = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
    tokens = [_make_token(address) for _ in range(TOKENS)]
    forged = [token[:-8] + "AAAAAAAA" for token in tokens]
    return posts * (TOKENS // 2) + [_make_handshake(token) for token in tokens + forged]


def _make_handshake(token: str) -> bytes:
    return (
        f"GET {api.DATA.path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        f"Authorization: Bearer {token}\r\n\r\n"
    ).encode()


def _make_token(address: str) -> str:
    return sign_jws(
        generate_identity(),
        typ=api.DATA.typ,
        audience=address,
        body={"execution_id": ""},
        now_s=int(time.time()) + limits.CLOCK_SKEW_S - 1,  # valid for longer than the benchmark
        ttl_s=limits.JWS_TTL_S,
    )


if __name__ == "__main__":
    uvloop.run(
        flood(
            [
                Target(int(url.rpartition(":")[2]), make_messages(address))
                for url, address in zip(sys.argv[1::2], sys.argv[2::2], strict=True)
            ]
        )
    )
