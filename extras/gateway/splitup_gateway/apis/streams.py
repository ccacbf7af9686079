"""Answers as they are computed: the tokens of all choices in order, sent as events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from aiohttp import web

from splitup.client.leases import LeasePool
from splitup.client.text.generation import TextModel
from splitup.core.errors import SplitUpError
from splitup_gateway.access import Charge
from splitup_gateway.apis.answers import RECEIPTS, AnswerForm, Choice, Event, list_executions
from splitup_gateway.errors import translate
from splitup_gateway.generation import (
    Ended,
    Piece,
    PlacesImages,
    Report,
    Speculate,
    TextOptions,
    fill_queue,
    generate_text,
)

MOST_AHEAD: Final = 1_024  # tokens of a choice that are computed and not sent yet
WRITE_S: Final = 30.0  # a reader that takes nothing for so long is gone


async def generate_all(
    pool: LeasePool,
    speculate: Speculate | None,
    model: TextModel,
    texts: Sequence[TextOptions],
    choices: Sequence[Choice],
    charge: Charge,
    images: PlacesImages | None = None,
) -> AsyncGenerator[tuple[Choice, Piece | None], None]:
    """Yield the tokens of all choices, one choice after the other; None ends a choice.

    Choices of one prompt come one after the other on one lease, so that the prompt is fed once.
    """
    for text, choice in zip(texts, choices, strict=True):
        queue: asyncio.Queue[Piece | Ended] = asyncio.Queue(MOST_AHEAD)
        pieces = generate_text(pool, model, text, choice.report, charge, speculate, images)
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


async def stream_answer(
    request: web.Request,
    form: AnswerForm,
    choices: Sequence[Choice],
    pieces: AsyncIterator[tuple[Choice, Piece | None]],
    most_micro_usdc: int,
) -> web.StreamResponse:
    """Send the answer as server-sent events; an error after the first one is an event, too."""
    response: web.StreamResponse | None = None
    begun: set[int] = set()
    try:
        async for choice, piece in pieces:
            if response is None:
                response = await _begin_stream(request, form, choices, most_micro_usdc)
            if choice.index not in begun:
                begun.add(choice.index)
                await _send(response, form, form.begin(choice))
            if piece is None:
                await _send(response, form, form.end(choice, choice.finish()))
            else:
                await _send(response, form, form.add(choice, piece, choice.append(piece)))
    except SplitUpError as error:
        if response is None:
            raise
        await _send(response, form, [form.describe_error(translate(error))])
        await response.write_eof()
        return response
    assert response is not None, "every choice ends with an entry of its own"
    await _send(response, form, form.finish(choices))
    await response.write(form.end_of_stream)
    await response.write_eof()
    return response


async def _begin_stream(
    request: web.Request, form: AnswerForm, choices: Sequence[Choice], most_micro_usdc: int
) -> web.StreamResponse:
    headers = make_headers([choice.report for choice in choices])
    headers |= {"x-splitup-max-cost": str(most_micro_usdc)}
    response = web.StreamResponse(headers=headers)
    response.content_type = form.content_type
    response.headers["Cache-Control"] = "no-store"
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, form: AnswerForm, events: Sequence[Event]) -> None:
    async with limit_write():
        for event in events:
            await response.write(form.encode(event))


@contextlib.asynccontextmanager
async def limit_write() -> AsyncGenerator[None, None]:
    """Raise ConnectionError when the reader takes nothing for ``WRITE_S``."""
    try:
        async with asyncio.timeout(WRITE_S):
            yield
    except TimeoutError:
        raise ConnectionResetError(f"the client read nothing for {WRITE_S:g} s") from None


def make_headers(reports: Sequence[Report]) -> dict[str, str]:
    """Return the headers that name the executions of an answer, and where their receipts are."""
    executions = list_executions(reports)
    receipts = [f"{RECEIPTS}/{execution}" for execution in executions]
    return {
        "x-splitup-execution": ",".join(executions),
        "x-splitup-receipt": ",".join(receipts),
    }
