"""Embeddings in OpenAI's form, and reranking in the form of Cohere and Jina.

https://platform.openai.com/docs/api-reference/embeddings,
https://docs.cohere.com/reference/rerank, https://jina.ai/reranker.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from splitup.client.leases import LeasePool
from splitup.client.outcome import Array
from splitup.client.text.encoding import EncoderModel, TextTooLong, run_texts
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import ExecutionFailed, InvalidInput
from splitup.decode.texts import EncodedText
from splitup_gateway.apis.answers import make_cost
from splitup_gateway.apis.formats import RequestFields
from splitup_gateway.apis.requests import Texts, list_texts
from splitup_gateway.charges import Charge
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import ATTEMPTS, Report, add_to_totals

MAX_INPUTS: Final = 2_048  # of one request, as OpenAI has it


class EmbeddingRequest(RequestFields):
    """POST /v1/embeddings."""

    harmless = RequestFields.harmless | {"user"}

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None  # as in Hugging Face's servers: cut what is too long

    @property
    def inputs(self) -> list[str | list[int]]:
        """The texts, each a string or tokens; raises ApiError for none or too many."""
        return list_texts("input", self.input, MAX_INPUTS)


class Document(RequestFields):
    """A document, as some clients send it."""

    text: str


class RerankRequest(RequestFields):
    """POST /v1/rerank."""

    model: str
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The documents' texts; raises ApiError for none or too many."""
        if not 1 <= (count := len(self.documents)) <= MAX_INPUTS:
            raise ApiError(f"give 1 to {MAX_INPUTS} documents, not {count}", param="documents")
        return [one if isinstance(one, str) else one.text for one in self.documents]


EncodingRequest = EmbeddingRequest | RerankRequest


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The texts of a request in tokens, and how many steps they take."""

    texts: tuple[EncodedText, ...]
    steps: int

    def make_report(self) -> Report:
        """Return the report of a run that has not begun."""
        return Report(tuple(token for text in self.texts for token in text.tokens))


async def prepare_texts(
    model: EncoderModel, asked: EncodingRequest, principal: str = ""
) -> PreparedTexts:
    """Return the texts of a request of ``principal`` in tokens; raise ApiError for a bad field."""
    if isinstance(asked, RerankRequest) != model.is_ranker:
        right = "/v1/rerank" if model.is_ranker else "/v1/embeddings"
        raise ApiError(f"the model '{model.name}' is asked by POST {right} only", param="model")
    pairs: list[tuple[str | list[int], str | None]]
    cuts = isinstance(asked, EmbeddingRequest) and bool(asked.truncate)
    if isinstance(asked, RerankRequest):
        field = "documents"
        pairs = [(asked.query, text) for text in asked.texts]
    else:
        field = "input"
        if asked.dimensions not in (None, model.width):
            raise ApiError(
                f"vectors of the model '{model.name}' have {model.width} dimensions and cannot be "
                "shortened",
                param="dimensions",
            )
        pairs = [(text, None) for text in asked.inputs]

    def encode(text: str | list[int], pair: str | None, tokenizer: ModelTokenizer) -> EncodedText:
        return replace(model, tokenizer=tokenizer).encode(text, pair, cuts=cuts)

    texts = []
    for place, (text, other) in enumerate(pairs):
        length = (len(text) if isinstance(text, str) else 0) + len(other or "")
        try:
            read = model.tokenizer.read(length, partial(encode, text, other), principal)
            texts.append(await read)
        except InvalidInput as error:
            is_long = isinstance(error, TextTooLong)
            is_query = isinstance(asked, RerankRequest) and not is_long
            param = "query" if is_query else f"{field}.{place}"
            code = "context_length_exceeded" if is_long else None
            raise ApiError(f"'{param}': {error}", param=param, code=code) from None
    return PreparedTexts(tuple(texts), len(model.pack(texts)))


async def encode(
    pool: LeasePool,
    model: EncoderModel,
    prepared: PreparedTexts,
    report: Report,
    charge: Charge,
) -> Array:
    """Return what the model says of each text [texts, width], and fill in ``report``.

    A lease that fails is replaced once, if ``charge`` covers what it ran. Raises Throttled,
    ExecutionFailed and what opening a lease raises.
    """
    try:
        for attempt in range(1, ATTEMPTS + 1):
            async with charge.borrow(pool, (), prepared.steps) as lease:
                before, cost = lease.session.steps, report.cost_micro_usdc
                report.begin(lease.session)
                try:
                    try:
                        return await run_texts(lease.session, model, prepared.texts)
                    finally:
                        report.add_steps(lease.session.steps - before, model.manifest)
                except ExecutionFailed:
                    lost = report.cost_micro_usdc - cost
                    if attempt == ATTEMPTS or not await charge.cover(lost):
                        raise
        raise AssertionError("the last attempt returns or raises")
    finally:
        add_to_totals(pool.totals, report)


async def write_answer(
    model: EncoderModel, asked: EncodingRequest, rows: Array, report: Report
) -> bytes:
    """Return the answer to a request; ``rows`` [texts, width] is what the model says of each.

    One of 2,048 vectors takes seconds to write, in which the server does other things, too.
    """
    if isinstance(asked, RerankRequest):
        return json.dumps(_make_rerank_answer(model, asked, rows, report)).encode()
    data = []
    for index, vector in enumerate(rows):
        entry = {"object": "embedding", "index": index, "embedding": _describe(asked, vector)}
        data.append(json.dumps(entry))
        await asyncio.sleep(0)
    rest = json.dumps({"model": model.name, "usage": _make_usage(report)})
    return f'{{"object": "list", "data": [{", ".join(data)}], {rest[1:]}'.encode()


def _describe(asked: EmbeddingRequest, vector: Array) -> str | list[float]:
    """Return a vector as it was asked for; base64 is of float32, little-endian."""
    if asked.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


def _make_rerank_answer(
    model: EncoderModel, asked: RerankRequest, scores: Array, report: Report
) -> dict[str, Any]:
    """Return the answer of /v1/rerank: the best documents first, equal ones in their order.

    ``relevance_score`` is the logistic function of the model's score, from 0 to 1.
    """
    texts: Sequence[str] = asked.texts
    values = [float(score) for score in scores[:, 0]]
    order = sorted(range(len(texts)), key=lambda index: -values[index])
    results = []
    for index in order[: asked.top_n]:
        score = 0.5 * (1.0 + math.tanh(0.5 * values[index]))  # without overflow
        entry: dict[str, Any] = {"index": index, "relevance_score": score}
        if asked.return_documents:
            entry["document"] = {"text": texts[index]}
        results.append(entry)
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": model.name,
        "results": results,
        "usage": _make_usage(report),
    }


def _make_usage(report: Report) -> dict[str, Any]:
    tokens = len(report.prompt)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "splitup": make_cost([report])}
