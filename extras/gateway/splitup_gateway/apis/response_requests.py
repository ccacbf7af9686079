"""Requests of the Responses API: a conversation as a list of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from splitup.decode.adjusted_sampler import MAX_TOP_LOGPROBS
from splitup_gateway.apis.formats import (
    Detail,
    FlatAnswerFormat,
    FlatJsonSchemaFormat,
    RequestFields,
    TextFormat,
)
from splitup_gateway.apis.requests import (
    MAX_MESSAGES,
    ChatRequest,
    Conversing,
    StreamOptions,
    parse_request,
)
from splitup_gateway.apis.tools import (
    MAX_TOOLS,
    FlatAllowedChoice,
    FlatTool,
    FlatToolChoice,
    ToolMode,
)


class ResponseText(RequestFields):
    """How the text of a response is to be."""

    harmless = RequestFields.harmless | {"verbosity"}

    format: FlatAnswerFormat | None = None


class ResponsePart(RequestFields):
    """A part of an input item; answers that are sent back have parts of type "output_text"."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponseImage(RequestFields):
    """An image."""

    type: Literal["input_image"]
    image_url: str
    detail: Detail | None = None


class MessageItem(RequestFields):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ResponsePart | ResponseImage]
    id: str | None = None
    status: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = () if isinstance(self.content, str) else self.content
        if self.role != "user" and any(isinstance(part, ResponseImage) for part in parts):
            raise ValueError(f"only the user sends images, not role '{self.role}'")
        return self


class CallItem(RequestFields):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(RequestFields):
    """What a tool returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponsePart]
    id: str | None = None
    status: str | None = None


class ReasoningItem(RequestFields):
    """What a model thought before an earlier answer, in words that anybody can read."""

    class Text(RequestFields):
        """A part of it."""

        type: Literal["reasoning_text", "summary_text"]
        text: str

    harmless = RequestFields.harmless | {"encrypted_content", "status", "id"}

    type: Literal["reasoning"]
    content: list[Text] | None = None
    summary: list[Text] | None = None  # of this server: all of it

    @property
    def text(self) -> str:
        """What the model thought, "" when only its provider can tell."""
        return "".join(part.text for part in self.content or self.summary or ())


def _find_type(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return str(kind)


ResponseItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_find_type),
]


class ResponseChat(ChatRequest):
    """A chat that was asked for as a response."""

    format_field = "text.format"


class ResponseRequest(Conversing):
    """POST /v1/responses. Nothing is stored, so that ``previous_response_id`` is not supported."""

    input: str | Annotated[list[ResponseItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: ResponseText | None = None
    truncation: Literal["disabled", "auto"] | None = None  # what does not fit is refused either way
    background: Literal[False] | None = None
    n: Literal[1] | None = None
    stream_options: StreamOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolMode | FlatToolChoice | FlatAllowedChoice | None = None

    @property
    def format(self) -> FlatAnswerFormat:
        """The form of the answer's text."""
        asked = None if self.text is None else self.text.format
        return asked or TextFormat(type="text")

    def convert(self, **_: object) -> ChatRequest:
        """Return the same request of the API of chats. Raises ApiError."""
        form, choice = self.format, self.tool_choice
        is_reported = "message.output_text.logprobs" in (self.include or ())
        fields = {
            **{name: getattr(self, name) for name in Conversing.model_fields},
            "messages": self._list_messages(),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": is_reported or self.top_logprobs is not None,
            "top_logprobs": self.top_logprobs,
            "response_format": form,
            "tools": [{"type": "function", "function": tool} for tool in self.tools or ()] or None,
            "tool_choice": choice,
        }
        if isinstance(form, FlatJsonSchemaFormat):
            fields["response_format"] = {"type": form.type, "json_schema": form}
        if choice is not None and not isinstance(choice, str):
            name = "function" if isinstance(choice, FlatToolChoice) else "allowed_tools"
            fields["tool_choice"] = {"type": choice.type, name: choice}
        return parse_request(ResponseChat, fields).convert()

    def _list_messages(self) -> list[dict[str, Any]]:
        items = self.input
        if isinstance(items, str):
            items = [MessageItem(role="user", content=items)]
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        thought: dict[str, Any] = {}  # before what the assistant says or calls next
        for item in items:
            if isinstance(item, ReasoningItem):
                if item.text:
                    thought = {"reasoning_content": item.text}
            elif isinstance(item, CallItem):
                function = {"name": item.name, "arguments": item.arguments}
                if thought or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": "", **thought})
                    thought = {}
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "function": function})
            elif isinstance(item, CallOutputItem):
                output = _convert_content(item.output)
                messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
            else:
                said = {"role": item.role, "content": _convert_content(item.content)}
                messages.append({**said, **thought} if item.role == "assistant" else said)
                thought = {}
        return messages


def _convert_content(
    content: str | Sequence[ResponsePart | ResponseImage],
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, ResponseImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]
