"""Answers of POST /v1/responses, as an object and as a stream of named events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from splitup.client.text.generation import TextModel
from splitup_gateway.apis.answers import AnswerChoice, AnswerForm, Event, list_logprobs, make_cost
from splitup_gateway.apis.response_requests import ResponseRequest
from splitup_gateway.apis.thoughts import Thought
from splitup_gateway.apis.tools import AnswerPart, ToolCall
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Piece
from splitup_gateway.names import AnswerNames

_SUMMARY: Final = "response.reasoning_summary"  # which has all that the model thought


class ResponseForm(AnswerForm):
    """The answer to one request; it has one choice."""

    def __init__(self, model: TextModel, asked: ResponseRequest, names: AnswerNames) -> None:
        self._model = model
        self._asked = asked
        self._id = names.make_id("resp_")
        self._done = 0  # items of the output that have been sent as events
        self._open: type[str | Thought] | None = None  # what the item is of that is told
        self._created = names.created
        self._events = 0

    def make_answer(self, choices: Sequence[AnswerChoice]) -> Event:
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
        return [self._make_start("created"), self._make_start("in_progress")]

    def tell(self, choice: AnswerChoice, note: str) -> bytes:
        """Return an event that says that it goes on."""
        return self.encode(self._make_start("in_progress"), note)

    def _make_start(self, name: str) -> Event:
        started = {**self._describe("in_progress"), "output": [], "usage": None}
        return self._make(f"response.{name}", response=started)

    def describe_error(self, error: ApiError, choices: Sequence[AnswerChoice]) -> Event:
        """Return the event of an error that ends a stream early; earlier ones have the text."""
        [choice] = choices
        told = {"code": error.code or "server_error", "message": str(error)}
        failed = {**self._describe("failed"), "error": told, "output": []}
        response = {**failed, "usage": _make_usage(choice)}
        return {"type": "response.failed", "sequence_number": self._events, "response": response}

    def add(self, choice: AnswerChoice, piece: Piece, parts: Sequence[AnswerPart]) -> list[Event]:
        logprobs = list_logprobs([piece])
        events = []
        for part in parts:
            events += self._add_part(choice, part, logprobs)
            logprobs = []
        return events

    def end(self, choice: AnswerChoice, parts: Sequence[AnswerPart]) -> list[Event]:
        events = []
        for part in parts or [""] * (not choice.parts):
            events += self._add_part(choice, part, [])
        return events + self._end_item(choice)

    def _add_part(
        self, choice: AnswerChoice, part: AnswerPart, logprobs: list[Event]
    ) -> list[Event]:
        if isinstance(part, ToolCall):
            return self._end_item(choice) + self._add_call(choice, part)
        events = [] if self._open is type(part) else self._begin_item(choice, type(part))
        if isinstance(part, Thought):
            delta = self._make(f"{_SUMMARY}_text.delta", **self._place(), delta=part.text)
        else:
            name = "response.output_text.delta"
            delta = self._make(name, **self._place(), delta=part, logprobs=logprobs)
        return [*events, delta]

    def _begin_item(self, choice: AnswerChoice, kind: type[str | Thought]) -> list[Event]:
        events = self._end_item(choice)
        self._open = kind
        name, field, part = "response.content_part", "content", _make_part("", [])
        if kind is Thought:
            name, field, part = f"{_SUMMARY}_part", "summary", _make_summary("")
        item = {**self._make_item(choice, self._done), "status": "in_progress", field: []}
        return [
            *events,
            self._make("response.output_item.added", output_index=self._done, item=item),
            self._make(f"{name}.added", **self._place(), part=part),
        ]

    def _add_call(self, choice: AnswerChoice, call: ToolCall) -> list[Event]:
        index, name = self._done, "response.function_call_arguments"
        item = _make_call_item(self._get_item_id(index), call)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        self._done += 1
        return [
            self._make("response.output_item.added", output_index=index, item=begun),
            self._make(f"{name}.delta", **place, delta=call.arguments),
            self._make(f"{name}.done", **place, name=call.name, arguments=call.arguments),
            self._make("response.output_item.done", output_index=index, item=item),
        ]

    def _end_item(self, choice: AnswerChoice) -> list[Event]:
        if self._open is None:
            return []
        item, place = self._make_item(choice, self._done), self._place()
        if self._open is Thought:
            [part] = item["summary"]
            names, told = (f"{_SUMMARY}_text", f"{_SUMMARY}_part"), {"text": part["text"]}
        else:
            [part] = item["content"]
            names = "response.output_text", "response.content_part"
            told = {"text": part["text"], "logprobs": part["logprobs"]}
        events = [
            self._make(f"{names[0]}.done", **place, **told),
            self._make(f"{names[1]}.done", **place, part=part),
        ]
        self._open = None
        self._done += 1
        index = place["output_index"]
        return [*events, self._make("response.output_item.done", output_index=index, item=item)]

    def finish(self, choices: Sequence[AnswerChoice]) -> list[Event]:
        answer = self.make_answer(choices)
        return [self._make(f"response.{answer['status']}", response=answer)]

    def _make(self, name: str, /, **fields: Any) -> Event:
        self._events += 1
        return {"type": name, "sequence_number": self._events - 1, **fields}

    def _place(self) -> Event:
        item_id = self._get_item_id(self._done)
        index = "summary_index" if self._open is Thought else "content_index"
        return {"item_id": item_id, "output_index": self._done, index: 0}

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
        is_whole = choice.report.finish_reason == "stop" or place < len(choice.parts) - 1
        status = "completed" if is_whole else "incomplete"
        if isinstance(part, Thought):
            summary = [_make_summary(part.text)]
            return {"id": item_id, "type": "reasoning", "status": status, "summary": summary}
        is_first = not any(isinstance(each, str) for each in choice.parts[:place])
        logprobs = list_logprobs(choice.pieces) if is_first else []
        return {
            "id": item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_make_part(part, logprobs)],
        }


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


def _make_summary(text: str) -> Event:
    return {"type": "summary_text", "text": text}


def _make_usage(choice: AnswerChoice) -> Event:
    report = choice.report
    return {
        "input_tokens": len(report.prompt),
        "input_tokens_details": {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": report.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": report.reasoning_tokens},
        "total_tokens": len(report.prompt) + report.completion_tokens,
        "splitup": make_cost([report]),
    }
