"""Answers of POST /v1/responses, as an object and as a stream of named events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitup.client.text.generation import TextModel
from splitup_gateway.apis.answers import AnswerChoice, Event, EventStream, describe_token, make_cost
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.apis.tools import AnswerPart, ToolCall
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Piece
from splitup_gateway.names import AnswerNames


class ResponseForm(EventStream):
    """The answer to one request; it has one choice."""

    end_of_stream = b""

    def __init__(
        self, model: TextModel, asked: ResponseRequest, names: AnswerNames | None = None
    ) -> None:
        names = names or AnswerNames()
        self._model = model
        self._asked = asked
        self._id = names.make_id("resp_")
        self._done = 0  # items of the output that have been sent as events
        self._is_in_message = False
        self._created = names.created
        self._events = 0

    def make_answer(self, choices: Sequence[AnswerChoice]) -> Event:
        """Return the whole answer."""
        [choice] = choices
        is_cut = choice.report.finish_reason == "length"
        parts = choice.parts or [""]
        return {
            **self._describe("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._make_item(choice, place) for place in range(len(parts))],
            "usage": _make_usage(choice),
        }

    def begin(self, choice: AnswerChoice) -> list[Event]:
        """Return the events before the first token."""
        started = {**self._describe("in_progress"), "output": [], "usage": None}
        return [
            self._make("response.created", response=started),
            self._make("response.in_progress", response=started),
        ]

    def tell(self, choice: AnswerChoice, note: str) -> bytes:
        """Return an event that says that it goes on."""
        response = {**self._describe("in_progress"), "output": [], "usage": None}
        return self.encode(self._make("response.in_progress", response=response), note)

    def describe_error(self, error: ApiError, choices: Sequence[AnswerChoice]) -> Event:
        """Return the event of an error that ends a stream early; earlier ones have the text."""
        [choice] = choices
        told = {"code": error.code or "server_error", "message": str(error)}
        failed = {**self._describe("failed"), "error": told, "output": []}
        response = {**failed, "usage": _make_usage(choice)}
        return {"type": "response.failed", "sequence_number": self._events, "response": response}

    def add(self, choice: AnswerChoice, piece: Piece, parts: Sequence[AnswerPart]) -> list[Event]:
        """Return the events of one token."""
        logprobs = self._list_logprobs([piece])
        events = []
        for part in parts:
            events += self._add_part(choice, part, logprobs)
            logprobs = []
        return events

    def end(self, choice: AnswerChoice, parts: Sequence[AnswerPart]) -> list[Event]:
        """Return the events after the last token."""
        events = []
        for part in parts or [""] * (not choice.parts):
            events += self._add_part(choice, part, [])
        return events + self._end_message(choice)

    def _add_part(
        self, choice: AnswerChoice, part: AnswerPart, logprobs: list[Event]
    ) -> list[Event]:
        if isinstance(part, ToolCall):
            return self._end_message(choice) + self._add_call(choice, part)
        events = []
        if not self._is_in_message:
            self._is_in_message = True
            item = {**self._make_item(choice, self._done), "status": "in_progress", "content": []}
            place = self._place()
            events = [
                self._make("response.output_item.added", output_index=self._done, item=item),
                self._make("response.content_part.added", **place, part=_make_part("", [])),
            ]
        name = "response.output_text.delta"
        return [*events, self._make(name, **self._place(), delta=part, logprobs=logprobs)]

    def _add_call(self, choice: AnswerChoice, call: ToolCall) -> list[Event]:
        place = {"item_id": self._get_item_id(self._done), "output_index": self._done}
        item = _make_call_item(self._get_item_id(self._done), call)
        begun = {**item, "status": "in_progress", "arguments": ""}
        name = "response.function_call_arguments"
        self._done += 1
        return [
            self._make(
                "response.output_item.added", output_index=place["output_index"], item=begun
            ),
            self._make(f"{name}.delta", **place, delta=call.arguments),
            self._make(f"{name}.done", **place, name=call.name, arguments=call.arguments),
            self._make("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _end_message(self, choice: AnswerChoice) -> list[Event]:
        if not self._is_in_message:
            return []
        item, place = self._make_item(choice, self._done), self._place()
        [part] = item["content"]
        text, logprobs = part["text"], part["logprobs"]
        self._is_in_message = False
        self._done += 1
        return [
            self._make("response.output_text.done", **place, text=text, logprobs=logprobs),
            self._make("response.content_part.done", **place, part=part),
            self._make("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def finish(self, choices: Sequence[AnswerChoice]) -> list[Event]:
        """Return the event with the whole answer."""
        answer = self.make_answer(choices)
        return [self._make(f"response.{answer['status']}", response=answer)]

    def _make(self, name: str, /, **fields: Any) -> Event:
        self._events += 1
        return {"type": name, "sequence_number": self._events - 1, **fields}

    def _place(self) -> Event:
        item_id = self._get_item_id(self._done)
        return {"item_id": item_id, "output_index": self._done, "content_index": 0}

    def _get_item_id(self, place: int) -> str:
        return f"item_{self._id.removeprefix('resp_')}_{place}"

    def _describe(self, status: str) -> Event:
        asked = self._asked
        choice = asked.tool_choice or "auto"
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
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": asked.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
        }

    def _make_item(self, choice: AnswerChoice, place: int) -> Event:
        part = choice.parts[place] if choice.parts else ""
        item_id = self._get_item_id(place)
        if isinstance(part, ToolCall):
            return _make_call_item(item_id, part)
        logprobs = self._list_logprobs(choice.pieces) if place == 0 else []
        return {
            "id": item_id,
            "type": "message",
            "role": "assistant",
            "status": "completed" if choice.report.finish_reason == "stop" else "incomplete",
            "content": [_make_part(part, logprobs)],
        }

    def _list_logprobs(self, pieces: Sequence[Piece]) -> list[Event]:
        found = []
        for piece in pieces:
            if piece.choice is not None:
                entry = describe_token(piece, piece.choice.token, piece.choice.logprob)
                top = [describe_token(piece, *other) for other in piece.choice.top]
                found.append({**entry, "top_logprobs": top})
        return found


def _make_call_item(item_id: str, call: ToolCall) -> Event:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _make_part(text: str, logprobs: list[Event]) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _make_usage(choice: AnswerChoice) -> Event:
    report = choice.report
    return {
        "input_tokens": len(report.prompt),
        "input_tokens_details": {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": report.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(report.prompt) + report.completion_tokens,
        "splitup": make_cost([report]),
    }
