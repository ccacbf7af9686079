"""Answers of POST /v1/messages, as an object and as a stream of events, and its errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from splitup.client.text.generation import TextModel
from splitup_gateway.apis.answers import AnswerChoice, AnswerForm, Event, make_cost
from splitup_gateway.apis.messages import MessagesRequest
from splitup_gateway.apis.thoughts import Thought
from splitup_gateway.apis.tools import AnswerPart, ToolCall
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Piece, Report
from splitup_gateway.names import AnswerNames

_SIGNATURE: Final = ""  # of a thought: nobody checks one here, and clients send it back
_ERRORS: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesForm(AnswerForm):
    """The answer to one request; it has one choice."""

    def __init__(self, model: TextModel, asked: MessagesRequest, names: AnswerNames) -> None:
        self._model = model
        self._asked = asked
        self._id = names.make_id("msg_")
        self._block = 0  # the number of the next or open one
        self._open: type[str | Thought] | None = None  # what the open block is of

    def tell(self, choice: AnswerChoice, note: str) -> bytes:
        return self.encode({"type": "ping"}, note)

    def describe_error(self, error: ApiError, choices: Sequence[AnswerChoice]) -> Event:
        return describe_error(error)

    def make_answer(self, choices: Sequence[AnswerChoice]) -> Event:
        [choice] = choices
        return {
            **self._describe(),
            "content": [_make_block(part) for part in choice.parts],
            **self._make_reason(choice),
            "usage": _make_usage(choice.report),
        }

    def begin(self, choice: AnswerChoice) -> list[Event]:
        usage = {**_count_tokens(choice.report), "output_tokens": 0}
        message = {**self._describe(), "content": [], "stop_reason": None, "stop_sequence": None}
        return [
            {"type": "message_start", "message": {**message, "usage": usage}},
            {"type": "ping"},
        ]

    def add(self, choice: AnswerChoice, piece: Piece, parts: Sequence[AnswerPart]) -> list[Event]:
        return [event for part in parts for event in self._add_part(part)]

    def end(self, choice: AnswerChoice, parts: Sequence[AnswerPart]) -> list[Event]:
        return [event for part in parts for event in self._add_part(part)] + self._end_block()

    def finish(self, choices: Sequence[AnswerChoice]) -> list[Event]:
        """Return why the answer ended, and what it took."""
        [choice] = choices
        usage, reason = _make_usage(choice.report), self._make_reason(choice)
        return [
            {"type": "message_delta", "delta": reason, "usage": usage},
            {"type": "message_stop"},
        ]

    def _add_part(self, part: AnswerPart) -> list[Event]:
        if isinstance(part, ToolCall):
            begun = {**_make_block(part), "input": {}}
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            ended = self._end_block()
            return [*ended, self._start(begun), self._make("delta", delta=delta), self._stop()]
        events = []
        if self._open is not type(part):
            events = [*self._end_block(), self._start(_make_block(type(part)("")))]
            self._open = type(part)
        if isinstance(part, Thought):
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            delta = {"type": "text_delta", "text": part}
        return [*events, self._make("delta", delta=delta)]

    def _end_block(self) -> list[Event]:
        ended, self._open = self._open, None
        if ended is None:
            return []
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        signed = [self._make("delta", delta=signature)] if ended is Thought else []
        return [*signed, self._stop()]

    def _start(self, block: Event) -> Event:
        return self._make("start", content_block=block)

    def _stop(self) -> Event:
        event = self._make("stop")
        self._block += 1
        return event

    def _make(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": self._block, **fields}

    def _describe(self) -> Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
        }

    def _make_reason(self, choice: AnswerChoice) -> Event:
        report = choice.report
        reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
        reason = reasons[choice.finish_reason]
        if report.stop is not None and reason == "end_turn":
            reason = "stop_sequence"
        if reason == "max_tokens" and report.completion_tokens < self._asked.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": report.stop}


def _make_block(part: AnswerPart) -> Event:
    if isinstance(part, ToolCall):
        arguments = json.loads(part.arguments)
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
    return {"type": "text", "text": part}


def _make_usage(report: Report) -> Event:
    return {**_count_tokens(report), "splitup": make_cost([report])}


def _count_tokens(report: Report) -> Event:
    """Return the tokens of an answer; those of the prompt that were cached count apart."""
    return {
        "input_tokens": len(report.prompt) - report.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": report.cached_tokens,
        "output_tokens": report.completion_tokens,
        "output_tokens_details": {"thinking_tokens": report.reasoning_tokens},
    }


def describe_error(error: ApiError) -> Event:
    """Return an error as clients of this API read it; a field at fault is named in its message."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
