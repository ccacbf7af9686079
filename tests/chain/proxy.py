from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    """A TCP proxy on the loopback that can be taken away with all its connections.

    Or its connections can be left half-open: nothing passes any more, and nobody is told.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
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

    def freeze(self) -> None:
        """Let nothing pass the connections that there are; those to come are new."""
        self._passing.clear()
        self._passing = asyncio.Event()
        self._passing.set()

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
        passing = self._passing
        self.connections += 1
        self.open_connections += 1
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            await asyncio.gather(pipe(reader, to_writer, passing), pipe(to_reader, writer, passing))
        finally:
            self.open_connections -= 1
            for end in (writer, to_writer):
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
