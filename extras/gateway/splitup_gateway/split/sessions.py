"""Sessions of devices: who may continue which, at which position, and until when.

A session holds a lease, in whose execution the nodes keep the rows that were fed. There are at most
``most`` sessions; the one that was used least recently makes room for a new one (where there are
keys, of those whose key has the most). Of another key that has more it may compute: then the new
one begins when that has its answer. One that nobody uses for ``ttl_s`` ends. A device whose session
was evicted feeds its rows again from position 0.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from splitup_private.adapters.messages import check_signer
from splitup_private.split.messages import Forward, SplitError

from splitup.client.leases import Lease
from splitup.client.outcome import Array
from splitup.core.errors import ExecutionFailed, InvalidInput
from splitup_gateway.split.models import SplitModel

KNOWN_GONE: Final = 4_096  # sessions that ended, whose ids are remembered
_ID_BYTES: Final = 24
_Reason = Literal["evicted", "ended"]
_ORIGIN: Final = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How many sessions there may be at once, and how long one is kept that nobody uses.

    ``adapter_hosts`` are URLs of hosts that the page's devices may ask themselves;
    ``adapter_signers`` the only keys, if any, that may have signed what these hosts offer.
    """

    most: int = 32
    ttl_s: float = 300.0
    adapter_hosts: tuple[str, ...] = ()
    adapter_signers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for url in self.adapter_hosts:  # a word of a content security policy
            if not _ORIGIN.fullmatch(url):
                raise InvalidInput(
                    f"the adapter host '{url}' is no URL as https://host:port, without a path"
                )
        for key in self.adapter_signers:
            check_signer(key)
        if self.adapter_signers and not self.adapter_hosts:
            raise InvalidInput("an adapter signer needs an adapter host: give --adapter-host URL")
        if self.most < 1 or self.ttl_s <= 0:
            raise InvalidInput("there must be room for one session, for longer than 0 s")


@dataclass(eq=False, slots=True)
class DeviceSession:
    """Rows that nodes hold for one device. ``owner`` is the API key's name, None without keys."""

    id: str
    owner: str | None
    model: SplitModel
    expires_at: float = 0.0
    rows: int = 0
    steps: int = 0  # of all forwards, which are paid for
    submitted: int = 0  # by the latest forward
    lease: Lease | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)  # computes no forward
    predecessor: asyncio.Task[None] | None = None  # the end of the session that made room

    def compute_cost(self) -> int:
        """Return what the latest forward cost, in micro-USDC; all together are rounded up once."""
        cost = self.model.manifest.cost_micro_usdc
        return cost(self.steps) - cost(self.steps - self.submitted)


class DeviceSessions:
    """All sessions of one server."""

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self._sessions: OrderedDict[str, DeviceSession] = OrderedDict()  # least recent first
        self._gone: OrderedDict[str, tuple[str | None, _Reason]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    async def close(self) -> None:
        """End all sessions and give their leases back."""
        if self._timer is not None:
            self._timer.cancel()
        for session in tuple(self._sessions.values()):
            self._drop(session, "evicted")
        await asyncio.gather(*self._closing, return_exceptions=True)

    # ---- who may use which ---------------------------------------------------------------------

    @contextmanager
    def use(
        self, request: Forward, owner: str | None, model: SplitModel
    ) -> Iterator[DeviceSession]:
        """Give the session of a request, locked; raise SplitError when it has none."""
        session = self._find(request, owner, model)
        if session is not None:
            _check_idle(session)
        _check_position(request, model, 0 if session is None else session.rows)
        if session is None:  # only now: a refused request must not evict anybody
            session = self._add(request.session_id, owner, model)
        session.is_idle.clear()
        try:
            yield session
        finally:
            session.is_idle.set()
            if self._sessions.get(session.id) is session:
                self._keep(session)

    def _keep(self, session: DeviceSession) -> None:
        """Keep a session after its use, until it expires or its execution has to end."""
        if session.lease is None:  # none could be opened: there is nothing to keep
            del self._sessions[session.id]
            return
        session.expires_at = min(_now() + self.options.ttl_s, session.lease.use_until)
        self._sessions.move_to_end(session.id)
        self._set_timer()

    def _find(self, request: Forward, owner: str | None, model: SplitModel) -> DeviceSession | None:
        """Return the session of a request, None for one that begins a new one."""
        wanted = request.session_id
        if wanted is not None and (known := self._sessions.get(wanted)) is not None:
            if known.owner != owner or known.model is not model:
                raise _refuse_foreign(wanted)
            return known
        gone = None if wanted is None else self._gone.get(wanted)
        if gone is not None and gone[0] != owner:
            raise _refuse_foreign(str(wanted))
        if gone is not None and gone[1] == "ended":
            raise SplitError(
                "session_ended", f"session {wanted} was ended; begin another one", status=409
            )
        if request.incremental:
            raise _refuse_unknown(wanted, is_evicted=gone is not None)
        return None

    def _add(self, wanted: str | None, owner: str | None, model: SplitModel) -> DeviceSession:
        """Begin a session; the least recent one of who has the most makes room for it."""
        counts = Counter([owner, *(one.owner for one in self._sessions.values())])
        predecessor = None
        if len(self._sessions) >= self.options.most:
            most = max(counts[one.owner] for one in self._sessions.values())
            largest = [one for one in self._sessions.values() if counts[one.owner] == most]
            found = next((one for one in largest if one.is_idle.is_set()), largest[0])
            if not found.is_idle.is_set() and most <= counts[owner]:
                raise SplitError(
                    "too_many_sessions",
                    f"all {self.options.most} sessions are taken, and those that could make room "
                    "compute; try again in a few seconds",
                    status=429,
                )
            predecessor = self._drop(found, "evicted")
        name = wanted or secrets.token_urlsafe(_ID_BYTES)
        self._gone.pop(name, None)
        session = DeviceSession(name, owner, model, predecessor=predecessor)
        self._sessions[name] = session
        return session

    def end(self, name: str, owner: str | None) -> None:
        """Forget a session at its device's wish; raise SplitError for one that it has not."""
        session = self._sessions.get(name)
        if session is None:
            gone = self._gone.get(name)
            if gone is None or gone[0] != owner:
                raise _refuse_unknown(name, is_evicted=False)
            self._remember(name, owner, "ended")
        elif session.owner != owner:
            raise _refuse_foreign(name)
        else:
            _check_idle(session)
            self._drop(session, "ended")

    def _drop(self, session: DeviceSession, reason: _Reason) -> asyncio.Task[None]:
        """Forget a session; its lease goes back when it has computed what it computes."""
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
            self._remember(session.id, session.owner, reason)
        task = asyncio.create_task(_close(session), name=f"the end of {session.id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def _remember(self, name: str, owner: str | None, reason: _Reason) -> None:
        self._gone[name] = owner, reason
        self._gone.move_to_end(name)
        while len(self._gone) > KNOWN_GONE:
            self._gone.popitem(last=False)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [one.expires_at for one in self._sessions.values() if one.is_idle.is_set()]
        if times:
            self._timer = asyncio.get_running_loop().call_at(min(times), self._expire)

    def _expire(self) -> None:
        for session in tuple(self._sessions.values()):
            if session.is_idle.is_set() and session.expires_at <= _now():
                self._drop(session, "evicted")
        self._set_timer()

    # ---- computing -----------------------------------------------------------------------------

    async def compute(
        self, session: DeviceSession, request: Forward, rows: Array, principal: str
    ) -> tuple[Array, Lease, float, float]:
        """Feed rows to the nodes at the session's position; the session holds them afterwards.

        ``principal`` is whose execution it is. Returns the rows that nodes gave, on which lease,
        and the seconds that it waited and that nodes took. Raises SplitError when the execution
        that holds the earlier rows has no room or has failed.
        """
        began = time.monotonic()
        session.submitted = 0
        cut = session.model.cut
        steps = cut.split(rows, request.position)
        lease = await self._get_lease(session, request, len(steps), principal)
        sent = time.monotonic()
        session.rows = request.position  # rows behind it are lost with the first step
        try:
            futures = []
            for step in steps:
                futures.append(lease.session.submit(step))
                session.submitted += 1
                session.steps += 1
            outputs = [(await future)[cut.output] for future in futures]
        except BaseException as error:
            info = session.model.info
            reach = request.seq_len if info.steps_back is None else info.steps_back
            if isinstance(error, ExecutionFailed) or info.is_recurrent or request.seq_len > reach:
                self._drop(session, "evicted")  # its layers cannot go back to this position
            raise
        session.rows = request.position + request.seq_len
        return np.concatenate(outputs), lease, sent - began, time.monotonic() - sent

    async def _get_lease(
        self, session: DeviceSession, request: Forward, steps: int, principal: str
    ) -> Lease:
        lease = session.lease
        if lease is not None:
            if lease.can_go_on(steps, _now()):
                return lease
            if request.incremental:
                self._drop(session, "evicted")
                raise _refuse_unknown(session.id, is_evicted=True)
            session.lease = None
            await session.stack.aclose()
            session.stack = AsyncExitStack()
        session.rows = 0
        if session.predecessor is not None:
            await asyncio.wait([session.predecessor])
            session.predecessor = None
        wanted = max(steps, session.model.session_steps)
        session.lease = await session.stack.enter_async_context(
            session.model.pool.borrow(principal, (), wanted)
        )
        return session.lease


async def _close(session: DeviceSession) -> None:
    await session.is_idle.wait()
    await session.stack.aclose()


def _check_position(request: Forward, model: SplitModel, rows: int) -> None:
    wanted = rows if request.incremental else 0
    if request.position != wanted:
        hint = "a forward that is not incremental begins at 0"
        if request.incremental:
            hint = f"the session holds {rows} rows; to go back, feed again from 0"
        raise SplitError(
            "bad_position",
            f"position is {request.position}, and {wanted} is next: {hint}",
            status=409,
        )
    if request.position + request.seq_len > model.info.context:
        raise SplitError(
            "beyond_context",
            f"positions {request.position} to {request.position + request.seq_len - 1} are not all "
            f"within the context of model {model.name}, {model.info.context}",
        )


def _check_idle(session: DeviceSession) -> None:
    if not session.is_idle.is_set():
        raise SplitError(
            "session_busy",
            f"session {session.id} runs a forward already; wait for its answer",
            status=409,
        )


def _refuse_foreign(name: str) -> SplitError:
    return SplitError(
        "session_foreign", f"session {name} belongs to another key or model", status=403
    )


def _refuse_unknown(name: str | None, *, is_evicted: bool) -> SplitError:
    if name is None:
        return SplitError("session_unknown", "an incremental forward needs a session_id")
    again = "feed its rows again from position 0, without 'incremental'"
    if is_evicted:
        return SplitError(
            "session_evicted", f"session {name} is not kept any more; {again}", status=410
        )
    return SplitError("session_unknown", f"there is no session {name}; {again}", status=404)


def _now() -> float:
    return asyncio.get_running_loop().time()
