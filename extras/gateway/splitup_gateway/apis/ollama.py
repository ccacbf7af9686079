"""Ollama's API on top of the same models: its requests become chats and completions.

https://github.com/ollama/ollama/blob/main/docs/api.md. Whoever speaks it finds text models; it has
no keys of its own, but a header ``Authorization`` is taken as everywhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, AliasChoices, Field

from splitup.client.text.generation import TextModel
from splitup_gateway.apis.answers import AnswerChoice, AnswerForm, Event, make_cost
from splitup_gateway.apis.formats import RequestFields
from splitup_gateway.apis.requests import (
    MAX_MESSAGES,
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from splitup_gateway.apis.thoughts import Thought, name_marks
from splitup_gateway.apis.tools import MAX_TOOLS, AnswerPart, Tool, ToolCall, find_syntax
from splitup_gateway.errors import ApiError
from splitup_gateway.generation import Piece

VERSION: Final = "0.30.0"  # of the API that is followed; clients compare it
_DEFAULTS: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# options that say how Ollama computes, which nodes decide here
COMPUTING: Final = frozenset(
    {
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap"),
        *("use_mlock", "low_vram", "numa", "repeat_last_n"),
    }
)
TAKEN: Final = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
        *("presence_penalty", "frequency_penalty"),
    }
)


ModelName = Annotated[str, AfterValidator(lambda name: name.removesuffix(":latest"))]


class OllamaCall(RequestFields):
    """A call in an earlier answer."""

    class Function(RequestFields):
        """What was called, with which arguments."""

        name: str
        arguments: dict[str, Any] = Field(default_factory=dict)
        index: int | None = None

    function: Function
    id: str | None = None


class OllamaMessage(RequestFields):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None  # before an earlier answer
    images: list[str] | None = None  # in base64


class _OllamaRequest(RequestFields):
    model: ModelName
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None  # leases are kept by the server's own options
    think: bool | Literal["low", "medium", "high"] | None = None

    def make_fields(self) -> dict[str, Any]:
        """Return the fields that all requests of the OpenAI API have. Raises ApiError."""
        fields: dict[str, Any] = {"model": self.model, **_DEFAULTS}
        for name, value in (self.options or {}).items():
            if name == "num_predict":
                fields["max_tokens"] = None if value in (-1, -2) else value
            elif name in TAKEN:
                fields[name] = value
            elif name not in COMPUTING and (name, value) != ("repeat_penalty", 1):
                raise ApiError(f"this server does not support the option '{name:.100}'")
        fields["stream"] = self.stream is not False
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _make_thinking(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        kind = "enabled" if isinstance(self.think, bool) else "effort"
        return {"reasoning": {kind: self.think}}


class GenerateRequest(_OllamaRequest):
    """POST /api/generate."""

    prompt: str
    system: str | None = None
    raw: bool | None = None
    suffix: Literal[""] | None = None
    images: list[str] | None = None  # in base64

    def convert(self, *, has_template: bool) -> CompletionRequest | ChatRequest:
        """Return the same request of the OpenAI API; a model without a template continues."""
        fields = self.make_fields()
        if self.raw or not has_template:
            if self.images:
                raise ApiError("images are for models with a chat template, without 'raw'")
            fields["max_tokens"] = fields.get("max_tokens") or 128
            return parse_request(CompletionRequest, {**fields, "prompt": self.prompt})
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        messages.append({"role": "user", "content": _make_content(self.prompt, self.images)})
        fields |= {**self._make_thinking(), "messages": messages}
        return parse_request(ChatRequest, fields).convert()


class OllamaChatRequest(_OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    def convert(self, **_: object) -> ChatRequest:
        """Return the same request of the OpenAI API."""
        messages: list[dict[str, Any]] = []
        waiting: list[str] = []  # calls whose result is still to come; Ollama's have no id
        for place, message in enumerate(self.messages):
            known: dict[str, Any] = {"role": message.role}
            known["content"] = _make_content(message.content, message.images)
            if message.thinking and message.role == "assistant":
                known["reasoning_content"] = message.thinking
            if message.tool_calls:
                calls = []
                for number, call in enumerate(message.tool_calls):
                    arguments = json.dumps(call.function.arguments)
                    function = {"name": call.function.name, "arguments": arguments}
                    calls.append({"id": call.id or f"call_{place}_{number}", "function": function})
                known["tool_calls"] = calls
                waiting = [str(call["id"]) for call in calls]
            if message.role == "tool":
                known["tool_call_id"] = message.tool_call_id or (waiting or ["call"]).pop(0)
                known["name"] = message.tool_name or message.name
            messages.append(known)
        fields = {**self.make_fields(), **self._make_thinking(), "messages": messages}
        if self.tools:
            fields["tools"] = [tool.model_dump() for tool in self.tools]
        return parse_request(ChatRequest, fields).convert()


def _make_content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Return what a message says in OpenAI's form; images come before the text."""
    if not images:
        return text
    urls = [{"url": f"data:image/*;base64,{each}"} for each in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}]


class ShowRequest(RequestFields):
    """POST /api/show; ``name`` is the older name of ``model``."""

    name: Annotated[ModelName, Field(validation_alias=AliasChoices("model", "name"))]
    verbose: bool | None = None


@dataclass
class OllamaForm(AnswerForm):
    """The answer of /api/generate, or with ``is_chat`` of /api/chat, a line for each piece."""

    model: TextModel
    is_chat: bool
    content_type = "application/x-ndjson"
    began_ns: int = field(default_factory=time.perf_counter_ns)

    def encode(self, event: Event, note: str = "") -> bytes:
        return json.dumps(event, ensure_ascii=False).encode() + b"\n"

    def tell(self, choice: AnswerChoice, note: str) -> bytes:
        return self.encode({**self._make([]), "done": False})

    def describe_error(self, error: ApiError, choices: Sequence[AnswerChoice]) -> Event:
        return describe_error(error)

    def make_answer(self, choices: Sequence[AnswerChoice]) -> Event:
        [choice] = choices
        return {**self._make(choice.parts), **self._make_end(choice)}

    def add(self, choice: AnswerChoice, piece: Piece, parts: Sequence[AnswerPart]) -> list[Event]:
        return [{**self._make(parts), "done": False}] if parts else []

    def end(self, choice: AnswerChoice, parts: Sequence[AnswerPart]) -> list[Event]:
        ended = {**self._make([]), **self._make_end(choice)}
        return [*([{**self._make(parts), "done": False}] if parts else []), ended]

    def _make(self, parts: Sequence[AnswerPart]) -> Event:
        text = "".join(part for part in parts if isinstance(part, str))
        made: Event = {"model": self.model.name, "created_at": datetime.now(UTC).isoformat()}
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        thinking = {"thinking": thought} if thought else {}
        if not self.is_chat:
            return {**made, "response": text, **thinking}
        message: Event = {"role": "assistant", "content": text, **thinking}
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in calls
            ]
        return {**made, "message": message}

    def _make_end(self, choice: AnswerChoice) -> Event:
        report, spent_ns = choice.report, time.perf_counter_ns() - self.began_ns
        return {
            "done": True,
            "done_reason": report.finish_reason,
            "total_duration": spent_ns,
            "load_duration": 0,
            "prompt_eval_count": len(report.prompt),
            "prompt_eval_duration": 0,
            "eval_count": report.completion_tokens,
            "eval_duration": spent_ns,
            "splitup": make_cost([report]),
        }


def describe_error(error: ApiError) -> Event:
    """Return an error as Ollama's clients read it."""
    return {"error": str(error)}


def describe_model(model: TextModel) -> Event:
    """Return a model's entry in /api/tags."""
    size = sum(task.vram_bytes for task in model.manifest.tasks)
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": "1970-01-01T00:00:00Z",
        "size": size,
        "digest": model.manifest.model_id.removeprefix("0x"),
        "details": _DETAILS,
    }


def show_model(model: TextModel) -> Event:
    """Return the answer of /api/show."""
    chat = model.info.chat
    has_tools = chat is not None and find_syntax(chat.template) is not None
    thinks = chat is not None and name_marks(chat.template) is not None
    return {
        "details": _DETAILS,
        "template": "" if chat is None else chat.template,
        "model_info": {
            "general.architecture": "splitup",
            "splitup.context_length": model.info.context,
            "splitup.vocab_size": model.info.vocab,
        },
        "capabilities": [
            "completion",
            *(["tools"] if has_tools else []),
            *(["thinking"] if thinks else []),
            *(["vision"] if model.info.images is not None else []),
        ],
        "modified_at": "1970-01-01T00:00:00Z",
    }


_DETAILS: Final = {
    "parent_model": "",
    "format": "splitup",
    "family": "splitup",
    "families": ["splitup"],
    "parameter_size": "",
    "quantization_level": "",
}
