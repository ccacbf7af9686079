"""Answers of POST /v1/responses, as an object and as a stream of named events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from splitup.client.generation import TextModel
from splitup.serve.answers import Choice, Event, describe_token, make_cost
from splitup.serve.generation import Piece
from splitup.serve.requests import ResponseRequest


class ResponseForm:
    """The answer to one request; it has one choice."""

    end_of_stream = b""

    def __init__(self, model: TextModel, asked: ResponseRequest) -> None:
        self._model = model
        self._asked = asked
        self._id = f"resp_{secrets.token_hex(16)}"
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._events = 0

    def make_answer(self, choices: Sequence[Choice]) -> Event:
        """Return the whole answer."""
        [choice] = choices
        is_cut = choice.report.finish_reason == "length"
        return {
            **self._describe("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._make_item(choice)],
            "usage": _make_usage(choice),
        }

    def begin(self, choice: Choice) -> list[Event]:
        """Return the events before the first token."""
        started = {**self._describe("in_progress"), "output": [], "usage": None}
        item = {**self._make_item(choice), "status": "in_progress", "content": []}
        return [
            self._make("response.created", response=started),
            self._make("response.in_progress", response=started),
            self._make("response.output_item.added", output_index=0, item=item),
            self._make("response.content_part.added", **self._place(), part=_make_part("", [])),
        ]

    def add(self, choice: Choice, piece: Piece) -> list[Event]:
        """Return the event of one token."""
        logprobs = self._list_logprobs([piece])
        delta = piece.token.text
        return [
            self._make(
                "response.output_text.delta", **self._place(), delta=delta, logprobs=logprobs
            )
        ]

    def end(self, choice: Choice) -> list[Event]:
        """Return the events after the last token."""
        text, logprobs = choice.text, self._list_logprobs(choice.pieces)
        place, part = self._place(), _make_part(text, logprobs)
        item = self._make_item(choice)
        return [
            self._make("response.output_text.done", **place, text=text, logprobs=logprobs),
            self._make("response.content_part.done", **place, part=part),
            self._make("response.output_item.done", output_index=0, item=item),
        ]

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        """Return the event with the whole answer."""
        answer = self.make_answer(choices)
        return [self._make(f"response.{answer['status']}", response=answer)]

    def _make(self, name: str, **fields: Any) -> Event:
        self._events += 1
        return {"type": name, "sequence_number": self._events - 1, **fields}

    def _place(self) -> Event:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _describe(self, status: str) -> Event:
        asked = self._asked
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._model.name,
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
        }

    def _make_item(self, choice: Choice) -> Event:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "completed" if choice.report.finish_reason == "stop" else "incomplete",
            "content": [_make_part(choice.text, self._list_logprobs(choice.pieces))],
        }

    def _list_logprobs(self, pieces: Sequence[Piece]) -> list[Event]:
        found = []
        for piece in pieces:
            if piece.choice is not None:
                entry = describe_token(piece, piece.choice.token, piece.choice.logprob)
                top = [describe_token(piece, *other) for other in piece.choice.top]
                found.append({**entry, "top_logprobs": top})
        return found


def _make_part(text: str, logprobs: list[Event]) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _make_usage(choice: Choice) -> Event:
    report = choice.report
    return {
        "input_tokens": len(report.prompt),
        "input_tokens_details": {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": report.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(report.prompt) + report.completion_tokens,
        "splitup": make_cost([report]),
    }
