"""TCP proxies in front of processes, and cuts between them that nobody is told of (Linux)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_LOCAL_ADDRESS: Final = 1  # columns of /proc/net/tcp
_INODE: Final = 9


@dataclass(eq=False)
class _Line:
    """One connection through the exchange, from a local port to the process at ``place``."""

    port: int
    place: int
    flows: asyncio.Event = field(default_factory=asyncio.Event)


class Exchange:
    """Every connection to a member goes through here, and stays open and silent while it is cut."""

    def __init__(self) -> None:
        self._cut: dict[int, int] = {}  # place -> process
        self._servers: list[asyncio.Server] = []
        self._lines: dict[asyncio.Task[None], _Line] = {}
        self._new: list[_Line] = []  # opened during a cut, by nobody knows whom
        self._sorting: asyncio.Task[None] | None = None

    async def open(self, place: int, target_port: int) -> int:
        """Stand in front of a process; return the port that the others are to use."""

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = _Line(writer.get_extra_info("peername")[1], place)
            if not self._cut:
                line.flows.set()
            elif place not in self._cut:
                self._new.append(line)
            task = asyncio.ensure_future(_carry(line, target_port, reader, writer))
            self._lines[task] = line
            task.add_done_callback(self._lines.pop)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        await self._drop([*self._lines, *([self._sorting] if self._sorting else [])])

    def cut(self, place: int, process: int) -> None:
        """Let nothing pass to the process at ``place``, nor from it; no connection breaks."""
        self._cut[place] = process
        ports = _find_ports(process)
        for line in self._lines.values():
            if line.place == place or line.port in ports:
                line.flows.clear()
        if self._sorting is None:
            self._sorting = asyncio.create_task(self._sort())

    async def heal(self, place: int) -> None:
        """Connect it again; what was open in the meantime is lost."""
        del self._cut[place]
        await self._drop([task for task, line in self._lines.items() if not line.flows.is_set()])

    async def _sort(self) -> None:
        """Connect new lines that no cut process opened, several at once: a look costs much."""
        while True:
            await asyncio.sleep(0.05)
            new, self._new = self._new, []
            if not new:
                continue
            ports = set().union(*(_find_ports(process) for process in self._cut.values()))
            for line in new:
                if line.port not in ports and line.place not in self._cut:
                    line.flows.set()

    async def _drop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(
    line: _Line, target_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    ends = [writer]
    try:
        held = await _hold(line, reader)
        if held is None:
            return
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", target_port)
        ends.append(to_writer)
        to_writer.write(held)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pipe(line, reader, to_writer))
            group.create_task(_pipe(line, to_reader, writer))
    except* OSError:
        pass  # the process is down: its peers see a connection that ends
    finally:
        for end in ends:
            end.close()


async def _hold(line: _Line, reader: asyncio.StreamReader) -> bytes | None:
    """Return what was said until the line flows, None when the caller gave up."""
    held = bytearray()
    while not line.flows.is_set():
        reading = asyncio.ensure_future(reader.read(65_536))
        flowing = asyncio.ensure_future(line.flows.wait())
        try:
            await asyncio.wait({reading, flowing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                data = reading.result()
                if not data:
                    return None
                held += data
        finally:
            reading.cancel()
            flowing.cancel()
            await asyncio.gather(reading, flowing, return_exceptions=True)
    return bytes(held)


async def _pipe(line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        await line.flows.wait()
        writer.write(data)
        await writer.drain()
    await line.flows.wait()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


def _find_ports(process: int) -> set[int]:
    """Return the local ports of a process's sockets on the loopback."""
    inodes = set()
    for descriptor in os.scandir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            name = os.readlink(descriptor.path)
            if name.startswith("socket:["):
                inodes.add(name[8:-1])
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {int(row[_LOCAL_ADDRESS].partition(":")[2], 16) for row in rows if row[_INODE] in inodes}
