"""The explorer's JSON API under ``/explorer/v1``; ``docs/spec/explorer.md`` lists the routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from splitup.client.inputs import check_execution_id
from splitup.client.network import Network
from splitup.core.errors import Throttled
from splitup.core.places import FairLock, Places, hold_place
from splitup_gateway.access import Access
from splitup_gateway.api_keys import get_principal
from splitup_gateway.errors import ApiError
from splitup_gateway.explorer.event_index import EventIndex, EventPlace
from splitup_gateway.explorer.follower import Follower
from splitup_gateway.explorer.views import Explorer
from splitup_gateway.timelines import Timelines

MOST_AT_ONCE: Final = 4  # so that pages leave the server's threads to texts
MOST_WAITING: Final = 64
_PLACE: Final = re.compile(r"([0-9]{1,15})\.([0-9]{1,9})")
_ADDRESS: Final = re.compile(r"0x[0-9a-f]{40}")
_MODEL_ID: Final = re.compile(r"0x[0-9a-f]{64}")
_PRINCIPAL: Final = web.RequestKey("principal", str)
_View = Callable[[web.Request], Awaitable[dict[str, Any]]]


class ExplorerRoutes:
    """The routes over one explorer. Keys are needed where the server needs them, and take turns."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer = explorer
        self._places: Places[asyncio.Task[Any]] = Places(MOST_WAITING)
        self._turns = FairLock(MOST_AT_ONCE)

    def add_to(self, app: web.Application, timelines: Timelines, access: Access) -> None:
        """Register the routes."""
        explorer = self._explorer

        async def show_timeline(request: web.Request) -> dict[str, Any]:
            execution, start = _get_execution(request), _get_start(request)
            return timelines.show(execution, request[_PRINCIPAL], start)

        views: dict[str, _View] = {
            "status": lambda _: explorer.show_status(),
            "nodes": lambda r: explorer.list_nodes(r.query.get("search", "")[:100], _get_start(r)),
            "models": lambda r: explorer.list_models(_get_place(r)),
            "models/{id}": lambda r: explorer.show_model(_get_id(r, _MODEL_ID, "model")),
            "executions": lambda r: explorer.list_executions(_get_subject(r), _get_place(r)),
            "executions/{id}": lambda r: explorer.show_execution(_get_execution(r)),
            "executions/{id}/plan": lambda r: explorer.show_plan(_get_execution(r)),
            "executions/{id}/gas": lambda r: explorer.show_gas(_get_execution(r)),
            "executions/{id}/verification": lambda r: explorer.show_verification(_get_execution(r)),
            "executions/{id}/timeline": show_timeline,
            "accounts/{id}": lambda r: explorer.show_account(
                _get_id(r, _ADDRESS, "account"), _get_place(r)
            ),
            "accounts/{id}/earnings": lambda r: explorer.show_earnings(
                _get_id(r, _ADDRESS, "account")
            ),
            "committee": lambda _: explorer.show_committee(),
            "search": lambda r: explorer.search(r.query.get("q", "").strip()),
        }
        for path, view in views.items():
            app.router.add_get(f"/explorer/v1/{path}", self._make_handler(view, access))

    def _make_handler(
        self, view: _View, access: Access
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            principal = get_principal(await access.let_in(request, is_counted=False))
            request[_PRINCIPAL] = principal
            refusal = Throttled("too many pages are being read; try again in a few seconds")
            with hold_place(self._places, principal, refusal):
                async with self._turns.hold(principal):
                    found = await view(request)
            return web.json_response(found, headers={"Cache-Control": "no-store"})

        return handle


@asynccontextmanager
async def run_explorer(net: Network, url: str) -> AsyncIterator[ExplorerRoutes]:
    """Follow the chain into the database at ``url`` for as long as the block lasts.

    Raises ConfigurationError.
    """
    index = EventIndex.open(url, net.chain.deployment)
    explorer = Explorer(net, index)
    tasks = [
        asyncio.create_task(work) for work in (Follower(net.chain, index).run(), explorer.watch())
    ]
    try:
        yield ExplorerRoutes(explorer)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        index.close()


def _get_execution(request: web.Request) -> str:
    execution_id = request.match_info["id"]
    check_execution_id(execution_id)
    return execution_id


def _get_id(request: web.Request, form: re.Pattern[str], kind: str) -> str:
    value = request.match_info["id"].lower()
    if not form.fullmatch(value):
        raise ApiError(f"'{value:.80}' is no {kind}", status=404)
    return value


def _get_subject(request: web.Request) -> str:
    """Return the client or model that executions are asked for."""
    subject = request.query.get("of", "").lower()
    if subject and not (_ADDRESS.fullmatch(subject) or _MODEL_ID.fullmatch(subject)):
        raise ApiError(f"'{subject:.80}' is no account or model", param="of")
    return subject


def _get_place(request: web.Request) -> EventPlace | None:
    text = request.query.get("before")
    if text is None:
        return None
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ApiError(f"'{text:.80}' is no place; give the 'next' of a page", param="before")
    return EventPlace(int(found[1]), int(found[2]))


def _get_start(request: web.Request) -> int:
    text = request.query.get("start", "0")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ApiError(f"'{text:.80}' is no number", param="start")
    return int(text)
