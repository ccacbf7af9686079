"""Split inference over HTTP and WebSockets; ``splitup_private.split.messages`` has the messages.

The server gets hidden states and returns hidden states. It makes what depends on positions alone,
runs the steps on the market's nodes, and pays for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from aiohttp import WSMsgType, web
from splitup_private.split import messages as split
from splitup_private.split.cut import Cut
from splitup_private.split.messages import SplitError

from splitup.client.leases import LeaseOptions, LeasePool
from splitup.client.network import Network
from splitup.client.text.generation import get_text_info
from splitup.core.errors import ExecutionFailed, InvalidInput, SplitUpError
from splitup.core.places import Places, hold_place
from splitup.messages.base import Message
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKey, get_principal
from splitup_gateway.errors import translate
from splitup_gateway.quotes import Quotes
from splitup_gateway.split.files import STALL_S, FileSender
from splitup_gateway.split.models import NodeSessions, SplitModel
from splitup_gateway.split.sessions import DeviceSessions, SessionOptions
from splitup_gateway.timelines import Timelines

_log = logging.getLogger("splitup.serve")

CONNECTIONS: Final = 128  # WebSockets at once
_BINARY: Final = "application/octet-stream"


class SplitServer:
    """Serves private models of one network to devices that keep their first and last layers."""

    def __init__(
        self,
        net: Network,
        leases: LeaseOptions,
        sessions: SessionOptions,
        access: Access,
        timelines: Timelines,
        quotes: Quotes,
    ) -> None:
        self._net = net
        self._leases = replace(leases, most=max(leases.most, sessions.most))  # one a session
        self._access = access
        self._timelines = timelines
        self._quotes = quotes
        self._sessions = DeviceSessions(sessions)
        self._files = FileSender()
        self._models: dict[str, SplitModel] = {}
        self._connections: Places[asyncio.Task[Any]] = Places(CONNECTIONS)

    @property
    def pools(self) -> dict[str, LeasePool]:
        """The leases of every model, by its name."""
        return {name: served.pool for name, served in self._models.items()}

    async def add_model(self, name: str) -> None:
        """Serve a private model; fetch its files first. Raises InvalidInput for another model."""
        model = await self._net.fetch_model(name)
        info = get_text_info(model.manifest, name)
        if info.diffusion is not None:
            raise InvalidInput(
                f"model {name} writes blocks of tokens, and devices feed one after the other"
            )
        if info.images is not None:
            raise InvalidInput(f"model {name} takes images, and devices feed text only")
        cut = Cut.find(model.manifest, name)
        files = await self._net.fetch_client_files(model)
        pool = LeasePool(NodeSessions(self._net), name, self._leases, self._timelines.keep)
        steps = min(info.context, self._leases.steps // 4)
        served = SplitModel(name, model.model_id, model.manifest, info, cut, pool, steps, files)
        pool.open()
        self._models[name] = served

    async def close(self) -> None:
        """End all sessions, then their executions; they are paid for what they ran."""
        await self._sessions.close()
        await asyncio.gather(*(served.pool.close() for served in self._models.values()))

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_get(f"{split.PATH}/models", self._list_models)
        app.router.add_get(f"{split.PATH}/files/{{digest}}", self._send_file)
        app.router.add_post(f"{split.PATH}/forward", self._post)
        app.router.add_get(f"{split.PATH}/stream", self._stream)

    # ---- models and files ----------------------------------------------------------------------

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        key = await self._authorise(request)
        models = split.PrivateModels(
            models=tuple(one.describe() for one in self._allowed(key)),
            adapter_hosts=self._sessions.options.adapter_hosts,
            adapter_signers=self._sessions.options.adapter_signers,
        )
        return web.json_response(
            models.model_dump(mode="json"), headers={"Cache-Control": "no-store"}
        )

    async def _send_file(self, request: web.Request) -> web.StreamResponse:
        key = await self._authorise(request)
        digest = request.match_info["digest"]
        for served in self._allowed(key):
            if digest in served.files:
                path = served.files[digest]
                return await self._files.send(request, path, digest, get_principal(key))
        raise SplitError(
            "file_unknown",
            f"no model here leaves a file '{digest:.80}' to the client; see "
            f"GET {split.PATH}/models",
            status=404,
        )

    def _allowed(self, key: ApiKey | None) -> Iterable[SplitModel]:
        return (
            served for served in self._models.values() if key is None or key.allows(served.name)
        )

    def _find(self, name: str | None, key: ApiKey | None) -> SplitModel:
        for served in self._allowed(key):
            if name in (None, served.name, served.model_id):
                return served
        who = "here" if key is None else "to this key"
        raise SplitError(
            "model_unknown",
            f"the model '{name or ''}' is not served {who}; see GET {split.PATH}/models",
            status=404,
        )

    # ---- one request ---------------------------------------------------------------------------

    async def _post(self, request: web.Request) -> web.StreamResponse:
        """Answer one request over HTTP, in the form that it came in."""
        key = await self._authorise(request)
        is_binary = request.content_type == _BINARY

        def decode(body: bytes) -> tuple[Message, bytes]:
            if len(body) > split.MAX_MESSAGE_BYTES:
                raise web.HTTPRequestEntityTooLarge(split.MAX_MESSAGE_BYTES, len(body))
            return split.decode_binary(body) if is_binary else split.decode_text(body)

        async with self._access.read(request, key, decode) as (_, (asked, tensor)):
            answer, rows = await self._answer(asked, tensor, key, request.headers)
        if is_binary:
            data = split.encode_binary(answer, rows)
            return web.Response(body=data, content_type=_BINARY)
        text = split.encode_text(answer, rows, "pre_activations" if rows else "")
        return web.Response(text=text, content_type="application/json")

    async def _answer(
        self, asked: Message, tensor: bytes, key: ApiKey | None, headers: Mapping[str, str]
    ) -> tuple[Message, bytes]:
        """Answer a request; ``headers`` may limit its cost."""
        match asked:
            case split.Ping():
                return split.Pong(), b""
            case split.AskConfig():
                served = self._find(asked.model, key)
                options = self._sessions.options
                config = split.ConfigAnswer(
                    model=served.describe(), max_sessions=options.most, session_ttl_s=options.ttl_s
                )
                return config, b""
            case split.EndSession():
                self._sessions.end(asked.session_id, None if key is None else key.name)
                return split.Ended(session_id=asked.session_id), b""
            case split.Forward():
                return await self._forward(asked, tensor, key, headers)
        raise TypeError(f"{type(asked).__name__} is no request")

    async def _forward(
        self, asked: split.Forward, tensor: bytes, key: ApiKey | None, headers: Mapping[str, str]
    ) -> tuple[Message, bytes]:
        began = time.monotonic()
        served = self._find(asked.model, key)
        cut = served.cut
        if asked.hidden_dim != cut.width:
            raise SplitError(
                "bad_tensor",
                f"hidden_dim is {asked.hidden_dim}; that of model {served.name} is {cut.width}",
            )
        rows = split.decode_rows(asked, tensor)
        most = served.manifest.cost_micro_usdc(cut.count_steps(asked.seq_len))
        self._quotes.check(headers, served.name, most)
        if key is not None and not asked.incremental:
            self._access.check_rate(key)  # the rate counts texts, not tokens
        owner = None if key is None else key.name
        async with self._access.charges.open(key, most, is_ordered=True) as charge:
            with self._sessions.use(asked, owner, served) as session:
                try:
                    found, lease, wait_s, nodes_s = await self._sessions.compute(
                        session, asked, rows, charge.principal
                    )
                finally:
                    charge.used = session.compute_cost()
        answer = split.Forwarded(
            session_id=session.id,
            execution_id=lease.session.execution_id,
            seq_len=asked.seq_len,
            hidden_dim=cut.width,
            incremental=asked.incremental,
            cached_seq_len=session.rows,
            steps=session.submitted,
            cost_micro_usdc=charge.used,
            wait_ms=round(wait_s * 1e3, 3),
            nodes_ms=round(nodes_s * 1e3, 3),
            total_ms=round((time.monotonic() - began) * 1e3, 3),
        )
        return answer, found.astype("<f4", copy=False).tobytes()

    # ---- WebSocket -----------------------------------------------------------------------------

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Answer messages in the order they come, each in its own form, one at a time."""
        principal = get_principal(await self._authorise(request))
        refusal = SplitError(
            "too_many_connections", "too many devices are connected; try again", status=503
        )
        socket = web.WebSocketResponse(
            protocols=(split.PROTOCOL,),
            max_msg_size=split.MAX_MESSAGE_BYTES,
            compress=False,  # hidden states are noise, and a small message could become a large one
            timeout=5.0,
        )
        with hold_place(self._connections, principal, refusal):
            await socket.prepare(request)
            await self._converse(socket, request)
        return socket

    async def _converse(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        while True:
            try:
                message = await socket.receive(timeout=self._sessions.options.ttl_s)
            except TimeoutError:
                await socket.close(message=b"nothing was sent for the life of a session")
                return
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return  # closed, or broken: aiohttp has answered with the reason
            is_binary = message.type == WSMsgType.BINARY
            rows = b""
            try:
                decode = split.decode_binary if is_binary else split.decode_text
                key = await self._authorise(request)  # it may have been revoked since
                asked, tensor = await self._access.parse(key, message.data, decode)
                answer, rows = await self._answer(asked, tensor, key, {})
            except Exception as error:
                answer = describe_error(error)[0]
            try:
                async with asyncio.timeout(STALL_S):
                    if is_binary:
                        await socket.send_bytes(split.encode_binary(answer, rows))
                    else:
                        name = "pre_activations" if rows else ""
                        await socket.send_str(split.encode_text(answer, rows, name))
            except TimeoutError:
                raise ConnectionResetError(f"the device read nothing for {STALL_S:g} s") from None

    async def _authorise(self, request: web.Request) -> ApiKey | None:
        header = request.headers.get("Authorization")
        if header is None:  # a browser's WebSocket sends no headers of the page's choice
            for protocol in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
                if protocol.strip().startswith(split.KEY_PROTOCOL):
                    header = f"Bearer {protocol.strip().removeprefix(split.KEY_PROTOCOL)}"
        return await self._access.let_in(request, header, is_counted=False)


def describe_error(error: Exception) -> tuple[split.ErrorAnswer, int, dict[str, str]]:
    """Return the answer, the HTTP status and headers for an error."""
    if isinstance(error, SplitError):
        return split.ErrorAnswer(code=error.code, message=str(error)), error.status, {}
    if not isinstance(error, SplitUpError):
        _log.error("a forward failed", exc_info=error)
        message = "internal error; the server's log has the details"
        return split.ErrorAnswer(code="internal", message=message), 500, {}
    shown = translate(error)
    code = shown.code or shown.kind
    message = str(shown)
    if isinstance(error, ExecutionFailed):
        code = "execution_failed"
        message += "; the session is lost: feed its rows again from position 0"
    answer = split.ErrorAnswer(code=code, message=message)
    return answer, shown.status, shown.headers
