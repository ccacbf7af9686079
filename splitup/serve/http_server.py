"""The HTTP server: routes of the OpenAI API, errors in its form, texts as streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from splitup.client.generation import TextModel, encode_prompt
from splitup.client.network import Network
from splitup.core.codec import parse_json
from splitup.core.errors import ExecutionFailed, InvalidInput, Refused, SplitUpError, Throttled
from splitup.graph.manifest import ChatInfo
from splitup.net.http import read_in_time
from splitup.net.metrics import Reading, count_requests
from splitup.serve.access import Access
from splitup.serve.answers import (
    AnswerForm,
    Choice,
    CompletionForm,
    Event,
    encode_event,
    make_error,
)
from splitup.serve.api_keys import ApiKey
from splitup.serve.generation import (
    DEFAULT_CHAT_TOKENS,
    Ended,
    Piece,
    Report,
    TextOptions,
    check_room,
    count_steps,
    fill_queue,
    generate_text,
)
from splitup.serve.leases import LeaseOptions, LeasePool
from splitup.serve.metrics import list_readings
from splitup.serve.requests import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    parse_request,
)
from splitup.serve.responses import ResponseForm
from splitup.serve.timelines import Timelines

_log = logging.getLogger("splitup.serve")

MAX_BODY_BYTES: Final = 4 * 2**20
WRITE_S: Final = 30.0  # a reader that takes nothing for so long is gone
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A text model and its leases."""

    model: TextModel
    pool: LeasePool


class ApiServer:
    """Serves registered text models of one network."""

    def __init__(
        self, net: Network, options: LeaseOptions, access: Access, timelines: Timelines
    ) -> None:
        self._net = net
        self._timelines = timelines
        self._options = options
        self._access = access
        self._models: dict[str, ServedModel] = {}

    async def add_model(self, name: str) -> None:
        """Serve a model; raise InvalidInput when there is no such text model."""
        model = await self._net.fetch_text_model(name)
        pool = LeasePool(self._net, name, self._options, self._timelines.keep)
        pool.open()
        self._models[name] = ServedModel(model, pool)

    async def close(self) -> None:
        """End all leases; they are paid for what they ran."""
        await asyncio.gather(*(served.pool.close() for served in self._models.values()))

    def list_readings(self) -> Iterator[Reading]:
        """Yield the figures that Prometheus reads."""
        return list_readings({name: served.pool for name, served in self._models.items()})

    def make_app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[count_requests, _answer_errors]
        )
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model}", self._get_model)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_get("/health", self._health)
        return app

    # ---- models --------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _list_models(self, request: web.Request) -> web.Response:
        key = await self._authorise(request)
        names = [name for name in self._models if key is None or key.allows(name)]
        data = [self._describe(name) for name in names]
        return web.json_response({"object": "list", "data": data})

    async def _get_model(self, request: web.Request) -> web.Response:
        key = await self._authorise(request)
        served = self._find(request.match_info["model"], key)
        return web.json_response(self._describe(served.model.name))

    async def _authorise(self, request: web.Request) -> ApiKey | None:
        return await self._access.authorise(request.headers.get("Authorization"))

    def _describe(self, name: str) -> dict[str, object]:
        model = self._models[name].model
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "splitup",
            "context_length": model.info.context,
            "price_micro_usdc_per_step": model.manifest.price_micro_usdc(1),
        }

    def _find(self, name: str, key: ApiKey | None) -> ServedModel:
        served = self._models.get(name)
        if served is None or (key is not None and not key.allows(name)):
            raise ApiError(
                f"the model '{name:.100}' is not served here; GET /v1/models lists those that are",
                status=404,
                param="model",
                code="model_not_found",
            )
        return served

    # ---- texts ---------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        key = await self._authorise(request)
        asked = parse_request(CompletionRequest, await _read_json(request))
        served = self._find(asked.model, key)
        if len(asked.prompts) * asked.choices > MAX_CHOICES:
            raise ApiError(f"a request has at most {MAX_CHOICES} choices", param="n")
        texts = []
        for prompt in asked.prompts:
            tokens = await _encode(served.model, prompt)
            count = _check_room(served.model, tokens, asked.max_tokens, DEFAULT_COMPLETION_TOKENS)
            adjustments = asked.make_adjustments(asked.logprobs)
            for sampler in asked.make_samplers():
                texts.append(TextOptions(tokens, count, asked.stop_strings, sampler, adjustments))
        form = CompletionForm(served.model, is_chat=False, wants_usage=asked.wants_usage)
        return await self._answer(request, served, texts, form, key, stream=bool(asked.stream))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        key = await self._authorise(request)
        asked = parse_request(ChatRequest, await _read_json(request))
        served = self._find(asked.model, key)
        messages = [message.to_template() for message in asked.messages]
        tokens = await _encode_chat(served.model, messages)
        count = _check_room(served.model, tokens, asked.limit, DEFAULT_CHAT_TOKENS)
        adjustments = asked.make_adjustments(asked.recorded_logprobs)
        texts = [
            TextOptions(tokens, count, asked.stop_strings, sampler, adjustments)
            for sampler in asked.make_samplers()
        ]
        form = CompletionForm(served.model, is_chat=True, wants_usage=asked.wants_usage)
        return await self._answer(request, served, texts, form, key, stream=bool(asked.stream))

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        key = await self._authorise(request)
        asked = parse_request(ResponseRequest, await _read_json(request))
        served = self._find(asked.model, key)
        tokens = await _encode_chat(served.model, asked.list_messages())
        limit = asked.max_output_tokens
        count = _check_room(served.model, tokens, limit, DEFAULT_CHAT_TOKENS)
        adjustments = asked.make_adjustments(asked.recorded_logprobs)
        [sampler] = asked.make_samplers()
        text = TextOptions(tokens, count, (), sampler, adjustments)
        form = ResponseForm(served.model, asked)
        return await self._answer(request, served, [text], form, key, stream=bool(asked.stream))

    async def _answer(
        self,
        request: web.Request,
        served: ServedModel,
        texts: Sequence[TextOptions],
        form: AnswerForm,
        key: ApiKey | None,
        *,
        stream: bool,
    ) -> web.StreamResponse:
        choices = [Choice(index, Report(text.prompt)) for index, text in enumerate(texts)]
        steps = sum(count_steps(served.model, text) for text in texts)
        async with self._access.charge(
            key, served.model.manifest.price_micro_usdc(steps)
        ) as charge:
            pieces = _generate_all(served, texts, choices)
            try:
                async with contextlib.aclosing(pieces):
                    if stream:
                        return await _stream(request, form, choices, pieces)
                    async for choice, piece in pieces:
                        if piece is not None:
                            choice.append(piece)
            finally:
                charge.used = sum(choice.report.cost_micro_usdc for choice in choices)
        return web.json_response(form.make_answer(choices), headers=_get_headers(choices))


async def _encode(model: TextModel, prompt: str | list[int]) -> tuple[int, ...]:
    tokens = tuple(await asyncio.to_thread(encode_prompt, model.tokenizer, prompt))
    if not tokens:
        raise ApiError("the prompt has no token; give at least one", param="prompt")
    if not all(0 <= token < model.info.vocab for token in tokens):
        raise ApiError(
            f"a token of the prompt is outside the vocabulary of {model.info.vocab}", param="prompt"
        )
    return tokens


async def _encode_chat(model: TextModel, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    chat = model.info.chat
    if chat is None:
        raise ApiError(
            f"the model '{model.name}' has no chat template; use /v1/completions", param="model"
        )

    def encode(chat: ChatInfo) -> tuple[int, ...]:
        text = model.tokenizer.render_chat(chat, messages)
        return tuple(model.tokenizer.encode(text, add_special_tokens=False))

    return await asyncio.to_thread(encode, chat)


def _check_room(model: TextModel, prompt: Sequence[int], asked: int | None, default: int) -> int:
    try:
        return check_room(model, prompt, asked, default)
    except InvalidInput as error:
        raise ApiError(str(error), param="max_tokens", code="context_length_exceeded") from None


async def _generate_all(
    served: ServedModel, texts: Sequence[TextOptions], choices: Sequence[Choice]
) -> AsyncGenerator[tuple[Choice, Piece | None], None]:
    """Yield the tokens of all choices, one choice after the other; None ends a choice.

    Choices of one prompt come one after the other on one lease, so that the prompt is fed once.
    """
    for text, choice in zip(texts, choices, strict=True):
        queue: asyncio.Queue[Piece | Ended] = asyncio.Queue()
        pieces = generate_text(served.pool, served.model, text, choice.report)
        filling = asyncio.create_task(fill_queue(pieces, queue))
        try:
            while not isinstance(item := await queue.get(), Ended):
                yield choice, item
            if item.error is not None:
                raise item.error
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
        yield choice, None


async def _stream(
    request: web.Request,
    form: AnswerForm,
    choices: Sequence[Choice],
    pieces: AsyncIterator[tuple[Choice, Piece | None]],
) -> web.StreamResponse:
    """Send the answer as server-sent events; an error after the first one is an event, too."""
    response: web.StreamResponse | None = None
    begun: set[int] = set()
    try:
        async for choice, piece in pieces:
            if response is None:
                response = await _begin_stream(request, choices)
            if choice.index not in begun:
                begun.add(choice.index)
                await _send(response, form.begin(choice))
            if piece is None:
                await _send(response, form.end(choice))
            else:
                choice.append(piece)
                await _send(response, form.add(choice, piece))
    except SplitUpError as error:
        if response is None:
            raise
        await _send(response, [make_error(_translate(error))])
        await response.write_eof()
        return response
    assert response is not None, "every choice ends with an entry of its own"
    await _send(response, form.finish(choices))
    await response.write(form.end_of_stream)
    await response.write_eof()
    return response


async def _begin_stream(request: web.Request, choices: Sequence[Choice]) -> web.StreamResponse:
    response = web.StreamResponse(headers=_get_headers(choices))
    response.content_type = "text/event-stream"
    response.headers["Cache-Control"] = "no-store"
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, events: Sequence[Event]) -> None:
    """Send events; raise ConnectionError when the reader takes nothing for a while."""
    try:
        async with asyncio.timeout(WRITE_S):
            for event in events:
                await response.write(encode_event(event))
    except TimeoutError:
        raise ConnectionResetError(f"the client read nothing for {WRITE_S:g} s") from None


def _get_headers(choices: Sequence[Choice]) -> dict[str, str]:
    executions = dict.fromkeys(choice.report.execution_id for choice in choices)
    return {"x-splitup-execution": ",".join(name for name in executions if name)}


async def _read_json(request: web.Request) -> object:
    try:
        return parse_json(await read_in_time(request))
    except ValueError:
        raise ApiError("the request's body is not JSON") from None


# ---- errors ------------------------------------------------------------------------------------


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SplitUpError as error:
        return _reply_error(_translate(error))
    except web.HTTPException as error:
        reason = f"{request.method} {request.path:.200}: {error.reason}"
        return _reply_error(ApiError(reason, status=error.status))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        message = "internal error; the server's log has the details"
        return _reply_error(ApiError(message, status=500, kind="server_error"))


def _reply_error(error: ApiError) -> web.Response:
    return web.json_response(make_error(error), status=error.status, headers=error.headers)


def _translate(error: SplitUpError) -> ApiError:
    """Return an error in OpenAI's form, whose clients repeat 429 and 5xx and nothing else."""
    match error:
        case ApiError():
            return error
        case Throttled():
            wait = {"Retry-After": "2"}
            return ApiError(str(error), status=429, kind="rate_limit_error", headers=wait)
        case Refused():
            return ApiError(str(error), status=error.status)
        case InvalidInput():
            return ApiError(str(error))
        case ExecutionFailed():
            return ApiError(str(error), status=502, kind="upstream_error")
        case _:
            return ApiError(str(error), status=503, kind="service_unavailable")
