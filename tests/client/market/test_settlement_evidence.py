from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web

from splitup.client.market import settlement_evidence as module
from splitup.client.market.receipts import Receipt
from splitup.client.market.settlement_evidence import check_evidence, fetch_evidence
from splitup.core.errors import PeerFault, Unavailable
from splitup.crypto import bls
from splitup.crypto.quorum import Domain
from splitup.messages.verification import Draw, Evidence, TaskVerdict
from splitup.net.http import SignedClient
from splitup.net.http_server import error_reply, make_app, serve_app
from splitup.protocol.committee.certificates import (
    RANDOMNESS_DOMAIN,
    CommitteeView,
    MemberView,
    draw_alpha,
)
from splitup.protocol.settlement.evidence import compute_evidence_root
from tests.builders import address

ID, BLOCK = "0x" + "ee" * 32, "0x" + "aa" * 32
SECRET = (7).to_bytes(32, "big")
COMMITMENTS = ((address(1), "0x" + "12" * 32),)
SIGNATURE = bls.sign_partial(SECRET, RANDOMNESS_DOMAIN, draw_alpha(ID, BLOCK, COMMITMENTS, (), 1))
EVIDENCE = Evidence(
    draw=Draw(
        execution_id=ID,
        block_hash=BLOCK,
        commitments=COMMITMENTS,
        steps=1,
        signature=SIGNATURE,
        seed=bls.compute_seed(SIGNATURE),
    ),
    verdicts=(
        TaskVerdict(
            task=0,
            outcome="lied",
            validators=(address(1),),
            liars=(address(2),),
            silent=(address(3),),
            close=True,
        ),
    ),
)
RECEIPT = Receipt(
    execution_id=ID,
    status="settled",
    steps=1,
    payments=(),
    slashes=(),
    paid_micro_usdc=0,
    fee_micro_usdc=0,
    refunded_micro_usdc=0,
    evidence_root=compute_evidence_root(EVIDENCE),
    block_number=1,
    transaction="0x",
    model_id=ID,
    verify_bps=10_000,
)


class LateMember:
    """A committee member that learns of a settlement only when it has been asked twice."""

    def __init__(self) -> None:
        self.asked = 0

    async def handle(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.asked <= 2:
            return error_reply(404, "this member has not seen that execution settled lately")
        return web.Response(body=EVIDENCE.canonical_bytes(), content_type="application/json")


@pytest.fixture
async def late() -> AsyncIterator[tuple[LateMember, CommitteeView]]:
    member, app = LateMember(), make_app()
    app.router.add_get("/v1/evidence/{execution_id}", member.handle)
    server = await serve_app(app, "127.0.0.1", 0)
    seat = MemberView(address(9), "0x" + "01" * 32, server.url)
    key = bls.compute_public_key(SECRET)
    yield member, CommitteeView(1, (seat,), 1, key, Domain(31337, address(10)))
    await server.close()


async def test_members_that_lag_behind_are_asked_again(
    late: tuple[LateMember, CommitteeView],
) -> None:
    member, committee = late
    async with SignedClient() as http:
        assert await fetch_evidence(http, committee, RECEIPT, 1) == EVIDENCE
    assert member.asked == 3


async def test_evidence_the_chain_does_not_hold_is_never_returned(
    late: tuple[LateMember, CommitteeView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    forged = replace(RECEIPT, evidence_root="0x" + "0" * 64)
    async with SignedClient() as http:
        with pytest.raises(Unavailable, match="is not what the chain holds"):
            await fetch_evidence(http, late[1], forged, 1)


async def test_evidence_of_a_smaller_share_is_never_returned(
    late: tuple[LateMember, CommitteeView], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that drew by another share than the client asked for cannot pass it off as its."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    async with SignedClient() as http:
        with pytest.raises(Unavailable, match="lacks a task that was drawn"):
            await fetch_evidence(http, late[1], RECEIPT, 2)  # a second task, at 100 %


async def test_a_refund_has_no_evidence(late: tuple[LateMember, CommitteeView]) -> None:
    async with SignedClient() as http:
        with pytest.raises(Unavailable, match="was not settled"):
            await fetch_evidence(http, late[1], replace(RECEIPT, status="refunded"), 1)
    assert late[0].asked == 0


def test_a_task_that_nobody_committed_to_needs_no_verdict(
    late: tuple[LateMember, CommitteeView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "check_draw", lambda draw, committee: None)
    committed = EVIDENCE.draw.commitments[0][0]
    executors = (committed, address(99))
    for named, is_complete in ((executors, True), ((committed, committed), False), ((), False)):
        draw = EVIDENCE.draw.model_copy(update={"executors": named})
        evidence = EVIDENCE.model_copy(update={"draw": draw})
        receipt = replace(RECEIPT, evidence_root=compute_evidence_root(evidence))
        if is_complete:
            check_evidence(evidence, receipt, 2, late[1])
        else:
            with pytest.raises(PeerFault, match="lacks a task that was drawn"):
                check_evidence(evidence, receipt, 2, late[1])
