"""Answers as they are computed: the tokens of all choices in order, told as events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitup.client.leases import LeasePool
from splitup.client.text.generation import TextModel
from splitup.core import tuning
from splitup_gateway.apis.answers import RECEIPTS, AnswerChoice, AnswerForm, Event, list_executions
from splitup_gateway.charges import Charge
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import (
    GenerationOptions,
    Piece,
    PlaceImages,
    Report,
    Speculate,
    generate_text,
)
from splitup_gateway.streaming.stream import Head, Stream


async def generate_all(
    pool: LeasePool,
    speculate: Speculate | None,
    model: TextModel,
    texts: Sequence[GenerationOptions],
    choices: Sequence[AnswerChoice],
    charge: Charge,
    images: PlaceImages | None = None,
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
    body = json.dumps(form.make_answer(choices)).encode()
    await answer(stream, body, [choice.report for choice in choices])


async def answer(stream: Stream, body: bytes, reports: Sequence[Report]) -> None:
    """Give a whole answer, and what it cost."""
    cost = sum(report.total_micro_usdc for report in reports)
    headers = make_headers(reports) | {"x-splitup-cost": str(cost)}
    stream.begin(Head("application/json", headers, is_streamed=False))
    await stream.append([body])


async def write_events(
    stream: Stream,
    form: AnswerForm,
    choices: Sequence[AnswerChoice],
    pieces: AsyncIterator[tuple[AnswerChoice, Piece | None]],
    charge: Charge,
) -> None:
    """Give the answer as events, the first one soon, whenever a token comes.

    What ``replay`` has told is not told again.
    """
    if any(note["is"] == "finish" for note in stream.notes):
        return
    writer = _Writer(stream, form, choices, charge)
    if stream.head is not None:
        writer.begun.update(note["of"] for note in stream.notes if note["is"] == "begin")
        stream.head = writer.make_head(stream.head.headers)
    telling = asyncio.create_task(writer.tell_progress())
    try:
        async for choice, piece in pieces:
            await writer.begin(choice)
            if piece is None:
                await writer.write("end", choice, form.end(choice, choice.finish()))
            else:
                events = form.add(choice, piece, choice.append(piece))
                await writer.write("token", choice, events, piece)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    ends = [form.end_of_stream] if form.end_of_stream else []
    await writer.write("finish", choices[-1], [*form.finish(choices), *ends])


def replay(stream: Stream, form: AnswerForm, choices: Sequence[AnswerChoice]) -> None:
    """Bring an answer to where the server has left it that wrote the stream's file.

    Raises LookupError and ValueError for a file that is not one of these.
    """
    for choice, saved in zip(choices, stream.state.get("reports", []), strict=False):
        choice.report.restore(saved)
    for note in stream.notes:
        choice = choices[note["of"]]
        match note["is"]:
            case "begin":
                form.begin(choice)
            case "tell":
                form.tell(choice, "")
            case "token":
                piece = Piece.restore(note["piece"])
                form.add(choice, piece, choice.append(piece))
            case "end":
                form.end(choice, choice.finish())


@dataclass(slots=True)
class _Writer:
    stream: Stream
    form: AnswerForm
    choices: Sequence[AnswerChoice]
    charge: Charge
    begun: set[int] = field(default_factory=set)

    async def begin(self, choice: AnswerChoice) -> None:
        """Begin a choice, and the stream with the first one."""
        if choice.index in self.begun:
            return
        self.begun.add(choice.index)
        if self.stream.head is None:
            headers = make_headers([each.report for each in self.choices])
            headers |= {"x-splitup-max-cost": str(self.charge.most)}
            self.stream.begin(self.make_head(headers))
        await self.write("begin", choice, self.form.begin(choice))

    def make_head(self, headers: Mapping[str, str]) -> Head:
        """Return what comes before the first event."""
        return Head(self.form.content_type, headers, True, self.fail, self.describe_state)

    async def write(
        self,
        what: str,
        choice: AnswerChoice,
        events: Sequence[Event | bytes],
        piece: Piece | None = None,
    ) -> None:
        """Add events to the stream, with what ``replay`` needs of them."""
        made = [one if isinstance(one, bytes) else self.form.encode(one) for one in events]
        note = {"is": what, "of": choice.index}
        if piece is not None:
            note["piece"] = piece.save()
        await self.stream.append(made, note)

    def describe_state(self) -> dict[str, Any]:
        """Return what the answer took so far, and what it may cost by its client's word."""
        reports = [choice.report.save() for choice in self.choices]
        return {"reports": reports, "limit": self.charge.limit}

    def fail(self, error: ApiError) -> bytes:
        """Return the event of an error that ends the answer early."""
        return self.form.encode(self.form.describe_error(error, self.choices))

    async def tell_progress(self) -> None:
        """Begin when the first token does not come at once; tell how far it is while none comes."""
        await asyncio.sleep(tuning.STREAM_HEAD_S)
        await self.begin(self.choices[0])
        if not self.stream.count:
            await self._tell()
        while True:
            count = self.stream.count
            await asyncio.sleep(tuning.STREAM_QUIET_S)
            if self.stream.count == count:
                await self._tell()

    async def _tell(self) -> None:
        current = self.choices[max(self.begun)]
        await self.write("tell", current, [self.form.tell(current, current.describe_progress())])


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
