"""Answers as they are computed: the tokens of all choices in order, told as events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from splitup.client.leases import LeasePool
from splitup.client.text.generation import TextModel
from splitup.core import tuning
from splitup_gateway.access import Charge
from splitup_gateway.apis.answers import RECEIPTS, AnswerChoice, AnswerForm, Event, list_executions
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import (
    GenerationOptions,
    Piece,
    PlacesImages,
    Report,
    Speculate,
    generate_text,
)
from splitup_gateway.streams import Head, Stream


async def generate_all(
    pool: LeasePool,
    speculate: Speculate | None,
    model: TextModel,
    texts: Sequence[GenerationOptions],
    choices: Sequence[AnswerChoice],
    charge: Charge,
    images: PlacesImages | None = None,
) -> AsyncGenerator[tuple[AnswerChoice, Piece | None], None]:
    """Yield the tokens of all choices, one choice after the other; None ends a choice.

    Choices of one prompt come one after the other on one lease, so that the prompt is fed once.
    """
    for text, choice in zip(texts, choices, strict=True):
        pieces = generate_text(pool, model, text, choice.report, charge, speculate, images)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield choice, piece
        yield choice, None


async def write_whole(
    stream: Stream,
    form: AnswerForm,
    choices: Sequence[AnswerChoice],
    pieces: AsyncIterator[tuple[AnswerChoice, Piece | None]],
) -> None:
    """Give the answer as one object, once it is complete."""
    async for choice, piece in pieces:
        if piece is None:
            choice.finish()
        else:
            choice.append(piece)
    reports = [choice.report for choice in choices]
    cost = sum(report.total_micro_usdc for report in reports)
    await answer(
        stream, form.make_answer(choices), make_headers(reports) | {"x-splitup-cost": str(cost)}
    )


async def answer(stream: Stream, body: object, headers: dict[str, str]) -> None:
    """Give a whole answer."""
    stream.begin(Head("application/json", headers, is_streamed=False))
    await stream.append([json.dumps(body).encode()])


async def write_events(
    stream: Stream,
    form: AnswerForm,
    choices: Sequence[AnswerChoice],
    pieces: AsyncIterator[tuple[AnswerChoice, Piece | None]],
    most_micro_usdc: int,
) -> None:
    """Give the answer as events, the first one soon, whenever a token comes."""
    writer = _Writer(stream, form, choices, most_micro_usdc)
    telling = asyncio.create_task(writer.tell_progress())
    try:
        async for choice, piece in pieces:
            await writer.begin(choice)
            if piece is None:
                await writer.write(form.end(choice, choice.finish()))
            else:
                await writer.write(form.add(choice, piece, choice.append(piece)))
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    await writer.write(form.finish(choices))
    await stream.append([form.end_of_stream] if form.end_of_stream else [])


@dataclass(slots=True)
class _Writer:
    stream: Stream
    form: AnswerForm
    choices: Sequence[AnswerChoice]
    most_micro_usdc: int
    begun: set[int] = field(default_factory=set)

    async def begin(self, choice: AnswerChoice) -> None:
        """Begin a choice, and the stream with the first one."""
        if choice.index in self.begun:
            return
        self.begun.add(choice.index)
        if self.stream.head is None:
            headers = make_headers([each.report for each in self.choices])
            headers |= {"x-splitup-max-cost": str(self.most_micro_usdc)}
            kind = self.form.content_type
            self.stream.begin(Head(kind, headers, is_streamed=True, describe_error=self.fail))
        await self.write(self.form.begin(choice))

    async def write(self, events: Sequence[Event]) -> None:
        """Add events to the stream."""
        await self.stream.append([self.form.encode(event) for event in events])

    def fail(self, error: ApiError) -> bytes:
        """Return the event of an error that ends the answer early."""
        return self.form.encode(self.form.describe_error(error, self.choices))

    async def tell_progress(self) -> None:
        """Begin when the first token does not come at once; tell how far it is while none comes."""
        await asyncio.sleep(tuning.STREAM_HEAD_S)
        await self.begin(self.choices[0])
        if not self.stream.count:
            await self.stream.append([self._describe_progress()])
        while True:
            count = self.stream.count
            await asyncio.sleep(tuning.STREAM_QUIET_S)
            if self.stream.count == count:
                await self.stream.append([self._describe_progress()])

    def _describe_progress(self) -> bytes:
        current = self.choices[max(self.begun)]
        return self.form.tell(current, current.describe_progress())


def make_headers(reports: Sequence[Report]) -> dict[str, str]:
    """Return the headers that name the executions of an answer, and where their receipts are."""
    executions = list_executions(reports)
    if not executions:  # a stream begins before it is known who computes it
        return {}
    receipts = [f"{RECEIPTS}/{execution}" for execution in executions]
    return {
        "x-splitup-execution": ",".join(executions),
        "x-splitup-receipt": ",".join(receipts),
    }
