"""A committee member's HTTP server (``splitup.messages.api``)."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from splitup.chain.committee_reader import fetch_node_key
from splitup.core import limits, tuning
from splitup.core.errors import BadSignature, InvalidInput
from splitup.core.places import Places
from splitup.crypto.jws import Claims, ReplayCache
from splitup.messages import api
from splitup.messages.base import Message
from splitup.net.chunked_messages import ChunkedMessage
from splitup.net.http_server import (
    add_routes,
    error_reply,
    get_admission,
    make_app,
    read_message,
    read_signed,
    read_unsigned,
)
from splitup.net.relay import Relay
from splitup.protocol.committee.certificates import MemberView
from splitup.protocol.committee.events import (
    GossipReceived,
    HeartbeatReceived,
    NodeReport,
    ReportReceived,
)
from splitup.protocol.committee.peer_messages import parse_gossip
from splitup_oracle.member.gossip import CHUNKED_MESSAGE_KIND
from splitup_oracle.member.shell import Member

_TASKS: Final = re.compile(rf"(?:[0-9]{{1,4}}(?:,[0-9]{{1,4}}){{0,{limits.MAX_TASKS - 1}}})?")
_MODEL_ID: Final = re.compile(r"0x[0-9a-f]{64}")
_REPORTS: Final[tuple[api.Route[Any], ...]] = (
    *(api.EXECUTOR_COMMITMENT, api.TAKEOVERS, api.COMPLETION),
    *(api.VALIDATOR_COMMITMENT, api.VERIFICATION_RESULT),
)


class MemberServer:
    """The routes of one member."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._replays = ReplayCache()
        self._plan_waits: Places[asyncio.Task[Any]] = Places(tuning.PLAN_WAITS)
        self._reach_checks: Places[asyncio.Task[Any]] = Places(tuning.REACH_CHECKS)
        self._signed_requests: Places[asyncio.Task[Any]] = Places(tuning.SIGNED_REQUESTS)
        self.relay = Relay(lambda: member.endpoint, functools.partial(fetch_node_key, member.chain))

    def make_app(self) -> web.Application:
        """Return the application to serve."""
        app = make_app()
        add_routes(
            app,
            api.ROUTES["member"],
            {
                api.PING: self._ping,
                api.STATUS: self._status,
                api.SNAPSHOT: self._snapshot,
                api.MESSAGE_CHUNK: self._message_chunk,
                api.PLAN: self._plan,
                api.HOLDERS: self._holders,
                api.EVIDENCE: self._evidence,
                api.DUE_NOTICE: self._due_notice,
                api.HEARTBEAT: self._heartbeat,
                api.REACH_REQUEST: self._reach,
                api.SIGNED_REQUEST: self._signed_request,
                api.GOSSIP: self._gossip,
                **{route: self._take_reports(route) for route in _REPORTS},
            },
        )
        self.relay.add_routes(app)
        return app

    async def _ping(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._member.get_status())

    async def _snapshot(self, request: web.Request) -> web.Response:
        root = request.match_info["root"]
        snapshot = self._member.machine.find_snapshot(root)
        if snapshot is None:
            return error_reply(404, "this member has no snapshot with that root")
        return _reply(snapshot)

    async def _message_chunk(self, request: web.Request) -> web.Response:
        digest, index = request.match_info["digest"], request.match_info["index"]
        chunk = None
        if index.isascii() and index.isdigit() and len(index) <= 4:
            chunk = self._member.gossip.chunked_messages.find_chunk(digest, int(index))
        if chunk is None:
            return error_reply(404, "this member does not offer that message any more")
        return web.Response(body=chunk, content_type="application/octet-stream")

    async def _plan(self, request: web.Request) -> web.Response:
        """Reply with the certificate, waiting for it up to ``wait_s`` seconds."""
        execution_id = request.match_info["execution_id"]
        wait_s = _parse_wait(request.query.get("wait_s", "0"))
        with get_admission(request).hold(request, self._plan_waits):
            certificate, refusal = await self._member.wait_for_plan(execution_id, wait_s)
        if certificate is not None:
            return _reply(certificate)
        if refusal:
            return error_reply(409, refusal)
        return error_reply(
            404, f"execution {execution_id} has no plan here so far; check the id, or ask again"
        )

    async def _holders(self, request: web.Request) -> web.Response:
        model_id = request.match_info["model_id"]
        if not _MODEL_ID.fullmatch(model_id):
            return error_reply(404, "that is no model's id")
        return _reply(self._member.describe_holders(model_id))

    async def _evidence(self, request: web.Request) -> web.Response:
        evidence = self._member.machine.find_evidence(request.match_info["execution_id"])
        if evidence is None:
            return error_reply(404, "this member has seen no settlement of that execution lately")
        return _reply(evidence)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        received = await read_message(request, api.HEARTBEAT, audience=self._member.audience)
        heartbeat = received.message
        machine = self._member.machine
        if not machine.may_name(heartbeat.block_hash, time.monotonic()):
            # no error: a node that just started learns by this answer which block to name
            return web.json_response({"block": machine.get_head()})
        self._member.feed_peer(HeartbeatReceived(heartbeat, received.issuer))
        get_admission(request).vouch(request, received.issuer)
        self._member.note_heartbeat(heartbeat.node)
        return _json(self._member.get_demand(heartbeat.node))

    async def _reach(self, request: web.Request) -> web.Response:
        """Tell a node whether this member can connect to its endpoint."""
        received = await read_message(request, api.REACH_REQUEST, audience=self._member.audience)
        admission = get_admission(request)
        with (
            admission.hold(request, self._reach_checks),
            self._replays.once(received.claims, int(time.time())),
        ):
            problem = await self._member.nodes.try_reach(received.message, received.issuer)
        return web.json_response({"problem": problem})

    async def _signed_request(self, request: web.Request) -> web.Response:
        signed = await read_unsigned(request, api.SIGNED_REQUEST)
        with get_admission(request).hold(request, self._signed_requests):
            await self._member.open_signed(signed)
        return web.json_response({})

    async def _gossip(self, request: web.Request) -> web.Response:
        claims, _ = await read_signed(
            request, api.GOSSIP, audience=self._member.account, check=self._find_sender
        )
        sender = self._find_sender(claims)
        get_admission(request).vouch(request, claims.issuer)
        if claims.body.get("kind") == CHUNKED_MESSAGE_KIND:
            chunked_message = ChunkedMessage.from_value(claims.body.get("message"))
            self._member.gossip.receive_chunked_message(sender.account, chunked_message)
            return web.json_response({})
        message, configuration = parse_gossip(claims.body)
        self._member.feed_peer(GossipReceived(sender.account, message, configuration))
        return web.json_response({})

    def _find_sender(self, claims: Claims) -> MemberView:
        sender = self._member.machine.find_member(claims.issuer)
        if sender is None:
            raise BadSignature(f"{claims.issuer} is no committee member's key", peer=claims.issuer)
        return sender

    async def _due_notice(self, request: web.Request) -> web.Response:
        """Reply what we attest, and of what we hold the ``tasks`` of one ``validator``."""
        execution_id = request.match_info["execution_id"]
        validator, tasks = request.query.get("validator", ""), request.query.get("tasks", "")
        if not _TASKS.fullmatch(tasks):
            raise InvalidInput("tasks are numbers with commas between them")
        named = list(dict.fromkeys(map(int, tasks.split(",")))) if tasks else []
        signed = self._member.machine.sign_notice(execution_id, validator, named)
        if signed is not None:
            return _reply(signed)
        if self._member.machine.is_over(execution_id):
            return error_reply(410, f"execution {execution_id} is over")
        return error_reply(404, f"there is no draw for execution {execution_id} here so far")

    def _take_reports(
        self, route: api.Route[NodeReport]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return the handler that gives the machine what a node says, and its signature."""

        async def handle(request: web.Request) -> web.Response:
            received = await read_message(request, route, audience=self._member.audience)
            event = ReportReceived(received.message, received.issuer, received.token)
            self._member.feed_peer(event)
            return web.json_response({})

        return handle


def _parse_wait(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= api.PLAN.max_wait_s:
        raise InvalidInput(f"wait_s is a number of seconds from 0 to {api.PLAN.max_wait_s:g}")
    return wait_s


def _reply(message: Message) -> web.Response:
    """Return a reply with a message, which is encoded once however often strangers ask for it."""
    return _json(message.once(_encode))


def _encode(message: Message) -> bytes:
    return message.canonical_bytes()


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
