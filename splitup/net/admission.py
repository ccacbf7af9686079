"""What strangers may use of an HTTP server, and who counts as one.

Everybody is a stranger until a signed request shows that a plan, a stake, a deposit or a membership
stands behind the key. The handler of that request then vouches for the connection, and none of the
bounds here apply to it any more. Strangers share

- places, for connections and for requests that take long. When all are taken, the newest stranger
  of the address that has the most goes first (``Places``);
- turns, one for each connection, request and piece of a body. They come at a limited rate, and to
  addresses in rotation, so that a flood waits for itself (``Turns``).

A connection that waits for its first turn has no parser yet and is read once at most; TLS begins
with that turn, too. So a flood costs little more than what the operating system does for it. When
one address has taken every place, its connections that have not asked anything yet make room for
its new ones, oldest first: slow heads do not lock out their neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

from aiohttp import web

from splitup.core import tuning
from splitup.core.errors import Unavailable
from splitup.core.places import Places, RestingTurns, hold_place
from splitup.core.throughput import Allowance


@functools.lru_cache(maxsize=tuning.STRANGERS)
def get_group(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host  # no IP address: a socket of this machine
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"


class Turns:
    """Calls back at a limited rate, for groups in rotation; each holder waits for one turn."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._allowance = Allowance(per_s, burst)
        self._waiting: OrderedDict[str, dict[object, Callable[[], None]]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, group: str, holder: object, go: Callable[[], None]) -> None:
        """Call ``go`` now, or when it is the holder's turn."""
        now_s = asyncio.get_running_loop().time()
        if not self._waiting and self._allowance.take(1, now_s):
            go()
            return
        self._waiting.setdefault(group, {})[holder] = go
        self._wait()

    def leave(self, group: str, holder: object) -> Callable[[], None] | None:
        """Give up a turn that was asked for; return its callback."""
        holders = self._waiting.get(group, {})
        go = holders.pop(holder, None)
        if go is not None and not holders:
            del self._waiting[group]
        return go

    def _wait(self) -> None:
        if self._waiting and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._allowance.get_wait_s(1, loop.time()), self._serve)

    def _serve(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._waiting and self._allowance.take(1, now_s):
            group, holders = self._waiting.popitem(last=False)
            go = holders.pop(next(iter(holders)))
            if holders:
                self._waiting[group] = holders  # behind all others
            go()
        self._wait()


class Admission:
    """The connections of one server, and what its strangers have taken."""

    def __init__(self) -> None:
        self.large_bodies: Places[asyncio.Task[Any]] = Places(tuning.HTTP_LARGE_BODIES)
        self.known_bodies = asyncio.Semaphore(tuning.HTTP_LARGE_BODIES)
        self.known_turns = RestingTurns(tuning.LARGE_MESSAGE_REST)  # by key, at large bodies
        self._groups: dict[asyncio.Transport, str] = {}  # of all connections
        self._keys: dict[asyncio.Transport, str] = {}  # of those that are vouched for
        self._per_key: Counter[str] = Counter()
        self._silent: dict[asyncio.Transport, None] = {}  # strangers that asked nothing, by age
        self._strangers: Places[asyncio.Transport] = Places(_count_places())
        self._turns = Turns(tuning.STRANGERS_PER_S, tuning.STRANGERS_BURST)

    # ---- connections ---------------------------------------------------------------------------

    def enter(self, transport: asyncio.Transport, begin: Callable[[], None]) -> None:
        """Take a new connection in, or drop it; call ``begin`` when it may be read."""
        peer = transport.get_extra_info("peername")
        group = get_group(peer[0]) if isinstance(peer, tuple) else "local"
        shed = self._strangers.take(group, transport)
        if shed == (group, transport):
            silent = (one for one in self._silent if self._groups[one] == group)
            if (oldest := next(silent, None)) is None:
                transport.abort()
                return
            self.leave(oldest)
            oldest.abort()
            self._strangers.take(group, transport)
        elif shed is not None:
            shed[1].abort()
        self._groups[transport] = group
        self._silent[transport] = None
        self._turns.ask(group, transport, begin)

    def replace(self, old: asyncio.Transport, new: asyncio.Transport) -> bool:
        """Count TLS in place of the connection under it; return False when that has ended."""
        group = self._groups.pop(old, None)
        if group is None:
            return False
        self._strangers.leave(group, old)
        self._strangers.take(group, new)
        self._silent.pop(old, None)
        self._silent[new] = None
        self._groups[new] = group
        return True

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection that has ended."""
        group = self._groups.pop(transport, None)
        self._silent.pop(transport, None)
        if group is not None:
            self._strangers.leave(group, transport)
            if (go := self._turns.leave(group, transport)) is not None:
                go()  # whoever waits finds the connection closed
        key = self._keys.pop(transport, None)
        if key is not None:
            self._per_key[key] -= 1
            if not self._per_key[key]:
                del self._per_key[key]

    def vouch(self, request: web.Request, key: str) -> None:
        """Take a connection out of the strangers' bounds: ``key`` has shown what it stands for."""
        transport = request.transport
        if transport is None or transport not in self._groups or transport in self._keys:
            return
        if self._per_key[key] < tuning.KNOWN_CONNECTIONS:
            self._per_key[key] += 1
            self._keys[transport] = key
            self._strangers.leave(self._groups[transport], transport)

    def close(self) -> None:
        """Drop the connections that are left, as those that never had a turn."""
        for transport in list(self._groups):
            transport.abort()

    # ---- requests ------------------------------------------------------------------------------

    def get_key(self, request: web.Request) -> str:
        """Return who was vouched for on a request's connection, "" for a stranger."""
        return self._keys.get(request.transport, "") if request.transport is not None else ""

    async def wait_turn(self, request: web.Request, turns: int = 1) -> None:
        """Wait for a stranger's turns; raise Unavailable when the connection ends."""
        if request.transport is not None:
            self._silent.pop(request.transport, None)
        for _ in range(0 if self.get_key(request) else turns):
            transport = request.transport
            group = self._groups.get(transport) if transport is not None else None
            if group is not None:
                done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._turns.ask(group, transport, functools.partial(_set, done))
                await done
            if transport not in self._groups:
                raise Unavailable("the connection was closed")

    @contextlib.contextmanager
    def hold(self, request: web.Request, places: Places[asyncio.Task[Any]]) -> Iterator[None]:
        """Hold a place by address for a block; raise Unavailable, or cancel another's request."""
        refusal = Unavailable("too many requests are being served; try again in a minute")
        with hold_place(places, self.get_group(request), refusal):
            yield

    def get_group(self, request: web.Request) -> str:
        """Return the address that a request is counted for."""
        transport = request.transport
        return self._groups.get(transport, "closed") if transport is not None else "closed"


def _count_places() -> int:
    """Return how many strangers there may be: half of the open files if those are few."""
    try:
        import resource
    except ImportError:  # not a Unix
        return tuning.STRANGERS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        tuning.STRANGERS if files == resource.RLIM_INFINITY else min(tuning.STRANGERS, files // 2)
    )


def _feed(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    """Pass on what was read before a protocol of buffers was there."""
    reader = cast(asyncio.BufferedProtocol, protocol)  # of asyncio or uvloop
    while data:
        buffer = memoryview(reader.get_buffer(len(data)))
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        reader.buffer_updated(count)
        data = data[count:]


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Door(asyncio.Protocol):
    """Passes a connection on to an HTTP server's protocol, when its turn has come."""

    def __init__(
        self,
        admission: Admission,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._admission = admission
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake: asyncio.Task[None] | None = None
        self._inner: asyncio.Protocol | None = None
        self._early = b""  # read before the turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._admission.enter(self._transport, self._begin)

    def _begin(self) -> None:
        if self._transport.is_closing():
            return
        if self._tls is not None:
            self._handshake = asyncio.create_task(self._begin_tls(self._tls))
            return
        self._pass_on()

    async def _begin_tls(self, tls: ssl.SSLContext) -> None:
        """Put TLS between the connection and this protocol, which then passes on what is inside."""
        loop, below = asyncio.get_running_loop(), self._transport
        starting = asyncio.ensure_future(
            loop.start_tls(
                *(below, self, tls),
                server_side=True,
                ssl_handshake_timeout=tuning.HTTP_READ_S,
                ssl_shutdown_timeout=tuning.HTTP_SHUTDOWN_S,
            )
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # now ``below`` has the protocol of TLS, and that has begun
        early, self._early = self._early, b""
        if early:
            _feed(below.get_protocol(), early)
        try:
            above = await starting
        except (OSError, TimeoutError):  # no TLS, or the other side has gone
            above = None
        if above is None or not self._admission.replace(below, above):
            below.abort()
            self._admission.leave(below)
            return
        self._transport = above
        self._pass_on()

    def _pass_on(self) -> None:
        self._inner = self._make_protocol()
        self._inner.connection_made(self._transport)
        if self._early:
            early, self._early = self._early, b""
            self._transport.resume_reading()
            self._inner.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)
        elif self._handshake is not None:  # it is about to begin, or has just ended
            self._early += data
        elif len(data) > tuning.STRANGER_EARLY_BYTES:
            self._transport.abort()
        else:  # uvloop reads once before it can be stopped
            self._early = data
            self._transport.pause_reading()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._admission.leave(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(error)
            self._inner = None


class AdmittingSite(web.BaseSite):
    """A listening socket whose connections are admitted before the server sees them."""

    def __init__(
        self,
        runner: web.AppRunner,
        admission: Admission,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, backlog=tuning.HTTP_BACKLOG)
        self._admission, self._host, self._port, self._tls = admission, host, port, tls

    @property
    def name(self) -> str:
        return f"http{'s' if self._tls else ''}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen; raise OSError when the port is taken."""
        await super().start()
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Door(self._admission, server, self._tls),
            self._host,
            self._port,
            backlog=self._backlog,
        )
