"""Answers of the OpenAI API: whole objects, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from splitup.client.generation import TextModel
from splitup.serve.generation import Piece, Report
from splitup.serve.requests import ApiError

Event = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One text of an answer, as it grows."""

    index: int
    report: Report
    pieces: list[Piece] = field(default_factory=list)
    length: int = 0  # of the text, in characters

    def append(self, piece: Piece) -> None:
        """Add the next token."""
        self.pieces.append(piece)
        self.length += len(piece.token.text)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(piece.token.text for piece in self.pieces)


class AnswerForm(Protocol):
    """The form of one answer: as an object, or as the events of a stream."""

    end_of_stream: bytes

    def make_answer(self, choices: Sequence[Choice]) -> Event:
        """Return the whole answer."""
        ...

    def begin(self, choice: Choice) -> list[Event]:
        """Return the events that begin a choice."""
        ...

    def add(self, choice: Choice, piece: Piece) -> list[Event]:
        """Return the events of a choice's next token, which is in ``choice.pieces`` already."""
        ...

    def end(self, choice: Choice) -> list[Event]:
        """Return the events that end a choice."""
        ...

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        """Return the events that end the answer."""
        ...


class CompletionForm:
    """The answer of /v1/completions, or with ``is_chat`` of /v1/chat/completions."""

    end_of_stream = b"data: [DONE]\n\n"

    def __init__(self, model: TextModel, *, is_chat: bool, wants_usage: bool) -> None:
        self._is_chat = is_chat
        self._wants_usage = wants_usage
        self._model = model
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def _make(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        if self._is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def make_answer(self, choices: Sequence[Choice]) -> Event:
        """Return the whole answer."""
        entries = []
        for choice in choices:
            entry: dict[str, Any] = {
                "index": choice.index,
                "finish_reason": choice.report.finish_reason,
                "logprobs": self._describe(choice.pieces, 0),
            }
            if self._is_chat:
                entry["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                entry["text"] = choice.text
            entries.append(entry)
        answer = self._make(entries, is_chunk=False)
        answer["usage"] = make_usage([choice.report for choice in choices])
        return answer

    def begin(self, choice: Choice) -> list[Event]:
        """Return the events that begin a choice; completions have none."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._make([_chunk_choice(choice.index, delta=delta)], is_chunk=True)]

    def add(self, choice: Choice, piece: Piece) -> list[Event]:
        """Return the events of a choice's next token, which is in ``choice.pieces`` already."""
        text = piece.token.text
        content = {"delta": {"content": text}} if self._is_chat else {"text": text}
        entry = _chunk_choice(choice.index, **content)
        entry["logprobs"] = self._describe([piece], choice.length - len(text))
        return [self._make([entry], is_chunk=True)]

    def end(self, choice: Choice) -> list[Event]:
        """Return the events that say why a choice ended."""
        content: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        entry = _chunk_choice(choice.index, **content)
        entry["finish_reason"] = choice.report.finish_reason
        return [self._make([entry], is_chunk=True)]

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        """Return the events that end the answer: its usage, if that was asked for."""
        if not self._wants_usage:
            return []
        chunk = self._make([], is_chunk=True)
        chunk["usage"] = make_usage([choice.report for choice in choices])
        return [chunk]

    def _describe(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any] | None:
        if not pieces or pieces[0].choice is None:
            return None
        return self._describe_chat(pieces) if self._is_chat else self._describe_text(pieces, offset)

    def _describe_chat(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        content = []
        for piece in pieces:
            assert piece.choice is not None
            entry = describe_token(piece, piece.choice.token, piece.choice.logprob)
            top = [describe_token(piece, token, value) for token, value in piece.choice.top]
            content.append({**entry, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _describe_text(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        tokens, values, top, offsets = [], [], [], []
        for piece in pieces:
            choice = piece.choice
            assert choice is not None
            names = [describe_token(piece, token, value) for token, value in choice.top]
            tokens.append(describe_token(piece, choice.token, choice.logprob)["token"])
            values.append(choice.logprob)
            top.append({name["token"]: name["logprob"] for name in names})
            offsets.append(offset)
            offset += len(piece.token.text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _chunk_choice(index: int, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": None}


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
        "splitup": make_cost(reports),
    }


def make_cost(reports: Sequence[Report]) -> dict[str, Any]:
    """Return what texts cost, and by which executions."""
    return {
        "executions": list(dict.fromkeys(report.execution_id for report in reports)),
        "steps": sum(report.steps for report in reports),
        "first_step": reports[0].first_step,  # in the first of the executions
        "cost_micro_usdc": sum(report.cost_micro_usdc for report in reports),
    }


def describe_token(piece: Piece, token: int, logprob: float) -> dict[str, Any]:
    """Return a token that a piece names, and its probability."""
    text = piece.names[token]
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def make_error(error: ApiError) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def encode_event(value: Event) -> bytes:
    """Return one server-sent event; one that has a type is named by it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {text}\n\n".encode()
