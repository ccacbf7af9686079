"""A relay for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from aiohttp import web

from splitup.core.errors import PeerFault, Unavailable
from splitup.crypto.keys import generate_identity
from splitup.messages import api
from splitup.messages.snapshots import ReachRequest
from splitup.net.http_server import Server, make_app, read_message, serve_app
from splitup.net.links import Link, LinkAcceptor
from splitup.net.relay import Relay
from tests.builders import HANG_S, anybody


class Receiver:
    """The data plane of a node, whose frames are kept; ``fault`` makes it find fault with each."""

    def __init__(self) -> None:
        self.identity = generate_identity()
        self.received: asyncio.Queue[tuple[Link, bytes]] = asyncio.Queue()
        self.closed: asyncio.Queue[Link] = asyncio.Queue()
        self.acceptor = LinkAcceptor(
            self.identity.address,
            self._on_frame,
            on_closed=self.closed.put_nowait,
            may_open=anybody,
        )
        self.fault = False

    def _on_frame(self, link: Link, data: bytes) -> None:
        if self.fault:
            raise PeerFault("a fault")
        self.received.put_nowait((link, data))

    async def take(self) -> bytes:
        async with asyncio.timeout(HANG_S):
            return (await self.received.get())[1]


class RelayServer:
    """A relay with its own port that knows some nodes, and answers reach requests as a member."""

    def __init__(self, problem: str | None = None, audience: str = "") -> None:
        self.problem, self.audience = problem, audience
        self.asked: list[ReachRequest] = []
        self.registering = asyncio.Event()
        self.keys: dict[str, str] = {}
        self.server: Server | None = None
        self.port = 0

    async def find_key(self, address: str) -> str:
        self.registering.set()
        return self.keys.get(address, "")

    async def start(self) -> None:
        self.relay = Relay(lambda: self.url, self.find_key)
        app = make_app()
        self.relay.add_routes(app)
        app.router.add_post(api.REACH_REQUEST.path, self._on_reach)
        self.server = await serve_app(app, "127.0.0.1", self.port)
        self.port = self.server.port

    async def stop(self) -> None:
        assert self.server is not None
        await self.relay.close()
        await self.server.close()

    async def _on_reach(self, request: web.Request) -> web.Response:
        received = await read_message(request, api.REACH_REQUEST, audience=self.audience)
        self.asked.append(received.message)
        if self.problem is None:
            raise Unavailable("this member does not know")
        return web.json_response({"problem": self.problem})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def nodes(self) -> list[str]:
        """Return the nodes that are registered now."""
        return list(self.relay._nodes)


class BreakingProxy:
    """A TCP proxy with slow connections; each of the first ones breaks after some bytes."""

    LAG_S = 0.002  # per 4 KB

    def __init__(self, target: int, budgets: Sequence[int]) -> None:
        self._target = target
        self._budgets: Iterator[int] = iter(budgets)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.connections = 0

    async def start(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pipe_both(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pipe_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = next(self._budgets, None)
        there, back = await asyncio.open_connection("127.0.0.1", self._target)

        async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            with contextlib.suppress(ConnectionError):
                while data := await source.read(4_096):
                    await asyncio.sleep(self.LAG_S)
                    sink.write(data if left is None else data[:left])
                    await sink.drain()
                    if left is not None and (left := left - len(data)) <= 0:
                        return

        both = [
            asyncio.ensure_future(pipe(reader, back)),
            asyncio.ensure_future(pipe(there, writer)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in both:
                one.cancel()
            for end in (writer, back):
                end.transport.abort()
            await asyncio.gather(*both, return_exceptions=True)
