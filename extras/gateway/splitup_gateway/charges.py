"""What requests cost their keys: charged at most before they run, and in the end what was computed.

What a request is charged, and what it ordered of which execution, is in the database of keys until
it ends. So whoever goes on with the requests of a server that was killed knows what is charged
already, and what nobody goes on with costs what the chain settled of its orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from splitup.client.inputs import format_usdc
from splitup.client.queueing import Caller
from splitup.core.errors import SplitUpError, Unavailable
from splitup_gateway.api_keys import ApiKey, ApiKeys, OpenCharge, OrderedSteps, get_principal
from splitup_gateway.errors import ApiError

if TYPE_CHECKING:
    from splitup.client.leases import Lease, LeasePool
    from splitup.client.network import Network

_log = logging.getLogger("splitup.serve")

RECEIPT_S: Final = 2.0  # that a request for a receipt waits for the chain
LOOK_S: Final = 30.0  # between looks whether executions of a killed server are settled


@dataclass(slots=True)
class Charge:
    """Who pays for a request, what it may cost at most, and what it did cost; micro-USDC.

    ``limit`` is the most that its client has agreed to, None for no limit.
    """

    principal: str = ""
    most: int = 0
    limit: int | None = None
    used: int = 0
    name: str = ""  # of the key, "" without one
    keys: ApiKeys | None = None
    caller: Caller = field(default_factory=Caller)  # who waits for the answer
    id: str = ""
    server: str = ""
    # what was ordered here, beside what an earlier server has ordered
    orders: list[OrderedSteps] = field(default_factory=list)
    earlier: int = 0  # what that costs
    noting: asyncio.Task[None] | None = None

    async def cover(self, more: int) -> bool:
        """Charge so much beyond ``most``, for steps that are run once more.

        Returns False, without a change, beyond the client's limit or the key's budget.
        """
        if self.limit is not None and self.most + more > self.limit:
            return False
        if (keys := self.keys) is not None:
            charging = partial(keys.charge, self.name, self.id, more, self.server)
            if not await asyncio.to_thread(charging):
                return False
        self.most += more
        return True

    @asynccontextmanager
    async def borrow(
        self, pool: LeasePool, prompt: Sequence[int], steps: int
    ) -> AsyncIterator[Lease]:
        """Borrow a lease as ``pool`` does, and keep what is ordered of it."""
        place = len(self.orders)
        async with pool.borrow(self.principal, prompt, steps, self.caller) as lease:
            execution_id, first = lease.session.execution_id, lease.session.steps
            self.orders.append(OrderedSteps(execution_id, first))
            self._note()
            try:
                yield lease
            finally:
                self.orders[place] = OrderedSteps(execution_id, first, lease.session.steps)
                self._note()

    def _note(self) -> None:
        """Keep what is ordered; no step waits for that."""
        if self.keys is not None:
            writing = self._write(self.keys, self.noting)
            self.noting = asyncio.create_task(writing, name=f"orders of {self.id}")

    async def _write(self, keys: ApiKeys, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            await asyncio.to_thread(keys.note_orders, self.id, self.earlier, [*self.orders])
        except Unavailable as error:  # no text ends for that
            _log.warning("what a request orders is not kept, should this server die: %s", error)


class Charges:
    """What the requests of one server are charged, and those that an earlier one has left.

    ``server`` is the same for a server that is started anew; without a name nobody is.
    """

    def __init__(self, keys: ApiKeys | None, server: str = "") -> None:
        self._keys = keys
        self.server = server or secrets.token_hex(16)
        self._own: dict[str, int | None] = {}  # by id: None, or what it cost and is not closed yet

    @asynccontextmanager
    async def open(
        self,
        key: ApiKey | None,
        most: int,
        limit: int | None = None,
        caller: Caller | None = None,
        *,
        name: str = "",
        is_ordered: bool = False,
    ) -> AsyncIterator[Charge]:
        """Charge a key the most that a request may cost; afterwards give back what is left.

        ``limit``: what its client has agreed to. ``name``: of the answer, with which another server
        goes on. ``is_ordered``: all of it is ordered at once. Raises ApiError (429,
        insufficient_quota) beyond the key's budget.
        """
        charge = Charge(get_principal(key), most, limit, caller=caller or Caller())
        charge.id = name or secrets.token_hex(16)
        async with self._hold(charge, key):
            given = charge.name, charge.id, most, self.server, most if is_ordered else 0
            if charge.keys is not None and not await asyncio.to_thread(charge.keys.charge, *given):
                raise ApiError(
                    f"the request may cost {format_usdc(most)}, which the budget of key "
                    f"'{charge.name}' no longer covers; ask for fewer tokens, or a larger budget",
                    status=429,
                    kind="insufficient_quota",
                    code="insufficient_quota",
                )
            yield charge

    @asynccontextmanager
    async def go_on(
        self, key: ApiKey | None, left: OpenCharge, limit: int | None, used: int, caller: Caller
    ) -> AsyncIterator[Charge]:
        """Go on with what another server has charged, whose records say what is ``used``.

        Nothing is awaited before the charge is there, so that it is closed in any case.
        """
        charge = Charge(get_principal(key), left.amount_micro_usdc, limit, used, caller=caller)
        charge.id, charge.earlier = left.id, used
        async with self._hold(charge, key):
            yield charge

    @asynccontextmanager
    async def _hold(self, charge: Charge, key: ApiKey | None) -> AsyncIterator[None]:
        """Let a key pay for a charge, and close it in the end; without keys nobody pays."""
        if self._keys is None or key is None:
            yield
            return
        charge.name, charge.keys, charge.server = key.name, self._keys, self.server
        self._own[charge.id] = None
        try:
            yield
        finally:
            self._own[charge.id] = charge.used
            # shielded: a client that leaves must not keep what is left
            await asyncio.shield(asyncio.create_task(self._finish(charge)))

    async def _finish(self, charge: Charge) -> None:
        if charge.noting is not None:
            await charge.noting
        await self._close_own(charge.id, charge.used)

    async def _close_own(self, charge_id: str, used: int) -> None:
        assert self._keys is not None
        await asyncio.to_thread(self._keys.close_charge, charge_id, used)
        self._own.pop(charge_id, None)

    async def list_left(self) -> dict[str, OpenCharge]:
        """Return what another server has left open, by id."""
        if self._keys is None:
            return {}
        found = await asyncio.to_thread(self._keys.list_charges, self.server)
        return {one.id: one for one in found if one.id not in self._own}

    async def settle_left(self, chain: Network) -> None:
        """Close what a killed server has left, and what could not be closed here, for ever."""
        while self._keys is not None:
            with contextlib.suppress(Unavailable):  # of a database that fails: tried again
                for charge_id, used in list(self._own.items()):
                    if used is not None:
                        await self._close_own(charge_id, used)
                for left in (await self.list_left()).values():
                    await self._settle(chain, left)
            await asyncio.sleep(LOOK_S)

    async def _settle(self, chain: Network, left: OpenCharge) -> None:
        """Close what a killed server has left once all that it ordered is settled."""
        assert self._keys is not None
        used = left.used_micro_usdc
        try:
            for order in left.orders:
                receipt = await chain.receipt(order.execution_id, timeout_s=RECEIPT_S)
                last = receipt.steps if order.last is None else min(order.last, receipt.steps)
                if last > order.first:
                    manifest = (await chain.fetch_model(receipt.model_id)).manifest
                    used += manifest.cost_micro_usdc(last - order.first)
        except Unavailable:
            return  # one is open, or the chain does not answer
        except SplitUpError as error:
            _log.warning("what a request of key '%s' cost is not known: %s", left.name, error)
            return
        await asyncio.to_thread(self._keys.close_charge, left.id, used)
        _log.info(
            "a request of key '%s' that was cut off is charged %s of %s",
            *(left.name, format_usdc(used), format_usdc(left.amount_micro_usdc)),
        )
