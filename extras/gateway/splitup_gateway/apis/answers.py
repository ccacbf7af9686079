"""Answers of the OpenAI API: whole objects, and the chunks of a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from splitup.client.text.generation import TextModel
from splitup_gateway.apis.thoughts import Thought, ThoughtParser
from splitup_gateway.apis.tools import AnswerPart, CallParser, ToolCall
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Piece, Report
from splitup_gateway.names import AnswerNames

RECEIPTS: Final = "/v1/receipts"
Event = dict[str, Any]


@dataclass(slots=True)
class AnswerChoice:
    """One text of an answer, as it grows."""

    index: int
    report: Report
    parser: CallParser | None = None  # None: the answer is text, whatever it looks like
    thoughts: ThoughtParser | None = None  # None: nor does the model think
    pieces: list[Piece] = field(default_factory=list)
    # no text follows a text, no thought a thought
    parts: list[AnswerPart] = field(default_factory=list)
    length: int = 0  # of all tokens' texts, in characters
    is_ended: bool = False

    def append(self, piece: Piece) -> list[AnswerPart]:
        """Add the next token; return what it adds to the answer for certain."""
        self.pieces.append(piece)
        text = piece.token.text
        self.length += len(text)
        return self._take(
            [text] if self.thoughts is None else self.thoughts.push(piece.token.id, text)
        )

    def finish(self) -> list[AnswerPart]:
        """Return what was held back, when no token follows."""
        self.is_ended = True
        return self._take([] if self.thoughts is None else self.thoughts.finish())

    def _take(self, parts: Iterable[str | Thought]) -> list[AnswerPart]:
        found: list[AnswerPart] = []
        for part in parts:
            if self.parser is None or isinstance(part, Thought):
                found.append(part)
            else:
                found += self.parser.push(part)
        if self.is_ended and self.parser is not None:
            found += self.parser.finish()
        if self.thoughts is not None:
            self.report.reasoning_tokens = self.thoughts.tokens
        for made in found:
            match (self.parts[-1] if self.parts else None), made:
                case str(before), str():
                    self.parts[-1] = before + made
                case Thought(before), Thought(more):
                    self.parts[-1] = Thought(before + more)
                case _:
                    self.parts.append(made)
        return found

    def describe_progress(self) -> str:
        """Return how far it is, for those who wait."""
        if self.pieces:
            return f"{len(self.pieces)} tokens written"
        return self.report.describe_progress()

    @property
    def text(self) -> str:
        """The text so far, without thoughts and calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def thought(self) -> str:
        """What the model thought so far."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def finish_reason(self) -> str:
        """Why the answer ended."""
        is_called = self.calls and self.report.finish_reason == "stop"
        return "tool_calls" if is_called else self.report.finish_reason


class AnswerForm(ABC):
    """The form of one answer: as an object, or as the events of a stream."""

    content_type = "text/event-stream"
    end_of_stream = b""

    def encode(self, event: Event, note: str = "") -> bytes:
        """Return one event; one that has a type is named by it, and a note is a comment."""
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        name = f"event: {event['type']}\n" if "type" in event else ""
        comment = f": {note}\n" if note else ""
        return f"{name}data: {text}\n{comment}\n".encode()

    @abstractmethod
    def tell(self, choice: AnswerChoice, note: str) -> bytes:
        """Return a sign of life that adds nothing to an answer; ``note`` says how far it is."""

    @abstractmethod
    def describe_error(self, error: ApiError, choices: Sequence[AnswerChoice]) -> Event:
        """Return the event of an error that ends a stream early."""

    @abstractmethod
    def make_answer(self, choices: Sequence[AnswerChoice]) -> Event:
        """Return the whole answer."""

    def begin(self, choice: AnswerChoice) -> list[Event]:
        """Return the events that begin a choice."""
        return []

    @abstractmethod
    def add(self, choice: AnswerChoice, piece: Piece, parts: Sequence[AnswerPart]) -> list[Event]:
        """Return the events of a choice's next token, which added these parts to it."""

    @abstractmethod
    def end(self, choice: AnswerChoice, parts: Sequence[AnswerPart]) -> list[Event]:
        """Return the events that end a choice, whose last parts these are."""

    def finish(self, choices: Sequence[AnswerChoice]) -> list[Event]:
        """Return the events that end the answer."""
        return []


class CompletionForm(AnswerForm):
    """The answer of /v1/completions, or with ``is_chat`` of /v1/chat/completions."""

    end_of_stream = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: TextModel,
        *,
        is_chat: bool,
        wants_usage: bool,
        names: AnswerNames,
    ) -> None:
        self._is_chat = is_chat
        self._wants_usage = wants_usage
        self._model = model
        self._id = names.make_id("chatcmpl-" if is_chat else "cmpl-")
        self._created = names.created

    def _make(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def make_answer(self, choices: Sequence[AnswerChoice]) -> Event:
        entries = []
        for choice in choices:
            entry: dict[str, Any] = {
                "index": choice.index,
                "finish_reason": choice.finish_reason,
                "logprobs": self._describe(choice.pieces, 0),
            }
            if self._is_chat:
                entry["message"] = _make_message(choice)
            else:
                entry["text"] = choice.text
            entries.append(entry)
        answer = self._make(entries, is_chunk=False)
        answer["usage"] = make_usage([choice.report for choice in choices])
        return answer

    def begin(self, choice: AnswerChoice) -> list[Event]:
        """Return the events that begin a choice; completions have none."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._make_chunk(choice, delta=delta)]

    def add(self, choice: AnswerChoice, piece: Piece, parts: Sequence[AnswerPart]) -> list[Event]:
        logprobs = self._describe([piece], choice.length - len(piece.token.text))
        events = [self._make_delta(choice, part) for part in parts]
        if logprobs is not None:
            events = events or [self._make_delta(choice, "")]
            events[0]["choices"][0]["logprobs"] = logprobs
        return events

    def _make_delta(self, choice: AnswerChoice, part: AnswerPart) -> Event:
        content: dict[str, Any] = {"text": part}
        if isinstance(part, ToolCall):
            place = choice.calls.index(part)
            content = {"delta": {"tool_calls": [{"index": place, **_describe_call(part)}]}}
        elif isinstance(part, Thought):
            content = {"delta": {"reasoning_content": part.text}}
        elif self._is_chat:
            content = {"delta": {"content": part}}
        return self._make_chunk(choice, **content)

    def _make_chunk(self, choice: AnswerChoice, reason: str | None = None, **content: Any) -> Event:
        """Return a chunk of one choice: by default one that adds nothing to it."""
        content = content or ({"delta": {}} if self._is_chat else {"text": ""})
        entry = {"index": choice.index, **content, "logprobs": None, "finish_reason": reason}
        return self._make([entry], is_chunk=True)

    def end(self, choice: AnswerChoice, parts: Sequence[AnswerPart]) -> list[Event]:
        """Return the events that say why a choice ended, after its last parts."""
        rest = [self._make_delta(choice, part) for part in parts]
        return [*rest, self._make_chunk(choice, choice.finish_reason)]

    def finish(self, choices: Sequence[AnswerChoice]) -> list[Event]:
        """Return the events that end the answer: its usage, if that was asked for."""
        if not self._wants_usage:
            return []
        chunk = self._make([], is_chunk=True)
        chunk["usage"] = make_usage([choice.report for choice in choices])
        return [chunk]

    def tell(self, choice: AnswerChoice, note: str) -> bytes:
        """Return a comment, as a part of the next event: alone, clients would take it for one."""
        return f": {note}\n".encode()

    def describe_error(self, error: ApiError, choices: Sequence[AnswerChoice]) -> Event:
        """Return the chunk that ends a stream early: no choice has the reason "stop"."""
        cut = [self._make_chunk(one, "error")["choices"] for one in choices if not one.is_ended]
        chunk = self._make([entry for entries in cut for entry in entries], is_chunk=True)
        return {**chunk, **error.describe(), "usage": make_usage([one.report for one in choices])}

    def _describe(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any] | None:
        if not pieces or pieces[0].choice is None:
            return None
        found = list_logprobs(pieces)
        if self._is_chat:
            return {"content": found, "refusal": None}
        lengths = [len(piece.token.text) for piece in pieces]
        return {
            "tokens": [one["token"] for one in found],
            "token_logprobs": [one["logprob"] for one in found],
            "top_logprobs": [
                {name["token"]: name["logprob"] for name in one["top_logprobs"]} for one in found
            ],
            "text_offset": list(accumulate(lengths[:-1], initial=offset)),
        }


def _make_message(choice: AnswerChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.thought:
        message["reasoning_content"] = choice.thought
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_describe_call(call) for call in choice.calls]
    return message


def _describe_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def make_usage(reports: Sequence[Report]) -> dict[str, Any]:
    """Return tokens and cost of an answer; the choices of one prompt count it once."""
    prompts = {id(report.prompt): report for report in reports}
    prompt = sum(len(report.prompt) for report in prompts.values())
    completion = sum(report.completion_tokens for report in reports)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(report.cached_tokens for report in prompts.values())
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(report.reasoning_tokens for report in reports)
        },
        "splitup": make_cost(reports),
    }


def make_cost(reports: Sequence[Report]) -> dict[str, Any]:
    """Return what texts cost, by which executions, and where their receipts will be."""
    executions = list_executions(reports)
    image_steps = sum(report.image_steps for report in reports)
    return {
        "executions": executions,
        "receipts": [f"{RECEIPTS}/{execution}" for execution in executions],
        "steps": sum(report.steps for report in reports),
        "first_step": reports[0].first_step,  # in the first of the executions
        **({"image_steps": image_steps} if image_steps else {}),
        "cost_micro_usdc": sum(report.total_micro_usdc for report in reports),
    }


def list_executions(reports: Sequence[Report]) -> list[str]:
    """Return the executions that computed texts, each once, then those of their images."""
    found = [each for report in reports for each in report.execution_ids]
    found += [each for report in reports for each in report.image_execution_ids]
    return list(dict.fromkeys(found))


def describe_token(piece: Piece, token: int, logprob: float) -> dict[str, Any]:
    """Return a token that a piece names, and its probability."""
    text = piece.names[token]
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def list_logprobs(pieces: Iterable[Piece]) -> list[Event]:
    """Return the probabilities of tokens, as far as they were asked for."""
    return [
        {
            **describe_token(piece, choice.token, choice.logprob),
            "top_logprobs": [describe_token(piece, *other) for other in choice.top],
        }
        for piece in pieces
        if (choice := piece.choice) is not None
    ]
