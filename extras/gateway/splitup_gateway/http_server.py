"""The HTTP server: routes of all APIs, errors in the form of each, texts as streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web

from splitup.client.images.image_reader import ImageReader
from splitup.client.leases import LeaseOptions, LeasePool
from splitup.client.network import Network
from splitup.client.text.encoding import EncoderModel
from splitup.client.text.generation import TextModel
from splitup.core.codec import parse_json
from splitup.core.errors import ChainUnavailable, SplitUpError, Unavailable
from splitup.net.http import make_app
from splitup.net.metrics import Reading
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKey, OpenCharge, get_principal
from splitup_gateway.apis import message_answers, ollama
from splitup_gateway.apis.answers import RECEIPTS, AnswerChoice, AnswerForm, CompletionForm
from splitup_gateway.apis.encoding import (
    EmbeddingRequest,
    EncodingRequest,
    RerankRequest,
    encode,
    make_answer,
    prepare_texts,
)
from splitup_gateway.apis.message_answers import MessagesForm
from splitup_gateway.apis.messages import CountRequest, MessagesRequest
from splitup_gateway.apis.ollama import (
    VERSION,
    GenerateRequest,
    OllamaChatRequest,
    OllamaForm,
    ShowRequest,
    describe_model,
    show_model,
)
from splitup_gateway.apis.requests import ChatRequest, CompletionRequest, Sampling, parse_request
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.apis.responses import ResponseForm
from splitup_gateway.apis.streams import (
    answer,
    generate_all,
    make_headers,
    replay,
    write_events,
    write_whole,
)
from splitup_gateway.apis.tools import CallParser
from splitup_gateway.charges import RECEIPT_S, Charge
from splitup_gateway.errors import ApiError, translate
from splitup_gateway.generation import Report, Speculate
from splitup_gateway.image_towers import TOWER_STEPS, ImageTower, RequestImages
from splitup_gateway.metrics import list_readings
from splitup_gateway.names import AnswerNames
from splitup_gateway.preparing import Prepared, count_prompt, prepare
from splitup_gateway.quotes import Quotes
from splitup_gateway.split.server import SplitServer
from splitup_gateway.split.sessions import SessionOptions
from splitup_gateway.stream_files import read_server_name
from splitup_gateway.stream_routes import StreamRoutes, limit_write
from splitup_gateway.streams import RESTARTED, Stream
from splitup_gateway.timelines import Timelines

_log = logging.getLogger("splitup.serve")

MAX_BODY_BYTES: Final = 8 * 2**20  # a photo of a phone in base64
MESSAGES: Final = "/v1/messages"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Reply = Callable[["_Asking", object], Awaitable[None]]  # to a body, into a stream


@dataclass(slots=True)
class _Asking:
    """Who asks, by which headers, and where the answer goes."""

    headers: Mapping[str, str]
    key: ApiKey | None
    stream: Stream
    charge: Charge | None = None  # of an answer that another server has begun
    names: AnswerNames = field(init=False)

    def __post_init__(self) -> None:
        self.names = AnswerNames(self.stream.id, self.stream.created)

    @property
    def principal(self) -> str:
        """Whose caches and leases it uses."""
        return get_principal(self.key)


@dataclass(slots=True)
class ServedModel:
    """A model that reads texts, its leases, and what its texts draft with if they are to.

    ``tower`` makes rows of images.
    """

    model: TextModel | EncoderModel
    pool: LeasePool
    speculate: Speculate | None = None
    tower: ImageTower | None = None

    def compute_price(self, prepared: Prepared) -> int:
        """Return the most that texts may cost, in micro-USDC."""
        model = self.get_text_model()
        price = model.manifest.cost_micro_usdc(prepared.count_steps(model))
        if prepared.images and self.tower is not None:
            price += self.tower.manifest.cost_micro_usdc(prepared.images)
        return price

    def get_text_model(self) -> TextModel:
        """Return the model; raise ApiError for one that writes no text."""
        if isinstance(self.model, TextModel):
            return self.model
        right = "/v1/rerank" if self.model.is_ranker else "/v1/embeddings"
        raise ApiError(
            f"the model '{self.model.name}' writes no text; ask it by POST {right}", param="model"
        )

    def get_encoder(self) -> EncoderModel:
        """Return the model; raise ApiError for one that writes text."""
        if isinstance(self.model, EncoderModel):
            return self.model
        raise ApiError(
            f"the model '{self.model.name}' writes text, and gives neither embeddings nor ranks; "
            "GET /v1/models shows each model's kind",
            param="model",
        )


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
        self._timelines = timelines
        self._options = options
        self._access = access
        self._streams = StreamRoutes(access, streams)
        if streams is not None:
            access.charges.server = read_server_name(streams)
        self._settling: asyncio.Task[None] | None = None
        self._quotes = Quotes()
        self._models: dict[str, ServedModel] = {}
        self._towers: dict[str, ImageTower] = {}  # by id
        self._reader = ImageReader()
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
            return
        model = await self._fetch(name)
        speculate = None
        if draft is not None:
            speculate = partial(self._net.speculate, name, draft or None)
            await speculate()  # which loads the draft model
        pool = LeasePool(self._net, name, self._options, self._timelines.keep)
        pool.open()
        tower = await self._add_tower(model) if isinstance(model, TextModel) else None
        self._models[name] = ServedModel(model, pool, speculate, tower)

    async def _add_tower(self, model: TextModel) -> ImageTower | None:
        """Return what makes rows of a model's images, None for a model that takes none."""
        if (info := model.info.images) is None:
            return None
        if info.tower not in self._towers:
            manifest, port = await self._net.fetch_tower(model.name)
            options = replace(self._options, warm=0, steps=TOWER_STEPS)
            pool = LeasePool(self._net, info.tower, options, self._timelines.keep)
            pool.open()
            self._towers[info.tower] = ImageTower(manifest, port, pool, self._reader)
        return self._towers[info.tower]

    async def _fetch(self, name: str) -> TextModel | EncoderModel:
        found = await self._net.fetch_model(name)
        if found.manifest.is_encoder:
            return await self._net.fetch_encoder_model(name)
        return await self._net.fetch_text_model(name)

    async def close(self) -> None:
        """End all leases; they are paid for what they ran."""
        await self._streams.streams.close()
        if self._settling is not None:
            self._settling.cancel()
        pools = [each.pool for each in self._models.values()]
        pools += [each.pool for each in self._towers.values()]
        await asyncio.gather(*(pool.close() for pool in pools))
        self._reader.close()
        if self._split is not None:
            await self._split.close()

    def list_readings(self) -> Iterator[Reading]:
        """Yield the figures that Prometheus reads."""
        return list_readings(self._pools)

    @property
    def private_models(self) -> tuple[str, ...]:
        """AnswerNames of the models that are served to devices."""
        return () if self._split is None else tuple(self._split.pools)

    @property
    def _pools(self) -> dict[str, LeasePool]:
        pools = {name: served.pool for name, served in self._models.items()}
        pools |= {name: tower.pool for name, tower in self._towers.items()}
        return pools if self._split is None else pools | self._split.pools

    def make_app(self) -> web.Application:
        """Return the application to serve."""
        app = make_app(max_body_bytes=MAX_BODY_BYTES, errors=_answer_errors)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model}", self._get_model)
        for path, reply in self._list_replies().items():
            app.router.add_post(path, self._serve(reply))
        app.router.add_post(f"{MESSAGES}/count_tokens", self._count_tokens)
        app.router.add_post("/v1/quote", self._quote)
        app.router.add_get(f"{RECEIPTS}/{{execution}}", self._get_receipt)
        app.router.add_get("/api/tags", self._ollama_tags)
        app.router.add_post("/api/show", self._ollama_show)
        app.router.add_get("/api/version", self._ollama_version)
        app.router.add_get("/health", self._health)
        self._streams.add_to(app)
        if self._split is not None:
            self._split.add_to(app)
        return app

    def _list_replies(self) -> dict[str, _Reply]:
        """Return what answers by streams, by path."""
        return {
            "/v1/completions": partial(self._write, CompletionRequest),
            "/v1/chat/completions": partial(self._write, ChatRequest),
            "/v1/responses": partial(self._write, ResponseRequest),
            MESSAGES: self._write_message,
            "/v1/embeddings": partial(self._encode, EmbeddingRequest),
            "/v1/rerank": partial(self._encode, RerankRequest),
            "/api/generate": self._ollama_generate,
            "/api/chat": self._ollama_chat,
        }

    async def resume(self) -> None:
        """Go on with the streams that the server left which had this address before."""
        replies, keys = self._list_replies(), await self._access.list_keys()
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
                if asked is None or asked.path not in replies:
                    raise RESTARTED
                await replies[asked.path](_Asking({}, key, stream, charge), _parse(asked.body))

        self._streams.streams.resume(work)

    def settle(self) -> None:
        """Begin to charge keys what the requests cost that such a server has left."""
        settling = self._access.charges.settle_left(self._net)
        self._settling = asyncio.create_task(settling, name="charges that were left")

    # ---- models --------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _list_models(self, request: web.Request) -> web.Response:
        names = await self._list(request)
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
        data = [self._describe(name) for name in names]
        return web.json_response({"object": "list", "data": data, "has_more": False, **ends})

    async def _list(self, request: web.Request) -> list[str]:
        """Return the models that a request may use."""
        key = await self._authorise(request)
        return [name for name in self._models if key is None or key.allows(name)]

    async def _get_model(self, request: web.Request) -> web.Response:
        key = await self._authorise(request)
        served = await self._find(request.match_info["model"], key)
        return web.json_response(self._describe(served.model.name))

    async def _authorise(self, request: web.Request) -> ApiKey | None:
        return await self._access.let_in(request)

    def _describe(self, name: str) -> dict[str, object]:
        served = self._models[name]
        model = served.model
        return {
            "id": name,
            **{"object": "model", "created": 0, "owned_by": "splitup"},  # as OpenAI has it
            **{"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"},
            "kind": model.manifest.kind,
            "context_length": model.info.context,
            "price_nano_usdc_per_step": model.manifest.price_nano_usdc,
            "takes_images": served.tower is not None,
            "takes_turns": isinstance(model, TextModel) and model.info.takes_turns,
        }

    async def _find(self, name: str, key: ApiKey | None) -> ServedModel:
        served = self._models.get(name)
        if served is None or (key is not None and not key.allows(name)):
            raise ApiError(
                f"the model '{name:.100}' is not served here; GET /v1/models lists those that are",
                status=404,
                param="model",
                code="model_not_found",
            )
        if not served.model.tokenizer.is_running:  # a prompt has ended its process
            served.model = await self._fetch(name)
        return served

    # ---- texts ---------------------------------------------------------------------------------

    def _serve(self, reply: _Reply) -> _Handler:
        """Return the handler of a route whose answers are streams, whoever is connected."""

        async def handle(request: web.Request) -> web.StreamResponse:
            key = await self._authorise(request)
            body = await self._access.read_body(request, key)
            headers = request.headers.copy()

            async def work(stream: Stream) -> None:
                await reply(_Asking(headers, key, stream), _parse(body))

            owner = "" if key is None else key.name
            return await self._streams.answer(request, owner, body, work)

        return handle

    async def _write(self, kind: type[Sampling], asking: _Asking, body: object) -> None:
        asked = parse_request(kind, body)
        served = await self._find(asked.model, asking.key)
        form = _make_form(served.get_text_model(), asked, asking.names)
        await self._answer(asking, served, asked, form)

    async def _write_message(self, asking: _Asking, body: object) -> None:
        wanted = parse_request(MessagesRequest, body)
        asked = wanted.convert()
        served = await self._find(asked.model, asking.key)
        form = MessagesForm(served.get_text_model(), wanted, asking.names)
        await self._answer(asking, served, asked, form)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        key = await self._authorise(request)
        asked = parse_request(CountRequest, await self._read_json(request, key)).convert()
        model = (await self._find(asked.model, key)).get_text_model()
        return web.json_response(
            {"input_tokens": await count_prompt(model, asked, get_principal(key))}
        )

    # ---- embeddings and ranks ------------------------------------------------------------------

    async def _encode(self, kind: type[EncodingRequest], asking: _Asking, body: object) -> None:
        asked = parse_request(kind, body)
        served = await self._find(asked.model, asking.key)
        model = served.get_encoder()
        prepared = await prepare_texts(model, asked, asking.principal)
        report = prepared.make_report()
        most = model.manifest.cost_micro_usdc(prepared.steps)
        limit = self._quotes.check(asking.headers, model.name, most)
        caller = asking.stream.caller
        async with self._access.charges.open(asking.key, most, limit, caller) as charge:
            try:
                rows = await encode(served.pool, model, prepared, report, charge)
            finally:
                charge.used = report.cost_micro_usdc
        headers = make_headers([report]) | {"x-splitup-cost": str(charge.used)}
        await answer(asking.stream, make_answer(model, asked, rows, report), headers)

    async def _read_json(self, request: web.Request, key: ApiKey | None) -> object:
        return _parse(await self._access.read_body(request, key))

    # ---- Ollama's API --------------------------------------------------------------------------

    async def _ollama_generate(self, asking: _Asking, body: object) -> None:
        wanted = parse_request(GenerateRequest, body)
        served = await self._find(wanted.model.removesuffix(":latest"), asking.key)
        model = served.get_text_model()
        asked = wanted.convert(has_template=model.info.chat is not None)
        await self._answer(asking, served, asked, OllamaForm(model, False))

    async def _ollama_chat(self, asking: _Asking, body: object) -> None:
        asked = parse_request(OllamaChatRequest, body).convert()
        served = await self._find(asked.model, asking.key)
        await self._answer(asking, served, asked, OllamaForm(served.get_text_model(), True))

    async def _ollama_tags(self, request: web.Request) -> web.Response:
        found = [self._models[name].model for name in await self._list(request)]
        models = [describe_model(model) for model in found if isinstance(model, TextModel)]
        return web.json_response({"models": models})

    async def _ollama_show(self, request: web.Request) -> web.Response:
        key = await self._authorise(request)
        wanted = parse_request(ShowRequest, await self._read_json(request, key))
        served = await self._find(wanted.name.removesuffix(":latest"), key)
        return web.json_response(show_model(served.get_text_model()))

    async def _ollama_version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    # ---- prices and receipts -------------------------------------------------------------------

    async def _quote(self, request: web.Request) -> web.Response:
        """Answer what a request of any kind may cost."""
        key = await self._authorise(request)
        body = await self._read_json(request, key)
        fields = body if isinstance(body, dict) else {}
        named = self._models.get(str(fields.get("model")))
        if named is not None and isinstance(named.model, EncoderModel):
            is_rank = "documents" in fields
            which: type[EncodingRequest] = RerankRequest if is_rank else EmbeddingRequest
            wanted = parse_request(which, body)
            encoder = (await self._find(wanted.model, key)).get_encoder()
            inputs = await prepare_texts(encoder, wanted, get_principal(key))
            tokens, most_tokens, steps = inputs.count_tokens(), 0, inputs.steps
            most = encoder.manifest.cost_micro_usdc(steps)
        else:
            kind: type[Sampling] = ChatRequest if "messages" in fields else CompletionRequest
            asked = parse_request(ResponseRequest if "input" in fields else kind, body)
            served = await self._find(asked.model, key)
            model = served.get_text_model()
            prepared = await prepare(model, asked, get_principal(key))
            tokens = sum(map(len, {text.prompt for text in prepared.texts}))
            most_tokens = sum(text.max_tokens for text in prepared.texts)
            steps, most = prepared.count_steps(model), served.compute_price(prepared)
        name = self._models[fields["model"]].model.name
        quote, until = self._quotes.make(name, most)
        answer = {
            "id": quote,
            "object": "quote",
            "model": name,
            "prompt_tokens": tokens,
            "max_tokens": most_tokens,
            "max_steps": steps,
            "max_cost_micro_usdc": most,
            "expires_at": until,
        }
        return web.json_response(answer)

    async def _get_receipt(self, request: web.Request) -> web.Response:
        """Answer how an execution of this server was closed; "open" while it is not."""
        principal = get_principal(await self._authorise(request))
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

    async def _answer(
        self, asking: _Asking, served: ServedModel, asked: Sampling, form: AnswerForm
    ) -> None:
        model, stream = served.get_text_model(), asking.stream
        if asked.seed is None:  # of this stream, also for the server that goes on with it
            asked = asked.model_copy(update={"seed": asking.names.make_seed()})
        prepared = await prepare(model, asked, asking.principal)
        choices = [
            AnswerChoice(
                index,
                Report(text.prompt),
                None if prepared.toolbox is None else CallParser(prepared.toolbox, asking.names),
            )
            for index, text in enumerate(prepared.texts)
        ]
        async with contextlib.AsyncExitStack() as stack:
            if asking.charge is None:
                charge = await stack.enter_async_context(
                    self._charge(asking, served, prepared, is_streamed=bool(asked.stream))
                )
            else:
                charge = asking.charge
                prepared = _go_on(stream, form, model, prepared, choices)
                more = charge.used + served.compute_price(prepared) - charge.most
                if more > 0 and not await charge.cover(more):
                    raise RESTARTED
            images = None if served.tower is None else RequestImages(served.tower, charge)
            left = [choice for choice in choices if not choice.is_ended]
            pieces = generate_all(
                *(served.pool, served.speculate, model, prepared.texts, left), charge, images
            )
            try:
                async with contextlib.aclosing(pieces):
                    if asked.stream:
                        await write_events(stream, form, choices, pieces, charge)
                    else:
                        await write_whole(stream, form, choices, pieces)
            finally:
                charge.used = sum(choice.report.total_micro_usdc for choice in choices)

    def _charge(
        self, asking: _Asking, served: ServedModel, prepared: Prepared, *, is_streamed: bool
    ) -> contextlib.AbstractAsyncContextManager[Charge]:
        """Return what charges the key for new texts; raise what refuses them."""
        most = served.compute_price(prepared)
        limit = self._quotes.check(asking.headers, served.model.name, most)
        caller = asking.stream.caller
        if is_streamed:
            caller.patience_s = None  # signs of life keep the client there
        served.pool.check(asking.principal, caller)
        return self._access.charges.open(asking.key, most, limit, caller, name=asking.stream.id)


def _go_on(
    stream: Stream,
    form: AnswerForm,
    model: TextModel,
    prepared: Prepared,
    choices: Sequence[AnswerChoice],
) -> Prepared:
    """Tell an answer as far as another server has; return the texts that are left of it.

    Raises ApiError for one that cannot be begun in the middle.
    """
    if model.info.diffusion is not None:
        raise RESTARTED  # blocks of tokens are written in any order
    replay(stream, form, choices)
    texts = [
        replace(text, told=tuple(piece.token.id for piece in choice.pieces))
        for text, choice in zip(prepared.texts, choices, strict=True)
        if not choice.is_ended
    ]
    return replace(prepared, texts=tuple(texts))


def _parse(body: bytes) -> object:
    try:
        return parse_json(body)
    except ValueError:
        raise ApiError("the request's body is not JSON") from None


def _make_form(model: TextModel, asked: Sampling, names: AnswerNames) -> AnswerForm:
    if isinstance(asked, ResponseRequest):
        return ResponseForm(model, asked, names)
    assert isinstance(asked, ChatRequest | CompletionRequest)
    is_chat = isinstance(asked, ChatRequest)
    return CompletionForm(model, is_chat=is_chat, wants_usage=asked.wants_usage, names=names)


# ---- errors ------------------------------------------------------------------------------------


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
        if not response.prepared:  # it is sent here, so that the time for it is limited
            async with limit_write():
                await response.prepare(request)
                await response.write_eof()
        return response
    except SplitUpError as error:
        return _reply_error(request, translate(error))
    except web.HTTPException as error:
        reason = f"{request.method} {request.path:.200}: {error.reason}"
        return _reply_error(request, ApiError(reason, status=error.status))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
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
