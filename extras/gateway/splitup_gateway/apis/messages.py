"""Anthropic's Messages API on top of the same models: its requests become chats.

https://docs.anthropic.com/en/api/messages. A model takes what it does in chats; tools that run on
Anthropic's own servers, documents and the continuation of an answer that is begun are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from splitup_gateway.apis.formats import RequestFields, TextPart
from splitup_gateway.apis.requests import MAX_MESSAGES, ChatRequest, ReasoningEffort, parse_request
from splitup_gateway.apis.tools import MAX_TOOLS, FunctionName
from splitup_gateway.errors import ApiError

MESSAGES: Final = "/v1/messages"


class TextBlock(TextPart):
    """A text."""

    harmless = RequestFields.harmless | {"citations", "parsed_output"}


class Base64Source(RequestFields):
    """An image itself."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/webp"]
    data: str


class ImageBlock(RequestFields):
    """An image; this server fetches none, so it is sent with the request."""

    type: Literal["image"]
    source: Base64Source


class ThinkingBlock(RequestFields):
    """What the model thought before an earlier answer; nobody checks the signature here."""

    harmless = RequestFields.harmless | {"signature"}

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(RequestFields):
    """Thoughts that only their provider can read: they are left out."""

    harmless = RequestFields.harmless | {"data"}

    type: Literal["redacted_thinking"]


class UseBlock(RequestFields):
    """A call in an earlier answer."""

    harmless = RequestFields.harmless | {"caller", "toolset_name"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(RequestFields):
    """What a tool returned; its text says whether that is an error."""

    harmless = RequestFields.harmless | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None


UserBlock = Annotated[TextBlock | ImageBlock | ResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | UseBlock, Field(discriminator="type")
]


class UserMessage(RequestFields):
    """What the user says, and what tools returned."""

    role: Literal["user"]
    content: str | list[UserBlock]

    def convert(self) -> list[dict[str, Any]]:
        """Return it as messages of a chat: results of tools have a role of their own there."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        made: list[dict[str, Any]] = []
        said: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ResultBlock):
                text = _join(block.content or "")
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif isinstance(block, ImageBlock):
                url = f"data:{block.source.media_type};base64,{block.source.data}"
                said.append({"type": "image_url", "image_url": {"url": url}})
            else:
                said.append({"type": "text", "text": block.text})
        return [*made, {"role": "user", "content": said}] if said or not made else made


class AssistantMessage(RequestFields):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]

    def convert(self) -> list[dict[str, Any]]:
        """Return it as a message of a chat."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        made: dict[str, Any] = {"role": "assistant", "content": _join(texts)}
        thoughts = [one.thinking for one in self.content if isinstance(one, ThinkingBlock)]
        if thoughts:
            made["reasoning_content"] = "".join(thoughts)
        calls = [
            {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input)}}
            for one in self.content
            if isinstance(one, UseBlock)
        ]
        return [{**made, "tool_calls": calls}] if calls else [made]


class SystemMessage(RequestFields):
    """An instruction within the conversation."""

    role: Literal["system"]
    content: str | list[TextBlock]

    def convert(self) -> list[dict[str, Any]]:
        """Return it as a message of a chat."""
        return [{"role": "system", "content": _join(self.content)}]


class MessageTool(RequestFields):
    """A tool of the client; ``input_schema`` is the JSON schema of its arguments."""

    harmless = RequestFields.harmless | {
        *("eager_input_streaming", "input_examples", "allowed_callers", "defer_loading"),
    }

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.input_schema.get("type", "object") != "object":
            raise ValueError('the input of a tool is an object: "type": "object"')
        return self

    def convert(self) -> dict[str, Any]:
        """Return it as chats name it."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class MessageToolChoice(RequestFields):
    """Whether tools are called: "any" says that one must be, "tool" which one."""

    type: Literal["auto", "any", "none", "tool"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('a choice of type "tool", and no other, has a name')
        return self

    def convert(self) -> dict[str, Any]:
        """Return the fields of a chat."""
        named = {"type": "function", "function": {"name": self.name}}
        modes: dict[str, Any] = {"any": "required", "tool": named}
        return {
            "tool_choice": modes.get(self.type, self.type),
            "parallel_tool_calls": not self.disable_parallel_tool_use,
        }


class Thinking(RequestFields):
    """Whether the model is to think before it answers, where its template can switch that."""

    harmless = RequestFields.harmless | {"budget_tokens", "display"}

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class SchemaFormat(RequestFields):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestFields):
    """How the answer is to be."""

    effort: ReasoningEffort | None = None
    format: SchemaFormat | None = None


class CappedChat(ChatRequest):
    """A chat whose limit may be larger than the context has room for, as clients send it."""

    caps_limit = True


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class CountRequest(RequestFields):
    """POST /v1/messages/count_tokens."""

    harmless: ClassVar[frozenset[str]] = RequestFields.harmless | {
        *("metadata", "service_tier", "diagnostics", "inference_geo", "context_management"),
        *("speed", "user_profile_id", "workspace_id"),
    }

    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def convert(self, **_: object) -> ChatRequest:
        """Return the same request of the OpenAI API. Raises ApiError."""
        if self.messages[-1].role == "assistant":
            raise ApiError(
                "the last message is the assistant's, and this server continues no answer that is "
                "begun; end with one of the user",
                param=f"messages.{len(self.messages) - 1}",
            )
        return parse_request(CappedChat, self._make_fields()).convert()

    def _make_fields(self) -> dict[str, Any]:
        system = _join(self.system or "")
        messages = [{"role": "system", "content": system}] if system else []
        messages += [made for message in self.messages for made in message.convert()]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.thinking is not None:
            fields["reasoning"] = {"enabled": self.thinking.type != "disabled"}
        if self.tools:
            fields["tools"] = [tool.convert() for tool in self.tools]
        if self.tool_choice is not None:
            fields |= self.tool_choice.convert()
        if (config := self.output_config) is not None:
            fields["reasoning_effort"] = config.effort
            if config.format is not None:
                schema = {"name": "answer", "schema": config.format.schema_, "strict": True}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None  # of this server

    def _make_fields(self) -> dict[str, Any]:
        same = ("max_tokens", "stream", "temperature", "top_k", "top_p", "seed")
        fields = {name: getattr(self, name) for name in same}
        return {**super()._make_fields(), **fields, "stop": self.stop_sequences}


def _join(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
