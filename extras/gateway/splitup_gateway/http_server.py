"""The HTTP server of all APIs: its routes, the streams that answer them, quotes and receipts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web
from splitup_private.split import messages as split

from splitup.client.leases import LeaseOptions, LeasePool
from splitup.client.network import Network
from splitup.client.text.encoding import EncoderModel
from splitup.client.text.generation import TextModel
from splitup.core.errors import ChainUnavailable, SplitUpError, Unavailable
from splitup.net.http_server import make_app
from splitup.net.metrics import Reading
from splitup_gateway.access import Access
from splitup_gateway.api_keys import OpenCharge, get_principal
from splitup_gateway.apis import message_answers, ollama
from splitup_gateway.apis.answers import RECEIPTS
from splitup_gateway.apis.encoding import (
    EmbeddingRequest,
    EncodingRequest,
    RerankRequest,
    prepare_texts,
)
from splitup_gateway.apis.messages import MESSAGES, CountRequest
from splitup_gateway.apis.requests import (
    ChatRequest,
    CompletionRequest,
    parse_body,
    parse_request,
    read_request,
)
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.charges import RECEIPT_S
from splitup_gateway.errors import ApiError, translate
from splitup_gateway.preparing import count_prompt, prepare
from splitup_gateway.quotes import Quotes
from splitup_gateway.replies import Asking, PlainRequest, Read, Replies, Reply, list_fields
from splitup_gateway.served_models import ServedModels
from splitup_gateway.split.server import SplitServer, describe_error
from splitup_gateway.split.sessions import SessionOptions
from splitup_gateway.streaming.kept_streams import RESTARTED
from splitup_gateway.streaming.stream import Stream
from splitup_gateway.streaming.stream_files import read_server_name
from splitup_gateway.streaming.stream_routes import StreamRoutes, limit_write
from splitup_gateway.timelines import Timelines

_log = logging.getLogger("splitup.serve")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES: Final = 8 * 2**20  # a photo of a phone in base64


class ApiServer:
    """Serves registered models of one network that read texts."""

    def __init__(
        self,
        net: Network,
        options: LeaseOptions,
        access: Access,
        timelines: Timelines,
        sessions: SessionOptions | None = None,
        streams: Path | None = None,
    ) -> None:
        """``sessions``: private models are served to devices that keep the client's part.

        ``streams`` is the folder of streams that outlive the server; raises ConfigurationError.
        """
        self._net = net
        self._access = access
        self._streams = StreamRoutes(access, streams)
        if streams is not None:
            access.charges.server = read_server_name(streams)
        self._settling: asyncio.Task[None] | None = None
        self._quotes = Quotes()
        self._models = ServedModels(net, options, timelines)
        self._replies = Replies(access, self._models, self._quotes).list_by_path()
        self._split: SplitServer | None = None
        if sessions is not None:
            self._split = SplitServer(net, options, sessions, access, timelines, self._quotes)

    async def add_model(self, name: str, draft: str | None = None) -> None:
        """Serve a model; raise InvalidInput when there is no such model that reads texts.

        With ``draft`` its texts are decoded by drafts: of n-grams, and of the registered model of
        that name unless it is "". Raises what ``Network.speculate`` raises.
        """
        if self._split is not None and (await self._net.fetch_model(name)).manifest.client:
            await self._split.add_model(name)
            self._models.for_devices.add(name)
            return
        await self._models.add(name, draft)

    async def close(self) -> None:
        """End all leases; they are paid for what they ran."""
        await self._streams.streams.close()
        if self._settling is not None:
            self._settling.cancel()
        await self._models.close()
        if self._split is not None:
            await self._split.close()

    def list_readings(self) -> Iterator[Reading]:
        """Yield the figures that Prometheus reads, by the names that models are served under."""
        for model, pool in self._pools.items():
            ended = pool.totals
            for name, text, value in (
                ("leases_idle", "Open executions that wait for a request.", len(pool.idle)),
                ("leases_lent", "Open executions that serve a request.", len(pool.lent)),
                ("requests_waiting", "Requests that wait for an execution.", len(pool.waiting)),
                ("texts_total", "Texts that ended, also by an error.", ended.texts),
                ("prompt_tokens_total", "Tokens of prompts.", ended.prompt_tokens),
                ("cached_tokens_total", "Tokens of prompts not fed again.", ended.cached_tokens),
                ("completion_tokens_total", "Tokens of answers.", ended.completion_tokens),
                ("cost_usdc_total", "Price of the steps that ran.", ended.cost_micro_usdc / 1e6),
            ):
                yield Reading(f"splitup_serve_{name}", text, value, (("model", model),))

    @property
    def private_models(self) -> tuple[str, ...]:
        """Names of the models that are served to devices."""
        return () if self._split is None else tuple(self._split.pools)

    @property
    def _pools(self) -> dict[str, LeasePool]:
        pools = self._models.pools
        return pools if self._split is None else pools | self._split.pools

    def make_app(self) -> web.Application:
        """Return the application to serve."""
        app = make_app(max_body_bytes=MAX_BODY_BYTES, errors=answer_errors)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model}", self._get_model)
        for path, (read, reply) in self._replies.items():
            app.router.add_post(path, self._serve(read, reply))
        app.router.add_post(f"{MESSAGES}/count_tokens", self._count_tokens)
        app.router.add_get("/api/tags", self._ollama_tags)
        app.router.add_post("/api/show", self._ollama_show)
        app.router.add_get("/api/version", self._ollama_version)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/quote", self._quote)
        app.router.add_get(f"{RECEIPTS}/{{execution}}", self._get_receipt)
        self._streams.add_to(app)
        if self._split is not None:
            self._split.add_to(app)
        return app

    async def resume(self) -> None:
        """Go on with the streams that the server left which had this address before."""
        replies, keys = self._replies, await self._access.list_keys()
        charges = await self._access.charges.list_left()

        async def work(stream: Stream) -> None:
            asked, left = stream.call.asked, stream.state
            key = keys.get(stream.call.owner)
            used = sum(
                each["cost_micro_usdc"] + each["image_cost_micro_usdc"] for each in left["reports"]
            )
            charged = charges.get(stream.id, OpenCharge(stream.id, stream.call.owner, 0))
            charging = self._access.charges.go_on(key, charged, left["limit"], used, stream.caller)
            async with charging as charge:
                if asked is None or asked[0] not in replies:
                    raise RESTARTED
                read, reply = replies[asked[0]]
                await reply(Asking({}, key, stream, charge), read(asked[1]))

        self._streams.streams.resume(work)

    def settle(self) -> None:
        """Begin to charge keys what the requests cost that such a server has left."""
        settling = self._access.charges.settle_left(self._net)
        self._settling = asyncio.create_task(settling, name="charges that were left")

    # ---- models --------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        waits = [name for name, pool in self._pools.items() if not pool.is_serving]
        return web.json_response({"status": "waiting" if waits else "ok"})

    async def _list_models(self, request: web.Request) -> web.Response:
        names = await self._list(request)
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
        data = [self._models.describe(name) for name in names]
        listed = {"object": "list", "data": data, "has_more": False, **ends}
        return web.json_response(listed | {"apis": list_fields()})

    async def _list(self, request: web.Request) -> list[str]:
        """Return the models that a request may use."""
        key = await self._access.let_in(request)
        return self._models.list_allowed(key)

    async def _get_model(self, request: web.Request) -> web.Response:
        key = await self._access.let_in(request)
        served = await self._models.find(request.match_info["model"], key)
        return web.json_response(self._models.describe(served.model.name))

    # ---- texts ---------------------------------------------------------------------------------

    def _serve(self, read: Read, reply: Reply) -> Handler:
        """Return the handler of a route whose answers are streams, whoever is connected."""

        async def handle(request: web.Request) -> web.StreamResponse:
            key = await self._access.let_in(request)
            async with self._access.read(request, key, read) as (body, wanted):
                headers = request.headers.copy()

                async def work(stream: Stream) -> None:
                    await reply(Asking(headers, key, stream), wanted)

                owner = "" if key is None else key.name
                return await self._streams.answer(request, owner, body, work)

        return handle

    async def _count_tokens(self, request: web.Request) -> web.Response:
        key = await self._access.let_in(request)

        def parse(body: bytes) -> ChatRequest:
            return read_request(CountRequest, body).convert()

        async with self._access.read(request, key, parse) as (_, asked):
            model = (await self._models.find(asked.model, key)).get_text_model()
            count = await count_prompt(model, asked, get_principal(key))
        return web.json_response({"input_tokens": count})

    # ---- prices --------------------------------------------------------------------------------

    async def _quote(self, request: web.Request) -> web.Response:
        """Answer what a request of any kind may cost."""
        key = await self._access.let_in(request)
        async with self._access.read(request, key, self._read_priced) as (_, asked):
            served = await self._models.find(asked.model, key)
            if isinstance(asked, EmbeddingRequest | RerankRequest):
                encoder = served.get_encoder()
                inputs = await prepare_texts(encoder, asked, get_principal(key))
                tokens, most_tokens, steps = len(inputs.make_report().prompt), 0, inputs.steps
                most = encoder.manifest.cost_micro_usdc(steps)
            else:
                model = served.get_text_model()
                prepared = await prepare(model, asked, get_principal(key))
                tokens = sum(map(len, {text.prompt for text in prepared.texts}))
                most_tokens = sum(text.max_tokens for text in prepared.texts)
                steps, most = prepared.count_steps(model), served.compute_price(prepared)
        quote, until = self._quotes.make(asked.model, most)
        answer = {
            "id": quote,
            "object": "quote",
            "model": asked.model,
            "prompt_tokens": tokens,
            "max_tokens": most_tokens,
            "max_steps": steps,
            "max_cost_micro_usdc": most,
            "expires_at": until,
        }
        return web.json_response(answer)

    def _read_priced(self, body: bytes) -> EncodingRequest | PlainRequest:
        """Return a request of any kind, as its model and its fields tell."""
        value = parse_body(body)
        fields = value if isinstance(value, dict) else {}
        if isinstance(self._models.get(str(fields.get("model"))), EncoderModel):
            if "documents" in fields:
                return parse_request(RerankRequest, value)
            return parse_request(EmbeddingRequest, value)
        if "input" in fields:
            return parse_request(ResponseRequest, value).convert()
        if "messages" in fields:
            return parse_request(ChatRequest, value).convert()
        return parse_request(CompletionRequest, value).convert()

    async def _get_receipt(self, request: web.Request) -> web.Response:
        """Answer how an execution of this server was closed; "open" while it is not."""
        principal = get_principal(await self._access.let_in(request))
        execution = request.match_info["execution"]
        if not any(pool.is_of(execution, principal) for pool in self._pools.values()):
            raise ApiError(
                "this server ran no such execution for you lately; ask the chain: "
                "splitup receipt ID",
                status=404,
                code="receipt_not_found",
            )
        try:
            receipt = await self._net.receipt(execution, timeout_s=RECEIPT_S)
        except ChainUnavailable:
            raise
        except Unavailable:
            return web.json_response({"execution_id": execution, "status": "open"})
        return web.json_response(asdict(receipt))

    # ---- Ollama's API --------------------------------------------------------------------------

    async def _ollama_tags(self, request: web.Request) -> web.Response:
        found = [self._models.get(name) for name in await self._list(request)]
        models = [ollama.describe_model(model) for model in found if isinstance(model, TextModel)]
        return web.json_response({"models": models})

    async def _ollama_show(self, request: web.Request) -> web.Response:
        key = await self._access.let_in(request)
        reading = partial(read_request, ollama.ShowRequest)
        async with self._access.read(request, key, reading) as (_, wanted):
            served = await self._models.find(wanted.name, key)
        return web.json_response(ollama.show_model(served.get_text_model()))

    async def _ollama_version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": ollama.VERSION})


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a handler raises."""
    try:
        response = await handler(request)
        if not response.prepared:  # it is sent here, so that the time for it is limited
            async with limit_write():
                await response.prepare(request)
                await response.write_eof()
        return response
    except web.HTTPException as error:
        reason = f"{request.method} {request.path:.200}: {error.reason}"
        routes = {resource.canonical for resource in request.app.router.resources()}
        if error.status == 404 and f"/v1{request.path}" in routes:
            reason += "; let the base URL end with /v1"
        return _reply_error(request, ApiError(reason, status=error.status))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if request.path.startswith(f"{split.PATH}/"):
            answer, status, headers = describe_error(error)
            return web.json_response(answer.model_dump(mode="json"), status=status, headers=headers)
        if isinstance(error, SplitUpError):
            return _reply_error(request, translate(error))
        _log.exception("%s %s failed", request.method, request.path)
        message = "internal error; the server's log has the details"
        return _reply_error(request, ApiError(message, status=500, kind="server_error"))


def _reply_error(request: web.Request, error: ApiError) -> web.Response:
    if request.path.startswith("/api/"):
        body = ollama.describe_error(error)
    elif request.path.startswith(MESSAGES):
        body = message_answers.describe_error(error)
    else:
        body = error.describe()
    return web.json_response(body, status=error.status, headers=error.headers)
