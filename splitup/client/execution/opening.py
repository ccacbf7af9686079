"""Opens executions: the most they may cost, nodes that hold the model, the request, the session.

At the other end it stores what a session has not stored yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.client import defaults
from splitup.client.execution.session import Session
from splitup.client.inputs import format_usdc
from splitup.client.market.account import MarketAccount, Order
from splitup.client.market.holders import wait_until_held
from splitup.client.market.payments import fetch_quote
from splitup.client.models import Model, Models
from splitup.client.private.final_states import AdapterChoice, find_final_state
from splitup.client.private.private_session import PrivateSession
from splitup.core import limits, tuning
from splitup.core.errors import ExecutionFailed, InvalidInput, SplitUpError
from splitup.core.silence import SilenceAlarm
from splitup.crypto.keys import Identity
from splitup.net.http import SignedClient
from splitup.storage.gateway_client import GatewayClient

_log = logging.getLogger("splitup.client")


class SessionOpener:
    """Opens the executions of one connection."""

    def __init__(
        self,
        chain: Chain,
        committees: Committees,
        account: MarketAccount,
        models: Models,
        parties: tuple[Identity, SignedClient, GatewayClient],
        *,
        allow_loopback: bool,
    ) -> None:
        self._chain = chain
        self._committees = committees
        self._account = account
        self._models = models
        self._parties = parties
        self._http = parties[1]
        self._allow_loopback = allow_loopback
        self._held_until: dict[str, float] = {}  # by model: no look is due before

    async def open(
        self,
        name: str,
        *,
        steps: int,
        most_micro_usdc: int | None,
        deadline_s: float | None,
        verify: float | str | None,
        inputs_digest: str | None,
        nodes_only: bool,
        adapter: AdapterChoice | None,
        on_failure: Callable[[ExecutionFailed], None] | None,
    ) -> Session:
        """Request an execution and connect to its nodes; ``Network.session`` says what is what.

        Raises SplitUpError.
        """
        if not 1 <= steps <= limits.MAX_STEPS:
            raise InvalidInput(f"an execution has 1 to {limits.MAX_STEPS} steps, not {steps}")
        if nodes_only and adapter is not None:
            raise InvalidInput("an adapter is applied where the client's tasks run")
        model = await self._models.fetch(name)
        programs = None
        if not nodes_only:
            programs = await self._models.load_programs(model)  # may fail, so before the payment
        quote, _ = await asyncio.gather(
            fetch_quote(self._chain, model.model_id, steps, verify, deadline_s),
            self._committees.fetch_current(),
        )
        price = quote.locked_micro_usdc
        if most_micro_usdc is not None and most_micro_usdc < price:
            raise InvalidInput(
                f"the maximum price is {format_usdc(most_micro_usdc)}, and {steps} steps of model "
                f"{name} cost up to {format_usdc(price)}; raise it to that"
            )
        await self._wait_until_held(model)
        order = Order(
            model_id=model.model_id,
            task_ids=tuple(task.task_id for task in model.manifest.tasks),
            steps=steps,
            price_micro_usdc=price,
            deadline_s=defaults.get_deadline_s(steps) if deadline_s is None else deadline_s,
            verify_bps=quote.verify_bps,
            inputs_digest=inputs_digest,
            on_failure=partial(self._note_failure, model, on_failure),
        )
        opened = None
        if adapter is not None:  # before anything is paid
            width = find_final_state(model.manifest, name).shape[1]
            opened = await adapter.open(self._http, width)
        try:
            certificate, ends = await self._account.request(order)
        except BaseException:
            if opened is not None:
                await opened.close()
            raise
        kind: Callable[..., Session] = Session
        if programs is not None:
            kind = partial(PrivateSession, programs=programs, adapter=opened)
        session = kind(
            certificate,
            model.manifest,
            *self._parties,
            deadline=ends,
            allow_loopback=self._allow_loopback,
        )
        session.open()
        return session

    async def _wait_until_held(self, model: Model) -> None:
        """Wait until nodes hold a model; raise Unavailable when that is hopeless."""
        if time.monotonic() > self._held_until.get(model.model_id, 0.0):
            fetch = self._committees.fetch_current
            await wait_until_held(self._http, fetch, model.name, model.model_id)
            self._held_until[model.model_id] = time.monotonic() + tuning.HOLDERS_AGE_S

    def _note_failure(
        self, model: Model, told: Callable[[ExecutionFailed], None] | None, error: ExecutionFailed
    ) -> None:
        """Ask who holds the model before the next request; tell who asked for this one."""
        self._held_until.pop(model.model_id, None)
        if told is not None:
            told(error)


async def wait_stored(storing: Collection[asyncio.Task[None]]) -> None:
    """Wait for tasks that store; after a while log which executions (task names) wait."""
    storing = tuple(storing)  # a set loses its tasks as they end

    def warn() -> None:
        ids = ", ".join(task.get_name() for task in storing if not task.done())
        _log.warning("waiting until the inputs of %s are stored; Ctrl-C: do not wait", ids)

    with SilenceAlarm(warn):
        await asyncio.gather(*storing, return_exceptions=True)


async def store_and_close(session: Session) -> None:
    """Store the rest of a session's inputs, and close it."""
    try:
        await session.leave()
        await session.store_inputs()
    except SplitUpError as error:
        _log.warning("inputs of %s were not stored: %s", session.execution_id, error)
    finally:
        await session.close()
