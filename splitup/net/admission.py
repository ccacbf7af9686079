"""What strangers may use of an HTTP server, and who counts as one.

Everybody is a stranger until a signed request shows that a plan, a stake, a deposit or a membership
stands behind the key. The handler of that request then vouches for the connection, and none of the
bounds here apply to it any more. A stranger takes connections, requests and bytes, all counted by
address (``get_group``). When something runs short, the newest stranger of the address that has the
most goes first: what others use costs nobody his share.

The checks come in the order of their costs: an address that has used up its share is turned away
before its connection has a parser, and waits before its request is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

from aiohttp import web

from splitup.core import tuning
from splitup.core.errors import Unavailable
from splitup.core.places import Places
from splitup.core.throughput import Allowance


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


class Admission:
    """The connections of one server, and what its strangers have used."""

    def __init__(self) -> None:
        self.large_bodies: Places[asyncio.Task[Any]] = Places(tuning.HTTP_LARGE_BODIES)
        self.known_bodies = asyncio.Semaphore(tuning.HTTP_LARGE_BODIES)
        self._groups: dict[asyncio.Transport, str] = {}  # of all connections
        self._keys: dict[asyncio.Transport, str] = {}  # of those that are vouched for
        self._per_key: Counter[str] = Counter()
        self._strangers: Places[asyncio.Transport] = Places(tuning.STRANGERS)
        self._all = Allowance(tuning.STRANGERS_PER_S, tuning.STRANGERS_BURST)
        self._by_group: OrderedDict[str, Allowance] = OrderedDict()

    # ---- connections ---------------------------------------------------------------------------

    def enter(self, transport: asyncio.Transport) -> bool:
        """Count a new connection; return whether it may stay, and drop another one for it."""
        peer = transport.get_extra_info("peername")
        group = get_group(peer[0]) if isinstance(peer, tuple) else "local"
        if self._spend(group, 1) is None:
            return False
        shed = self._strangers.take(group, transport)
        if shed == (group, transport):
            return False
        self._groups[transport] = group
        if shed is not None:
            shed[1].abort()
        return True

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection that has ended."""
        group = self._groups.pop(transport, None)
        if group is not None:
            self._strangers.leave(group, transport)
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

    # ---- requests ------------------------------------------------------------------------------

    def is_stranger(self, request: web.Request) -> bool:
        """Return whether nobody has vouched for a request's connection."""
        return request.transport not in self._keys

    async def pace(self, request: web.Request, amount: float) -> None:
        """Wait until a stranger's share allows ``amount`` requests; raise Unavailable."""
        if not self.is_stranger(request):
            return
        wait_s = self._spend(self.get_group(request), amount)
        if wait_s is None:
            raise Unavailable("too many requests come from this address; try again in a minute")
        if wait_s:
            await asyncio.sleep(wait_s)

    @contextlib.contextmanager
    def hold(self, request: web.Request, places: Places[asyncio.Task[Any]]) -> Iterator[None]:
        """Hold a place by address for a block; raise Unavailable, or cancel another's request."""
        group, task = self.get_group(request), asyncio.current_task()
        assert task is not None
        shed = places.take(group, task)
        if shed == (group, task):
            raise Unavailable("too many requests are being served; try again in a minute")
        if shed is not None:
            shed[1].cancel()
        try:
            yield
        finally:
            places.leave(group, task)

    def get_group(self, request: web.Request) -> str:
        """Return the address that a request is counted for."""
        transport = request.transport
        return self._groups.get(transport, "gone") if transport is not None else "gone"

    def _spend(self, group: str, amount: float) -> float | None:
        """Return the seconds to wait for ``amount``, None when too many wait already.

        While everybody's share is used up, an address that has left its own untouched waits longer
        before it is turned away, so that a flood from elsewhere does not shut it out.
        """
        now_s = asyncio.get_running_loop().time()
        own = self._by_group.get(group)
        if own is None:
            own = Allowance(tuning.STRANGER_PER_S, tuning.STRANGER_BURST)
            self._by_group[group] = own
            while len(self._by_group) > tuning.STRANGER_ADDRESSES:
                self._by_group.popitem(last=False)
        self._by_group.move_to_end(group)
        patience_s = tuning.STRANGER_PATIENCE_S
        if own.spend(0, now_s) > patience_s:
            return None
        if self._all.spend(0, now_s) > (patience_s if own.get_left(now_s) < 1 else 2 * patience_s):
            return None
        return max(own.spend(amount, now_s), self._all.spend(amount, now_s))


class Door(asyncio.Protocol):
    """Passes a connection on to an HTTP server's protocol, if it is admitted."""

    def __init__(self, admission: Admission, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._admission = admission
        self._make_protocol = make_protocol
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = cast(asyncio.Transport, transport)
        if not self._admission.enter(accepted):
            accepted.abort()
            return
        self._transport = accepted
        self._inner = self._make_protocol()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._admission.leave(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(error)
            self._inner = None


class AdmittingSite(web.BaseSite):
    """A listening socket whose connections are admitted before the server sees them."""

    def __init__(self, runner: web.AppRunner, admission: Admission, host: str, port: int) -> None:
        super().__init__(runner, backlog=tuning.HTTP_BACKLOG)
        self._admission, self._host, self._port = admission, host, port

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen; raise OSError when the port is taken."""
        await super().start()
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Door(self._admission, server), self._host, self._port, backlog=self._backlog
        )
