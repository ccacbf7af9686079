from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection


class Proxy:
    """A TCP proxy on the loopback that can be taken away with all its connections.

    Or its connections can be left half-open: nothing passes any more, and nobody is told.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing: dict[int, asyncio.Event] = {}  # of each connection, by the opener's port
        self._is_cut = False
        self.port = 0
        self.connections = 0
        self.open_connections = 0

    @classmethod
    async def open(cls, port: int, target: int) -> Proxy:
        """Listen on ``port``, 0 for any."""
        proxy = cls(target)
        proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", port)
        proxy.port = proxy._server.sockets[0].getsockname()[1]
        return proxy

    def freeze(self, but: Collection[int] = ()) -> None:
        """Let nothing pass the connections that there are, ``but`` those from these ports."""
        for port, passing in self._passing.items():
            if port not in but:
                passing.clear()

    def cut(self) -> None:
        """Let nothing pass any more, and not the connections to come either, until ``mend``."""
        self._is_cut = True
        self.freeze()

    def mend(self) -> None:
        """Let everything pass again, also what has waited."""
        self._is_cut = False
        for passing in self._passing.values():
            passing.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pipe_both(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pipe_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        passing = self._passing[port] = asyncio.Event()
        if not self._is_cut:
            passing.set()
        self.connections += 1
        self.open_connections += 1
        ends = [writer]
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target)
            ends.append(to_writer)
            await asyncio.gather(pipe(reader, to_writer, passing), pipe(to_reader, writer, passing))
        except ConnectionRefusedError:
            pass  # nobody is there: the opener learns it by the end of its connection
        finally:
            self.open_connections -= 1
            del self._passing[port]
            for end in ends:
                end.close()


async def pipe(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            await passing.wait()
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()
