"""Texts, embeddings and ranks: what answers a request's body, into its stream."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from splitup.client.text.generation import TextModel
from splitup.core.places import FairLock
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKey, get_principal
from splitup_gateway.apis.answers import AnswerChoice, AnswerForm, CompletionForm
from splitup_gateway.apis.encoding import (
    EmbeddingRequest,
    EncodingRequest,
    RerankRequest,
    encode,
    prepare_texts,
    write_answer,
)
from splitup_gateway.apis.formats import RequestFields
from splitup_gateway.apis.message_answers import MessagesForm
from splitup_gateway.apis.messages import MESSAGES, MessagesRequest
from splitup_gateway.apis.ollama import GenerateRequest, OllamaChatRequest, OllamaForm
from splitup_gateway.apis.requests import ChatRequest, CompletionRequest, read_request
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.apis.responses import ResponseForm
from splitup_gateway.apis.streams import answer, generate_all, replay, write_events, write_whole
from splitup_gateway.apis.thoughts import ThoughtParser
from splitup_gateway.apis.tools import CallParser
from splitup_gateway.charges import Charge
from splitup_gateway.generation import Report
from splitup_gateway.image_towers import RequestImages
from splitup_gateway.names import AnswerNames
from splitup_gateway.preparing import Prepared, prepare
from splitup_gateway.quotes import Quotes
from splitup_gateway.served_models import ServedModel, ServedModels
from splitup_gateway.streaming.kept_streams import RESTARTED
from splitup_gateway.streaming.stream import Stream

Read = Callable[[bytes], Any]  # a body
Reply = Callable[["Asking", Any], Awaitable[None]]  # to what was read, into a stream
TextRequest = (
    CompletionRequest
    | ChatRequest
    | ResponseRequest
    | MessagesRequest
    | GenerateRequest
    | OllamaChatRequest
)
PlainRequest = ChatRequest | CompletionRequest
TEXTS: Final[Mapping[str, type[TextRequest]]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    MESSAGES: MessagesRequest,
    "/api/generate": GenerateRequest,
    "/api/chat": OllamaChatRequest,
}
ENCODINGS: Final[Mapping[str, type[EncodingRequest]]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
}


def list_fields() -> dict[str, list[str]]:
    """Return the fields that each route takes."""
    kinds: Mapping[str, type[RequestFields]] = {**TEXTS, **ENCODINGS}
    return {path: sorted({*kind.model_fields, *kind.harmless}) for path, kind in kinds.items()}


@dataclass(slots=True)
class Asking:
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


class Replies:
    """Answers requests by models."""

    def __init__(self, access: Access, models: ServedModels, quotes: Quotes) -> None:
        self._access = access
        self._models = models
        self._quotes = quotes
        self._turns = FairLock()  # at writing long answers

    def list_by_path(self) -> dict[str, tuple[Read, Reply]]:
        """Return what reads and answers requests by streams, by path."""
        found: dict[str, tuple[Read, Reply]] = {}
        for path, kind in TEXTS.items():
            found[path] = partial(self._read, kind), self._write
        for path, other in ENCODINGS.items():
            found[path] = partial(read_request, other), self._encode
        return found

    def _read(self, kind: type[TextRequest], body: bytes) -> tuple[TextRequest, PlainRequest]:
        """Return a request, and the same of the API that answers it: both take time."""
        wanted = read_request(kind, body)
        model = self._models.get(wanted.model)
        has_template = isinstance(model, TextModel) and model.info.chat is not None
        return wanted, wanted.convert(has_template=has_template)

    async def _write(self, asking: Asking, read: tuple[TextRequest, PlainRequest]) -> None:
        wanted, asked = read
        served = await self._models.find(wanted.model, asking.key)
        form = _make_form(served.get_text_model(), wanted, asking.names)
        await self._answer(asking, served, asked, form)

    async def _encode(self, asking: Asking, asked: EncodingRequest) -> None:
        served = await self._models.find(asked.model, asking.key)
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
        async with self._turns.hold(asking.principal):
            body = await write_answer(model, asked, rows, report)
        await answer(asking.stream, body, [report])

    async def _answer(
        self,
        asking: Asking,
        served: ServedModel,
        asked: PlainRequest,
        form: AnswerForm,
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
                None if prepared.marks is None else ThoughtParser(prepared.marks),
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
            images = None if served.tower is None else RequestImages(served.tower, charge).place
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
        self, asking: Asking, served: ServedModel, prepared: Prepared, *, is_streamed: bool
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


def _make_form(model: TextModel, wanted: TextRequest, names: AnswerNames) -> AnswerForm:
    match wanted:
        case ResponseRequest():
            return ResponseForm(model, wanted, names)
        case MessagesRequest():
            return MessagesForm(model, wanted, names)
        case GenerateRequest() | OllamaChatRequest():
            return OllamaForm(model, is_chat=isinstance(wanted, OllamaChatRequest))
    is_chat = isinstance(wanted, ChatRequest)
    return CompletionForm(model, is_chat=is_chat, wants_usage=wanted.wants_usage, names=names)
