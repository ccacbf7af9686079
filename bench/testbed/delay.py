"""TCP proxies that hold every byte back for half a round trip, in both directions.

    python -m bench.testbed.delay FILE PORT…    # each line on stdin sets the round trip in ms

``FILE`` gets the ports to connect to, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from splitup.devnet.state import write_json

HOST = "127.0.0.1"
_CHUNK_BYTES = 2**18


class Delay:
    """All proxies of one process, with one delay."""

    def __init__(self) -> None:
        self.round_trip_s = 0.0
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
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                loop.call_later(self.round_trip_s / 2, sink.write, data)
        loop.call_later(self.round_trip_s / 2, last.set)
        await last.wait()
        sink.close()


async def serve(file: Path, targets: Sequence[int]) -> None:
    """Serve until stdin ends."""
    delay = Delay()
    write_json(file, [await delay.listen(target) for target in targets])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        delay.round_trip_s = float(line) / 1000
        print(line, end="", flush=True)


@asynccontextmanager
async def run_delay(file: Path, targets: Sequence[int]) -> AsyncIterator[Callable[[float], object]]:
    """Start the proxies; yields the function that sets the round trip in ms."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.testbed.delay", str(file), *map(str, targets)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    async def set_round_trip(ms: float) -> None:
        stdin.write(f"{ms}\n".encode())
        await stdout.readline()

    try:
        await set_round_trip(0)
        yield set_round_trip
    finally:
        stdin.close()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
