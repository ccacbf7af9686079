"""Transitions while strangers flood the nodes' ports (A25): what the honest are left with.

    python -m bench.flood URL ADDRESS…    # the flood itself, until it is stopped

A third process posts bodies that are no plan, opens data connections with forged and with valid
tokens (anybody has a key), and sends nonsense over those, as fast as it gets answers. It shares the
processors with the nodes, so half of what it costs them here is the machine's size.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from bench.engines import Engines, run_engines
from bench.report import Bar, Report, read_rss_bytes, say, summarise_ms
from bench.transition import RUNS, fetch_transitions, run_steps, save_small_model
from splitup.client.outcome import Transition
from splitup.core import limits
from splitup.crypto.jws import sign_jws
from splitup.crypto.keys import generate_identity
from splitup.devnet.processes import Child, spawn
from splitup.messages import api

SIZE: Final = 2_048  # floats of a tensor
STEPS: Final = 25
PAIRS: Final = 16
AT_ONCE: Final = 16  # requests of the flood to each node
P99_BAR_MS: Final = 5.0  # that of a transition without a flood
GROWTH_BAR_MB: Final = 64.0
_BEGUN: Final = "the flood has begun"


async def run(quick: bool) -> Report:
    """Measure with and without, in turn."""
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
        "refused a second, both nodes": round(sum(answers.values()) / flooded_s),
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
    """The flooding process, and how it was answered once it has ended."""

    child: Child
    answers: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def run_flood(engines: Engines, log: Path) -> AsyncIterator[Flood]:
    """Flood all nodes until the block is left."""
    targets = [text for node in engines.nodes for text in (node.entry.endpoint, node.entry.node)]
    child = spawn("flood", [sys.executable, "-m", "bench.flood", *targets], log=log)
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


async def flood(targets: list[tuple[str, str]]) -> None:
    """Flood nodes until SIGTERM; print how often it was answered what."""
    answers: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await _post(http, *targets[0], answers)
        print(_BEGUN, flush=True)
        works = [
            asyncio.create_task(_repeat(http, url, address, answers))
            for url, address in targets
            for _ in range(AT_ONCE)
        ]
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        await stopping.wait()
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
    print(json.dumps(answers), flush=True)


async def _repeat(
    http: aiohttp.ClientSession, url: str, address: str, answers: Counter[str]
) -> None:
    attacks: list[Attack] = [_post, _post, _forge, _babble]
    while True:
        try:
            await random.choice(attacks)(http, url, address, answers)
        except (aiohttp.ClientError, OSError) as error:
            answers[type(error).__name__] += 1


async def _post(http: aiohttp.ClientSession, url: str, address: str, answers: Counter[str]) -> None:
    body = random.choice([b"{", b"[" * 2_000, b'{"plan":' + b"1" * 60_000 + b"}", b"\xff" * 999])
    async with http.post(api.PLAN_CERTIFICATE.url(url), data=body) as response:
        await response.read()
        answers[f"POST {response.status}"] += 1


async def _forge(
    http: aiohttp.ClientSession, url: str, address: str, answers: Counter[str]
) -> None:
    token = _make_token(address)[:-8] + "AAAAAAAA"
    headers = {"Authorization": f"Bearer {token}", "Connection": "Upgrade", "Upgrade": "websocket"}
    async with http.get(api.DATA.url(url), headers=headers) as response:
        answers[f"forged token {response.status}"] += 1


async def _babble(
    http: aiohttp.ClientSession, url: str, address: str, answers: Counter[str]
) -> None:
    headers = {"Authorization": f"Bearer {_make_token(address)}"}
    async with http.ws_connect(api.DATA.url(url), headers=headers) as socket:
        await socket.send_bytes(random.randbytes(2_000))
        await socket.receive()
        answers[f"nonsense closed {socket.close_code}"] += 1


def _make_token(address: str) -> str:
    return sign_jws(
        generate_identity(),
        typ=api.DATA.typ,
        audience=address,
        body={"execution_id": ""},
        now_s=int(time.time()),
        ttl_s=limits.JWS_TTL_S,
    )


Attack = Callable[[aiohttp.ClientSession, str, str, Counter[str]], Coroutine[Any, Any, None]]


if __name__ == "__main__":
    uvloop.run(flood(list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))))
