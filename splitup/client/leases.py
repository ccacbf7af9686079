"""Leases: paid executions that serve one request after another.

Requesting an execution takes a block. So a lease is opened ahead, for many steps, and lent to one
request at a time. The model's cache stays on its nodes between two requests, so that a request is
given the lease that holds the longest beginning of its prompt. Steps that were not used are given
back by the market when the lease ends.

How much of a prompt was cached tells what earlier prompts said. So a lease belongs to the first
principal that uses it (an API key, or a group of keys) until it ends, with its times and receipt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import operator
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from splitup.client.execution.session import Session
from splitup.client.market.holders import describe_holders
from splitup.client.queueing import Caller, HoldTimes, Totals
from splitup.client.text.generation import make_cache_contents
from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.errors import (
    ChainRejected,
    ExecutionFailed,
    InvalidInput,
    SplitUpError,
    Throttled,
    Unavailable,
)
from splitup.core.latest import Latest
from splitup.decode.cache_contents import CacheContents
from splitup.messages.snapshots import ModelHolders

_log = logging.getLogger("splitup.serve")

RETRY_S: Final = 5.0  # after a lease could not be opened ahead of a request
KNOWN_EXECUTIONS: Final = 10_000  # whose receipts clients may ask for
CLOSE_S: Final = 30.0  # that a server which stops waits for its executions
FAILED_CLOSE_S: Final = 1.0  # and for failed ones to say so; their refund comes minutes later


class Sessions(Protocol):
    """What opens the executions of a pool: a network, or a view of one."""

    def session(
        self,
        model: str,
        *,
        steps: int,
        deadline_s: float,
        verify: str | None,
        on_failure: Callable[[ExecutionFailed], None],
    ) -> AbstractAsyncContextManager[Session]:
        """Open an execution; see ``Network.session``."""

    async def look(self, name: str) -> ModelHolders | None:
        """Return how far nodes have loaded a model; see ``Network.look``."""


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How many leases of one model there may be, and how large they are.

    ``most`` run at once; ``warm`` of them are open also while nobody asks. A lease pays for
    ``steps`` steps and ends after ``seconds``; it begins no request after half of that, so that its
    last request has the other half. ``idle_s``: a lease beyond the warm ones ends when nobody has
    used it for so long. ``waiting``: requests that may wait for a lease. ``verify``: the share of
    its tasks that are verified, as for ``Network.session``.
    """

    most: int = 8
    warm: int = 1
    steps: int = 4_096
    seconds: float = 1_200.0
    idle_s: float = 60.0
    waiting: int = 256
    verify: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warm <= self.most or self.most < 1:
            raise InvalidInput(
                f"{self.warm} warm leases of at most {self.most} cannot be; keep 0 to {self.most} "
                "warm, and allow at least one"
            )
        if not 1 <= self.steps <= limits.MAX_STEPS:
            raise InvalidInput(f"a lease has 1 to {limits.MAX_STEPS} steps, not {self.steps}")


@dataclass(eq=False, slots=True)
class Lease:
    """An open execution, and what the model's cache holds. Lent to one request at a time.

    ``principal`` is whose requests it serves, None before the first one.
    """

    session: Session
    contents: CacheContents
    stack: AsyncExitStack
    lend_until: float  # on the event loop's clock
    use_until: float
    used_at: float
    principal: str | None = None
    lent_at: float = 0.0
    is_spoiled: bool = False  # its nodes' caches hold what cannot be right

    @property
    def steps_left(self) -> int:
        """Return how many steps it may still run."""
        return self.session.plan.request.steps - self.session.steps

    def spoil(self, error: Exception) -> None:
        """Use it for no other request: what its nodes keep is wrong, or one of them is."""
        self.is_spoiled = True
        plan = self.session.plan
        _log.error(
            "execution %s: %s; its nodes are %s",
            self.session.execution_id,
            error,
            ", ".join(dict.fromkeys(plan.executors())),
        )

    def can_serve(self, steps: int, now: float) -> bool:
        """Return whether a request of so many steps may begin now."""
        return now < self.lend_until and self.can_go_on(steps, now)

    def can_go_on(self, steps: int, now: float) -> bool:
        """Return whether a request that has the lease may run so many more steps."""
        is_sound = self.session.failure is None and not self.is_spoiled
        return is_sound and now < self.use_until and self.steps_left >= steps


@dataclass(eq=False, slots=True)
class _Waiter:
    principal: str
    prompt: Sequence[int]
    steps: int
    since: float
    caller: Caller
    lease: asyncio.Future[Lease] = field(default_factory=asyncio.Future)


@dataclass(eq=False, slots=True)
class _Opening:
    """A lease that is being opened; ``is_stalled`` once it takes much longer than it should."""

    since: float
    steps: int
    task: asyncio.Task[None] | None = None
    is_stalled: bool = False


class LeasePool:
    """The leases of one model."""

    def __init__(
        self,
        net: Sessions,
        model: str,
        options: LeaseOptions,
        on_end: Callable[[Lease], Awaitable[None]] | None = None,
    ) -> None:
        """``on_end`` is called with every lease that has ended."""
        self.totals = Totals()
        self._net = net
        self._on_end = on_end
        self._model = model
        self._options = options
        self.idle: list[Lease] = []
        self.lent: set[Lease] = set()  # they serve a request
        self._openings: set[_Opening] = set()
        self.waiting: deque[_Waiter] = deque()  # requests
        self._background = BackgroundTasks()
        self._refunds: set[asyncio.Task[None]] = set()  # those that wait for a deadline
        self._timer: asyncio.TimerHandle | None = None
        self._retry_at = 0.0
        self._failure: tuple[float, SplitUpError] | None = None  # of the last opening, and when
        self._is_open = False
        self._owners: Latest[str, str] = Latest(KNOWN_EXECUTIONS)  # of executions
        self._served: dict[str, int] = {}  # principals, each with the number of its last turn
        self._count = itertools.count(1)
        self._pace = HoldTimes(options.most)
        self._looking: asyncio.Task[None] | None = None
        self._asked_at = -math.inf  # when somebody was last refused because nodes hold no model
        self._progress_at = 0.0  # when a node was last seen to load

    @property
    def is_serving(self) -> bool:
        """Return whether a lease serves, or nothing is known that keeps one from opening."""
        if any(lease.session.failure is None for lease in (*self.idle, *self.lent)):
            return True
        quiet_since = _now() - tuning.HOLDERS_QUIET_S
        has_failed = self._failure is not None and self._failure[0] > quiet_since
        return not has_failed and not any(one.is_stalled for one in self._openings)

    def is_of(self, execution_id: str, principal: str) -> bool:
        """Return whether an execution of this pool served this principal's requests lately."""
        return self._owners.get(execution_id) == principal

    def open(self) -> None:
        """Begin to keep leases warm."""
        self._is_open = True
        self._adjust()

    async def close(self) -> None:
        """End every lease that is not lent, pay its steps, and open no other one.

        An execution that failed is given back after its deadline; that is not waited for.
        """
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
        for waiter in self.waiting:
            waiter.lease.cancel()
        self.waiting.clear()
        for lease in tuple(self.idle):
            self._retire(lease)
        ends = _now() + CLOSE_S
        # one that opens is ended by a task of its own
        while (ending := self._background.tasks - self._refunds) and _now() < ends:
            await asyncio.wait(ending, timeout=ends - _now())
        if self._refunds:
            await asyncio.wait(self._refunds, timeout=FAILED_CLOSE_S)
        for task in self._background.tasks:
            _log.warning("not waiting for %s; see later: splitup receipt ID", task.get_name())
        await self._background.close()

    @asynccontextmanager
    async def borrow(
        self, principal: str, prompt: Sequence[int], steps: int, caller: Caller | None = None
    ) -> AsyncIterator[Lease]:
        """Lend a lease with at least so many steps left, for one request of ``principal``.

        When no lease serves anybody, it raises Unavailable once members say that nobody can, and
        when no node was seen to load for ``tuning.LEASE_WAIT_S``: clients that are told come back.

        Principals take turns; requests of one are served in the order of their arrival. One that
        waits for a lease to be opened may be overtaken by those whose leases are there. While its
        ``caller`` is away, it waits. Raises Throttled when its turn would come too late, and what
        ``Network.session`` raises when no lease can be opened; where this account or its options
        are at fault, Unavailable tells no more, and the log says why.
        """
        lease = await self._acquire(principal, prompt, steps, caller or Caller())
        is_served = True
        try:
            yield lease
        except (asyncio.CancelledError, GeneratorExit):
            is_served = False
            raise
        finally:
            self._pace.note(
                principal,
                _now() - lease.lent_at,
                is_served=is_served,
                at_once=sum(one.principal == principal for one in self.lent),
            )
            self._release(lease)

    def check(self, principal: str, caller: Caller | None = None) -> None:
        """Raise why a request that came now could not be served, as far as that is known.

        That is Throttled when its turn would come too late; when nothing is open, what an opening
        has failed with within ``RETRY_S``.
        """
        self._check_turn(principal, caller or Caller())
        if self._failure is not None and not self.idle and not self.lent:
            failed_at, error = self._failure
            if _now() < failed_at + RETRY_S:
                self._asked_at = _now()
                raise error

    def _estimate(self, place: int, principal: str) -> tuple[float, float]:
        """Return when the one at a place of the queue gets a lease, and how long it holds it."""
        at_once = self._pace.get_at_once(principal)
        ages = [(one.principal, _now() - one.lent_at) for one in self.lent]
        ahead = place - max(at_once - len(self.lent), 0)
        wait = max(ahead + 1, 0) * self._pace.estimate_hold(ages) / at_once
        return wait, self._pace.estimate_hold(ages, principal)

    def _check_turn(self, principal: str, caller: Caller) -> None:
        """Raise Throttled for a caller whose turn would come too late, or for whom is no place."""
        self._forget_cancelled()
        newcomer = _Waiter(principal, (), 0, _now(), caller)
        place = self._list_in_turn([*self.waiting, newcomer]).index(newcomer)
        wait, hold = self._estimate(place, principal)
        is_full = len(self.waiting) >= self._options.waiting
        if self._is_late(caller, wait, hold) or (is_full and not self._find_surplus(principal)):
            raise self._refuse(principal, wait, hold)

    def _is_late(self, caller: Caller, wait: float, hold: float) -> bool:
        """Return whether an answer would come too late; one request is always tried."""
        if caller.patience_s is None:
            return wait > tuning.QUEUE_WAIT_S
        left = caller.came_at + caller.patience_s - _now()
        return bool(self.lent) and wait + hold > left

    def _forget_cancelled(self) -> None:
        """Remove who has left; their tasks come to that later."""
        self.waiting = deque(one for one in self.waiting if not one.lease.done())

    def _list_in_turn(self, waiting: Iterable[_Waiter]) -> list[_Waiter]:
        """Return who waits in the order in which they get leases.

        Turns go round by principal: however many requests others send, and however many leases they
        have, whoever waits is served after one request of each of them at most.
        """
        turns = Counter(one.principal for one in self.lent)
        ranked = []
        for one in waiting:
            ranked.append((turns[one.principal], self._served.get(one.principal, 0), one))
            turns[one.principal] += 1
        return [one for *_, one in sorted(ranked, key=operator.itemgetter(0, 1))]

    def _find_surplus(self, principal: str) -> _Waiter | None:
        """Return who gives way in a full queue: the newest of the principal that has the most."""
        counts = Counter(one.principal for one in self.waiting)
        largest, most = counts.most_common(1)[0] if counts else ("", 0)
        if most <= counts[principal] + 1:
            return None
        return next(one for one in reversed(self.waiting) if one.principal == largest)

    def _make_place(self, principal: str) -> None:
        """Refuse who gives way to a newcomer in a full queue."""
        if len(self.waiting) < self._options.waiting:
            return
        if (surplus := self._find_surplus(principal)) is not None:
            self.waiting.remove(surplus)
            wait, hold = self._estimate(len(self.waiting), surplus.principal)
            surplus.lease.set_exception(self._refuse(surplus.principal, wait, hold))

    def _refuse(self, principal: str, wait: float, hold: float) -> Throttled:
        at_once = self._pace.get_at_once(principal)
        retry = self._pace.book(principal, _now(), wait, hold / at_once)
        return Throttled(
            f"{len(self.waiting)} requests wait for model {self._model} already, and each takes "
            f"{hold:.0f} s of {at_once} at once; try again in {retry} s",
            retry_s=retry,
        )

    def _refuse_late(self) -> None:
        """Tell who waits that the answer will not be there before its client gives up."""
        place = 0
        for waiter in self._list_in_turn(self.waiting):
            wait, hold = self._estimate(place, waiter.principal)
            tells = waiter.caller.is_there and waiter.caller.patience_s is not None
            if tells and self._is_late(waiter.caller, wait, hold):
                self.waiting.remove(waiter)
                waiter.lease.set_exception(self._refuse(waiter.principal, wait, hold))
            else:
                place += 1

    async def _acquire(
        self, principal: str, prompt: Sequence[int], steps: int, caller: Caller
    ) -> Lease:
        if steps > limits.MAX_STEPS:
            raise InvalidInput(f"the request takes {steps} steps; at most {limits.MAX_STEPS} go")
        self._check_turn(principal, caller)
        self._make_place(principal)
        waiter = _Waiter(principal, prompt, steps, _now(), caller)
        self.waiting.append(waiter)
        caller.on_return.add(self._adjust)
        self._retry_at = 0.0  # somebody waits: do not wait for the next attempt
        self._adjust()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            if waiter in self.waiting:
                self.waiting.remove(waiter)
            elif not waiter.lease.cancelled() and waiter.lease.exception() is None:
                self._release(waiter.lease.result())
            raise
        finally:
            if not any(one.caller is caller for one in self.waiting):
                caller.on_return.discard(self._adjust)

    def _release(self, lease: Lease) -> None:
        self.lent.remove(lease)
        lease.used_at = _now()
        self.idle.append(lease)
        self._adjust()

    # ---- how many there are --------------------------------------------------------------------

    def _adjust(self) -> None:
        """Serve who waits; end leases that are used up or not needed; open those that are."""
        now = _now()
        self._forget_cancelled()
        for ended in [one for one in self.idle if not one.can_serve(1, now) or not self._is_open]:
            self._retire(ended)
        self._serve_waiting(now)
        self._refuse_late()
        self._retire_unused(now)
        self._give_up(now)
        if self._is_stuck and self._looking is None:
            self._looking = self._background.start(self._look(), f"a look at model {self._model}")
        if self._is_open and now >= self._retry_at:
            for steps in self._list_missing(now):
                opening = _Opening(now, steps)
                self._openings.add(opening)
                name = f"a new lease of model {self._model}"
                opening.task = self._background.start(self._open(opening), name)
        self._set_timer(now)

    @property
    def _opening(self) -> int:
        """How many leases are expected to open soon."""
        return sum(not one.is_stalled for one in self._openings)

    def _give_up(self, now: float) -> None:
        """Wait no longer for openings that hang, nor let requests wait when nothing can serve."""
        for opening in self._openings:
            if now >= opening.since + tuning.LEASE_WAIT_S and not opening.is_stalled:
                opening.is_stalled = True
                _log.warning(
                    "a lease of model %s has not opened for %g s; who asks gets another one",
                    self._model,
                    tuning.LEASE_WAIT_S,
                )
        stalled = [one for one in self._openings if one.is_stalled]
        stalled.sort(key=lambda one: one.since)
        for opening in stalled[: -self._options.most]:  # the latest may still be planned
            self._abandon(opening)
        if self.lent:
            return
        for waiter in tuple(self.waiting):
            if now >= max(waiter.since, self._progress_at) + tuning.LEASE_WAIT_S:
                self.waiting.remove(waiter)
                waiter.lease.set_exception(
                    Unavailable(
                        f"no nodes could be found for model {self._model} within "
                        f"{tuning.LEASE_WAIT_S:g} s; try again in a few seconds"
                    )
                )

    @property
    def _is_stuck(self) -> bool:
        """Whether somebody waits and nothing serves anybody."""
        return self._is_open and bool(self.waiting) and not self.lent

    @property
    def _is_refusing(self) -> bool:
        """Whether nothing serves, and somebody has asked lately."""
        is_idle = not self.idle and not self.lent
        return self._is_open and is_idle and _now() < self._asked_at + tuning.HOLDERS_QUIET_S

    async def _look(self) -> None:
        """Ask members how it stands as long as nothing serves; refuse all when nobody can.

        They are asked twice: one that was just started has not heard of all nodes yet. What they
        say is kept up to date for a while after the last refusal, so that a stream is refused
        before it begins.
        """
        hopeless = 0
        try:
            while self._is_stuck or (hopeless > 1 and self._is_refusing):
                try:
                    found = await self._net.look(self._model)
                except SplitUpError:
                    found = None  # who opens a lease hears more
                if found is not None and found.loading:
                    self._progress_at = _now()
                hopeless = 0 if found is None or found.loading else hopeless + 1
                if hopeless > 1 and found is not None:
                    if hopeless == 2:
                        _log.warning("%s", describe_holders(found, self._model))
                    self._refuse_all()
                await asyncio.sleep(tuning.HOLDERS_POLL_S)
        finally:
            self._looking = None

    def _refuse_all(self) -> None:
        error = Unavailable(
            f"no nodes hold model {self._model} now, and none is loading it; try again in a few "
            "seconds"
        )
        self._failure = _now(), error
        if self.waiting:
            self._asked_at = _now()
        for waiter in self.waiting:
            if not waiter.lease.done():  # else its client has just left
                waiter.lease.set_exception(error)
        self.waiting.clear()

    def _abandon(self, opening: _Opening) -> None:
        self._openings.discard(opening)
        if opening.task is not None:
            opening.task.cancel()

    def _serve_waiting(self, now: float) -> None:
        """Lend idle leases in turn.

        Who has to wait is overtaken while a lease can be opened for each that waits; then nobody
        is served before the first of them, for whom an idle lease of others ends.
        """
        room = max(self._options.most - self._count_live(), 0) + self._opening
        for waiter in self._list_in_turn(self._list_present()):
            lease = self._pick(waiter, now)
            if lease is not None:
                self.waiting.remove(waiter)
                self._lend(lease, waiter)
            elif room <= 0:
                return
            else:
                room -= 1

    def _list_present(self) -> tuple[_Waiter, ...]:
        """Return who waits and may run.

        Those whose clients are away keep their places, and so do those of whose principal enough
        run.
        """
        running = Counter(one.principal for one in self.lent)
        present = []
        for one in self.waiting:
            most = self._pace.get_at_once(one.principal)
            if one.caller.is_there and running[one.principal] < most:
                running[one.principal] += 1
                present.append(one)
        return tuple(present)

    def _lend(self, lease: Lease, waiter: _Waiter) -> None:
        lease.lent_at = _now()
        self.idle.remove(lease)
        self.lent.add(lease)
        lease.principal = waiter.principal
        self._served[waiter.principal] = next(self._count)
        self._owners[lease.session.execution_id] = waiter.principal
        waiter.lease.set_result(lease)

    def _pick(self, waiter: _Waiter, now: float) -> Lease | None:
        """Return the idle lease that holds most of the prompt; of equal ones the least used."""
        fitting = [
            lease
            for lease in self.idle
            if lease.principal in (None, waiter.principal) and lease.can_serve(waiter.steps, now)
        ]
        return max(
            fitting,
            key=lambda one: (one.contents.count_common(waiter.prompt), -one.used_at),
            default=None,
        )

    def _is_worn(self, lease: Lease, now: float) -> bool:
        """Return whether a lease should be replaced soon: it is open, but not for long."""
        steps, seconds = self._options.steps / 4, self._options.seconds / 8
        return lease.steps_left < steps or now >= lease.lend_until - seconds

    def _count_live(self) -> int:
        return len(self.idle) + len(self.lent) + self._opening

    def _count_fresh(self, now: float) -> int:
        leases = [*self.idle, *self.lent]
        return self._opening + sum(not self._is_worn(lease, now) for lease in leases)

    def _retire_unused(self, now: float) -> None:
        """End idle leases that nobody needs; make room for who waits and fits into none."""
        for lease in sorted(self.idle, key=lambda one: (not self._is_worn(one, now), one.used_at)):
            live = self._count_live()
            if self._is_worn(lease, now):
                is_unused = self._count_fresh(now) - self._opening >= max(1, self._options.warm)
            else:
                is_unused = (
                    live > self._options.warm and now >= lease.used_at + self._options.idle_s
                )
            is_in_the_way = len(self._list_present()) > self._opening and live >= self._options.most
            if is_unused or is_in_the_way:
                self._retire(lease)

    def _list_missing(self, now: float) -> list[int]:
        """Return the steps of each lease to open: of who waits, in turn, as many as it needs.

        Whoever still waits fits into no idle lease. A worn lease may be replaced beyond ``most``.
        """
        live = self._count_live()
        needs = [self._count_needed(one) for one in self._list_in_turn(self._list_present())]
        for opening in self._openings:
            if not opening.is_stalled and opening.steps in needs:
                needs.remove(opening.steps)
        asked = min(len(needs), self._options.most - live)
        stalled = len(self._openings) - self._opening  # for nobody who waits, these are enough
        fresh = self._count_fresh(now) + stalled
        warm = min(self._options.warm - fresh, 2 * self._options.most - live)
        missing = max(asked, warm, 0)
        return [*needs, *[self._options.steps] * missing][:missing]

    def _count_needed(self, waiter: _Waiter) -> int:
        """Return the steps of a lease that is opened for a request."""
        return max(self._options.steps, waiter.steps)

    def _set_timer(self, now: float) -> None:
        """Look again when an idle lease is worn, used up or unused, or the next attempt is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [self._retry_at]
        since = [one.since for one in self.waiting]
        since += [one.since for one in self._openings if not one.is_stalled]
        times += [max(at, self._progress_at) + tuning.LEASE_WAIT_S for at in since]
        for lease in self.idle:
            worn_at = lease.lend_until - self._options.seconds / 8
            times += [worn_at, lease.lend_until, lease.used_at + self._options.idle_s]
        later = [at for at in times if at > now]
        if later and self._is_open:
            self._timer = asyncio.get_running_loop().call_at(min(later), self._adjust)

    # ---- opening and ending --------------------------------------------------------------------

    async def _open(self, opening: _Opening) -> None:
        stack = AsyncExitStack()
        try:
            session = await stack.enter_async_context(
                self._net.session(
                    self._model,
                    steps=opening.steps,
                    deadline_s=self._options.seconds,
                    verify=self._options.verify,
                    on_failure=partial(self._note_failure, opening),
                )
            )
        except SplitUpError as error:
            self._note_failure(opening, error)
            return
        except BaseException:
            self._openings.discard(opening)
            raise
        self._openings.discard(opening)
        self._failure = None
        for stalled in [one for one in self._openings if one.is_stalled]:
            self._abandon(stalled)  # this one was asked for in its place
        now = _now()
        contents = make_cache_contents(session.manifest)
        lend_until, use_until = (now + self._options.seconds * part for part in (0.5, 0.75))
        self.idle.append(Lease(session, contents, stack, lend_until, use_until, now))
        self._adjust()

    def _note_failure(self, opening: _Opening, error: SplitUpError) -> None:
        """Tell who waits that a lease does not open; its refund may be minutes away.

        One of more steps than usual says nothing about others: it is told to who needs it.
        """
        _log.warning("no lease of model %s: %s", self._model, error)
        if opening not in self._openings:
            return
        self._openings.remove(opening)
        self._note_refund(opening.task)
        told = error
        if isinstance(error, InvalidInput | ChainRejected | ExecutionFailed):
            told = Unavailable(f"{self._model} cannot be run now; the server's log says why")
        self._forget_cancelled()
        meant = (one for one in self.waiting if self._count_needed(one) == opening.steps)
        first = next(meant, None)
        if opening.steps == self._options.steps:
            self._failure = _now(), told
            self._retry_at = _now() + RETRY_S
            first = first or next(iter(self.waiting), None)
        if first is not None:
            self.waiting.remove(first)
            first.lease.set_exception(told)
        self._adjust()

    def _retire(self, lease: Lease) -> None:
        self.idle.remove(lease)
        name = f"the end of execution {lease.session.execution_id}"
        ending = self._background.start(self._end(lease), name)
        if lease.session.failure is not None:
            self._note_refund(ending)

    def _note_refund(self, waiting: asyncio.Task[None] | None) -> None:
        """Note a task that waits for a deadline."""
        if waiting is not None:
            self._refunds.add(waiting)
            waiting.add_done_callback(self._refunds.discard)

    async def _end(self, lease: Lease) -> None:
        """End the execution, which pays its steps; the market gives the rest of the price back."""
        try:
            await lease.stack.aclose()
        except SplitUpError as error:
            _log.warning("%s", error)
        else:
            if self._on_end is not None:
                await self._on_end(lease)


def _now() -> float:
    return asyncio.get_running_loop().time()
