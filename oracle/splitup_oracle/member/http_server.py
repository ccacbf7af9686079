"""A committee member's HTTP interface: signed messages in, public facts out."""

from __future__ import annotations

import functools
import math
import time
from typing import Final

from aiohttp import web

from splitup.chain.committee_reader import fetch_node_key
from splitup.core import limits
from splitup.core.errors import BadSignature, InvalidInput, Unavailable
from splitup.crypto.jws import ReplayCache
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers
from splitup.messages.plans import SignedRequest
from splitup.messages.snapshots import Heartbeat, ReachRequest
from splitup.messages.verification import VerificationCommitment
from splitup.net.chunked_messages import ChunkedMessage
from splitup.net.http import error_reply, make_app, read_json, read_signed
from splitup.net.relay import Relay
from splitup.protocol.committee.events import (
    CompletionReceived,
    ExecutorCommitmentReceived,
    GossipReceived,
    HeartbeatReceived,
    ResultReceived,
    TakeoversReceived,
    ValidatorCommitmentReceived,
)
from splitup.protocol.committee.peer_messages import parse_gossip
from splitup_oracle.member.gossip import CHUNKED_MESSAGE_KIND, GOSSIP_TYP
from splitup_oracle.member.shell import (
    COMPLETION_TYP,
    EXECUTOR_COMMITMENT_TYP,
    HEARTBEAT_TYP,
    REACH_TYP,
    RESULT_TYP,
    TAKEOVERS_TYP,
    VALIDATOR_COMMITMENT_TYP,
    Member,
)

_MAX_WAITERS: Final = 1_024  # long-polls at once; each costs a connection and a task


class MemberServer:
    """The routes of one member."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._waiters = 0
        self._replays = ReplayCache()
        self.relay = Relay(lambda: member.endpoint, functools.partial(fetch_node_key, member.chain))

    def make_app(self) -> web.Application:
        """Return the application to serve."""
        app = make_app()
        app.add_routes(
            [
                web.get("/v1/ping", self._ping),
                web.get("/v1/status", self._status),
                web.get("/v1/snapshot/{root}", self._snapshot),
                web.get("/v1/parcel/{digest}/{part}", self._chunked_message),
                web.get("/v1/plan/{execution_id}", self._plan),
                web.get("/v1/evidence/{execution_id}", self._evidence),
                web.post("/v1/heartbeat", self._heartbeat),
                web.post("/v1/reach", self._reach),
                web.post("/v1/request", self._request),
                web.post("/v1/gossip", self._gossip),
                web.post("/v1/completion", self._completion),
                web.post("/v1/pledge", self._commitment),
                web.post("/v1/takeovers", self._takeovers),
                web.post("/v1/promise", self._validator_commitment),
                web.post("/v1/verification", self._verification),
                web.get("/v1/attestation/{execution_id}", self._attestation),
            ]
        )
        self.relay.add_routes(app)
        return app

    async def _ping(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._member.get_status())

    async def _snapshot(self, request: web.Request) -> web.Response:
        snapshot = self._member.machine.find_snapshot(request.match_info["root"])
        if snapshot is None:
            return error_reply(404, "this member has no snapshot of that root")
        return _json(snapshot.canonical_bytes())

    async def _chunked_message(self, request: web.Request) -> web.Response:
        digest, number = request.match_info["digest"], request.match_info["part"]
        part = None
        if number.isascii() and number.isdigit() and len(number) <= 4:
            part = self._member.gossip.chunked_messages.find_part(digest, int(number))
        if part is None:
            return error_reply(404, "this member does not offer that any more")
        return web.Response(body=part, content_type="application/octet-stream")

    async def _plan(self, request: web.Request) -> web.Response:
        """Answer with the certificate, waiting for it up to ``wait_s`` seconds."""
        execution_id = request.match_info["execution_id"]
        wait_s = _parse_wait(request.query.get("wait_s", "0"))
        if self._waiters >= _MAX_WAITERS:
            raise Unavailable("too many clients wait for plans here; ask another member")
        self._waiters += 1
        try:
            certificate, refusal = await self._member.wait_for_plan(execution_id, wait_s)
        finally:
            self._waiters -= 1
        if certificate is not None:
            return _json(certificate.canonical_bytes())
        if refusal:
            return error_reply(409, refusal)
        return error_reply(404, f"execution {execution_id} has no plan here so far; ask again")

    async def _evidence(self, request: web.Request) -> web.Response:
        evidence = self._member.machine.find_evidence(request.match_info["execution_id"])
        if evidence is None:
            return error_reply(404, "this member has not seen that execution settled lately")
        return _json(evidence.canonical_bytes())

    async def _heartbeat(self, request: web.Request) -> web.Response:
        claims = await read_signed(request, typ=HEARTBEAT_TYP, audience=self._member.audience)
        heartbeat = Heartbeat.from_value(claims.body)
        machine = self._member.machine
        if not machine.is_recent(heartbeat.block_hash, time.monotonic()):
            # no error: who starts, or was away, learns by this answer which block to name
            return web.json_response({"block": machine.get_head()})
        self._member.feed_peer(HeartbeatReceived(heartbeat, claims.issuer))
        self._member.note_heartbeat(heartbeat.node)
        return _json(self._member.get_demand())

    async def _reach(self, request: web.Request) -> web.Response:
        """Tell a node whether it can be connected to where it says."""
        claims = await read_signed(
            request, typ=REACH_TYP, audience=self._member.audience, replays=self._replays
        )
        reach = ReachRequest.from_value(claims.body)
        return web.json_response(
            {"problem": await self._member.nodes.try_reach(reach, claims.issuer)}
        )

    async def _request(self, request: web.Request) -> web.Response:
        await self._member.open_signed(SignedRequest.from_value(await read_json(request)))
        return web.json_response({})

    async def _gossip(self, request: web.Request) -> web.Response:
        claims = await read_signed(request, typ=GOSSIP_TYP, audience=self._member.account)
        sender = self._member.machine.find_member(claims.issuer)
        if sender is None:
            raise BadSignature(f"{claims.issuer} is no committee member's key", peer=claims.issuer)
        if claims.body.get("kind") == CHUNKED_MESSAGE_KIND:
            chunked_message = ChunkedMessage.from_value(claims.body.get("message"))
            self._member.gossip.receive_chunked_message(sender.account, chunked_message)
            return web.json_response({})
        message, configuration = parse_gossip(claims.body)
        self._member.feed_peer(GossipReceived(sender.account, message, configuration))
        return web.json_response({})

    async def _completion(self, request: web.Request) -> web.Response:
        claims = await read_signed(request, typ=COMPLETION_TYP, audience=self._member.audience)
        completion = Completion.from_value(claims.body)
        self._member.feed_peer(CompletionReceived(completion, claims.issuer))
        return web.json_response({})

    async def _commitment(self, request: web.Request) -> web.Response:
        claims = await read_signed(
            request, typ=EXECUTOR_COMMITMENT_TYP, audience=self._member.audience
        )
        commitment = ExecutorCommitment.from_value(claims.body)
        self._member.feed_peer(ExecutorCommitmentReceived(commitment, claims.issuer))
        return web.json_response({})

    async def _takeovers(self, request: web.Request) -> web.Response:
        claims = await read_signed(request, typ=TAKEOVERS_TYP, audience=self._member.audience)
        takeovers = Takeovers.from_value(claims.body)
        self._member.feed_peer(TakeoversReceived(takeovers, claims.issuer))
        return web.json_response({})

    async def _validator_commitment(self, request: web.Request) -> web.Response:
        claims = await read_signed(
            request, typ=VALIDATOR_COMMITMENT_TYP, audience=self._member.audience
        )
        validator_commitment = VerificationCommitment.from_value(claims.body)
        self._member.feed_peer(ValidatorCommitmentReceived(validator_commitment, claims.issuer))
        return web.json_response({})

    async def _attestation(self, request: web.Request) -> web.Response:
        execution_id = request.match_info["execution_id"]
        attestation = self._member.machine.find_attestation(execution_id)
        if attestation is not None:
            return _json(attestation.canonical_bytes())
        if self._member.machine.is_over(execution_id):
            return error_reply(410, f"execution {execution_id} is over")
        return error_reply(404, f"there is no draw for execution {execution_id} here so far")

    async def _verification(self, request: web.Request) -> web.Response:
        await read_signed(request, typ=RESULT_TYP, audience=self._member.audience)
        token: str = (await request.json())["jws"]  # the body is cached; its form was checked
        result, key = self._member.read_result(token)
        self._member.feed_peer(ResultReceived(result, key, token))
        return web.json_response({})


def _parse_wait(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= limits.MAX_PLAN_WAIT_S:
        raise InvalidInput(f"wait_s is a number of seconds from 0 to {limits.MAX_PLAN_WAIT_S:g}")
    return wait_s


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
