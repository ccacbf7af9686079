from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest
from aiohttp import web

from splitup.client.market import plan_requests
from splitup.client.market.plan_requests import check_plan, fetch_certificate
from splitup.core import limits
from splitup.core.errors import BadSignature, InvalidInput, PeerFault, Unavailable
from splitup.crypto.quorum import Domain
from splitup.messages.plans import PlanCertificate
from splitup.net.http import SignedClient
from splitup.net.http_server import error_reply, make_app, serve_app
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from tests.builders import HANG_S
from tests.client.parties import always, make_parties, make_wanted

T = TypeVar("T")
PLAN = make_parties().plan
REQUEST = PLAN.request
CERTIFICATE = PlanCertificate(plan=PLAN, seed_signature="0x", signatures=())
WANTED = make_wanted(PLAN)


def make_committee(endpoints: Sequence[str]) -> CommitteeView:
    members = tuple(
        MemberView(f"0x{i:040x}", f"0x{i:064x}", url) for i, url in enumerate(endpoints)
    )
    return CommitteeView(1, members, 3, "", Domain(REQUEST.chain_id, "0x" + "0" * 40))


@asynccontextmanager
async def serve_committee(
    path: str, replies: Iterable[T], answer: Callable[[web.Request, T], web.Response]
) -> AsyncIterator[CommitteeView]:
    """Serve a member for each of the replies, of which ``answer`` makes its response."""
    servers = []
    for reply in replies:

        async def respond(request: web.Request, reply: T = reply) -> web.Response:
            return answer(request, reply)

        app = make_app()
        app.router.add_get(path, respond)
        servers.append(await serve_app(app, "127.0.0.1", 0))
    try:
        yield make_committee([server.url for server in servers])
    finally:
        for server in servers:
            await server.close()


@asynccontextmanager
async def serve_members(
    replies: Sequence[web.Response | PlanCertificate],
) -> AsyncIterator[CommitteeView]:
    def answer(request: web.Request, reply: web.Response | PlanCertificate) -> web.Response:
        assert request.match_info["id"] == REQUEST.execution_id
        if isinstance(reply, PlanCertificate):
            return web.Response(body=reply.canonical_bytes(), content_type="application/json")
        return error_reply(reply.status, "no live node serves task 1")

    async with serve_committee("/v1/plan/{id}", replies, answer) as committee:
        yield committee


@pytest.mark.parametrize(
    "change",
    [
        {"execution_id": "0x" + "01" * 32},
        {"model_id": "0x" + "01" * 32},
        {"client": "0x" + "01" * 20},
        {"client_key": "0x" + "01" * 32},
        {"steps": 5},
        {"max_price_micro_usdc": 1},
        {"deadline": 1},
        {"verify_bps": 10_000},
        {"task_count": 3},
    ],
)
def test_a_plan_for_something_else_is_refused(change: dict[str, object]) -> None:
    if "task_count" not in change:
        change = {"request": REQUEST.model_copy(update=change)}
    with pytest.raises(PeerFault, match="than we asked for"):
        check_plan(CERTIFICATE, replace(WANTED, **change), make_committee([]))  # type: ignore[arg-type]


def test_a_plan_without_a_quorum_is_refused() -> None:
    with pytest.raises(BadSignature, match="has 0 signatures"):
        check_plan(CERTIFICATE, WANTED, make_committee([]))


async def test_the_first_valid_certificate_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(certificate: PlanCertificate, committee: CommitteeView) -> None:
        if not certificate.signatures and certificate.seed_signature != "0x01":
            raise BadSignature("the quorum is missing")

    monkeypatch.setattr(plan_requests, "check_certificate", check)
    good = CERTIFICATE.model_copy(update={"seed_signature": "0x01"})
    replies = [web.Response(status=409), CERTIFICATE, web.Response(status=404), good]
    async with serve_members(replies) as committee, SignedClient() as http:
        assert await fetch_certificate(http, always(committee), WANTED, timeout_s=HANG_S) == good


async def test_one_member_cannot_talk_a_client_out_of_its_plan() -> None:
    replies = [web.Response(status=s) for s in (409, 404, 404, 404)]
    async with serve_members(replies) as committee, SignedClient() as http:
        with pytest.raises(Unavailable, match="none of the 4 committee members"):
            await fetch_certificate(http, always(committee), WANTED, timeout_s=0.3)


async def test_two_members_can() -> None:
    replies = [web.Response(status=s) for s in (409, 404, 409, 404)]
    async with serve_members(replies) as committee, SignedClient() as http:
        with pytest.raises(InvalidInput, match="no live node serves task 1"):
            await fetch_certificate(http, always(committee), WANTED, timeout_s=HANG_S)


async def test_a_client_follows_a_committee_that_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_requests, "check_certificate", lambda certificate, committee: None)
    monkeypatch.setattr(plan_requests, "_LOOK_S", 0.05)
    silent = [web.Response(status=404)] * 4
    async with serve_members(silent) as before, serve_members([CERTIFICATE]) as after:
        views = iter([before, before])

        async def fetch() -> CommitteeView:
            return next(views, after)

        async with SignedClient() as http:
            assert await fetch_certificate(http, fetch, WANTED, timeout_s=HANG_S) == CERTIFICATE


async def test_s116_a_member_that_knows_no_plan_at_once_is_asked_now_and_then() -> None:
    """Honest ones answer so after they have waited; a client asked a liar all the time."""
    asked = 0

    def answer(request: web.Request, reply: int) -> web.Response:
        nonlocal asked
        asked += 1
        return error_reply(reply, "there is no plan")

    async with (
        serve_committee("/v1/plan/{id}", (404,), answer) as committee,
        SignedClient() as http,
    ):
        with pytest.raises(Unavailable, match="none of the 1 committee members"):
            await fetch_certificate(http, always(committee), WANTED, timeout_s=0.5)
    assert 1 <= asked <= 4


async def test_s116_a_plan_has_no_more_bytes_than_its_model_has_tasks_for() -> None:
    def answer(request: web.Request, reply: int) -> web.Response:
        return web.Response(body=b"[" * reply, content_type="application/json")

    most = limits.PLAN_BYTES + WANTED.task_count * limits.PLAN_TASK_BYTES
    async with (
        serve_committee("/v1/plan/{id}", (most + 1,), answer) as committee,
        SignedClient() as http,
    ):
        with pytest.raises(Unavailable, match=f"the limit is {most}"):
            await fetch_certificate(http, always(committee), WANTED, timeout_s=0.5)
