from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from splitup.client.market import plan_requests
from splitup.client.market.signed_request import fetch_signed_plan, is_frozen
from splitup.core.errors import InvalidInput, PeerFault
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import PlanCertificate, SignedRequest
from splitup.net.http import SignedClient
from splitup.net.http_server import error_reply, make_app, read_json, serve_app
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from splitup.protocol.planning.signed_requests import sign_request
from tests.builders import HANG_S
from tests.client.parties import always, make_parties, make_wanted

PLAN = make_parties().plan
REQUEST = PLAN.request.model_copy(update={"block_hash": ZERO_BYTES32})
SIGNED = sign_request(Identity.from_private_key(bytes([5]) * 32), REQUEST)
CERTIFICATE = PlanCertificate(plan=PLAN, seed_signature="0x", signatures=())
WANTED = make_wanted(PLAN)


@asynccontextmanager
async def serve_members(
    answers: Sequence[list[int]], certificate: PlanCertificate
) -> AsyncIterator[CommitteeView]:
    """Members that answer a signed request with these statuses, the last again and again.

    One that took it has its plan.
    """
    servers = []
    for statuses in answers:
        took: list[SignedRequest] = []

        async def take(
            request: web.Request,
            statuses: list[int] = statuses,
            took: list[SignedRequest] = took,
        ) -> web.Response:
            signed = SignedRequest.from_value(await read_json(request))
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            if status != 200:
                return error_reply(status, "freeze it for longer")
            took.append(signed)
            return web.json_response({})

        async def show(request: web.Request, took: list[SignedRequest] = took) -> web.Response:
            if took != [SIGNED]:
                return error_reply(404, "no plan so far")
            return web.Response(body=certificate.canonical_bytes(), content_type="application/json")

        app = make_app()
        app.router.add_post(api.SIGNED_REQUEST.path, take)
        app.router.add_get("/v1/plan/{id}", show)
        servers.append(await serve_app(app, "127.0.0.1", 0))
    members = tuple(MemberView(f"0x{i:040x}", f"0x{i:064x}", s.url) for i, s in enumerate(servers))
    try:
        yield CommitteeView(1, members, 3, "", Domain(REQUEST.chain_id, "0x" + "0" * 40))
    finally:
        for server in servers:
            await server.close()


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_requests, "check_certificate", lambda certificate, committee: None)


async def test_a_member_that_is_behind_is_told_again() -> None:
    answers = [[503, 503, 200], [400], [503], [503]]
    async with serve_members(answers, CERTIFICATE) as committee, SignedClient() as http:
        plan = await fetch_signed_plan(http, always(committee), WANTED, SIGNED, timeout_s=HANG_S)
    assert plan == CERTIFICATE


async def test_what_two_members_refuse_is_refused() -> None:
    answers = [[400], [503], [400], [503]]
    async with serve_members(answers, CERTIFICATE) as committee, SignedClient() as http:
        with pytest.raises(InvalidInput, match="freeze it for longer"):
            await fetch_signed_plan(http, always(committee), WANTED, SIGNED, timeout_s=HANG_S)


async def test_a_plan_for_other_words_than_ours_is_refused() -> None:
    other = REQUEST.model_copy(update={"inputs_digest": "0x" + "66" * 32})
    forged = CERTIFICATE.model_copy(update={"plan": PLAN.model_copy(update={"request": other})})
    async with serve_members([[200]], forged) as committee, SignedClient() as http:
        with pytest.raises(PeerFault, match="another request than ours"):
            await fetch_signed_plan(http, always(committee), WANTED, SIGNED, timeout_s=HANG_S)


@pytest.mark.parametrize(("until", "frozen"), [(0, False), (100, False), (161, True)])
async def test_a_balance_is_frozen_when_it_stays_beyond_the_deadline(
    until: int, frozen: bool
) -> None:
    assert await is_frozen(Frozen(until), "0x", 160, 100) is frozen  # type: ignore[arg-type]


@pytest.mark.parametrize("until", [101, 160])
async def test_a_freeze_that_ends_too_soon_is_said_before_money_moves(until: int) -> None:
    with pytest.raises(InvalidInput, match="deadline is 60 s away; freeze it for longer"):
        await is_frozen(Frozen(until), "0x", 160, 100)  # type: ignore[arg-type]


class Frozen:
    def __init__(self, until: int) -> None:
        self._until = until

    async def call(self, contract: str, function: str, account: str) -> int:
        return self._until
