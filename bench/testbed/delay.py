"""TCP proxies that pass bytes on as a slow link would, in both directions.

    python -m bench.testbed.delay PORT…    # each line on stdin has the numbers of a Quality

It first prints the ports to connect to, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass

from bench.testbed.run_python import run_lines

HOST = "127.0.0.1"
_CHUNK_BYTES = 2**18
_SEGMENT_BYTES = 1_460
_LEAST_RETRANSMISSION_S = 0.2  # of Linux
_IN_ORDER_S = 1e-6


@dataclass(frozen=True, slots=True)
class Quality:
    """A link: every byte takes half of the round trip, and up to ``jitter_ms`` more.

    A segment that is lost arrives when TCP's timer has sent it again, and all behind it waits.
    ``kilobytes_s`` is the bandwidth of each direction of a connection; 0: unlimited.
    """

    round_trip_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    kilobytes_s: float = 0.0


class Delay:
    """All proxies of one process, with one quality."""

    def __init__(self) -> None:
        self.quality = Quality()
        self._random = random.Random(15)
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, target: int) -> int:
        """Serve a target; return the port of its proxy."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(HOST, target)
            for source, sink in ((reader, back), (there, writer)):
                task = asyncio.create_task(self._pass(source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(serve, HOST, 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        last = asyncio.Event()
        free_s = due_s = 0.0  # when the line is free, and the last bytes arrive
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                link, free_s = self.quality, max(free_s, loop.time())
                free_s += len(data) / (1e3 * link.kilobytes_s) if link.kilobytes_s else 0.0
                due_s = max(free_s + self._draw_s(len(data)), due_s + _IN_ORDER_S)
                loop.call_at(due_s, sink.write, data)
        loop.call_at(max(due_s, loop.time()) + _IN_ORDER_S, last.set)
        await last.wait()
        sink.close()

    def _draw_s(self, size: int) -> float:
        """Return how long bytes are on their way."""
        link = self.quality
        seconds = (link.round_trip_ms / 2 + self._random.uniform(0, link.jitter_ms)) / 1e3
        arrives = (1 - link.loss) ** -(-size // _SEGMENT_BYTES)
        if self._random.random() >= arrives:
            seconds += max(_LEAST_RETRANSMISSION_S, 1.5e-3 * link.round_trip_ms)
        return seconds


async def serve(targets: Sequence[int]) -> None:
    """Serve until stdin ends."""
    delay = Delay()
    print(*[await delay.listen(target) for target in targets], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        delay.quality = Quality(*map(float, line.split()))
        print(line, end="", flush=True)


@asynccontextmanager
async def run_delay(
    targets: Sequence[int],
) -> AsyncIterator[tuple[list[int], Callable[[Quality], Awaitable[None]]]]:
    """Start the proxies; yields their ports and the function that sets their quality."""
    async with run_lines("bench.testbed.delay", *map(str, targets)) as (ports, ask):

        async def set_quality(quality: Quality) -> None:
            await ask(" ".join(map(str, astuple(quality))))

        yield [int(port) for port in ports.split()], set_quality


if __name__ == "__main__":
    asyncio.run(serve([int(port) for port in sys.argv[1:]]))
