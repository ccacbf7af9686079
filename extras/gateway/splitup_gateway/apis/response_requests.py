"""Requests of the Responses API: a conversation as a list of items."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from splitup.client.text.grammar import Grammar
from splitup.decode.adjusted_sampler import MAX_TOP_LOGPROBS
from splitup_gateway.apis.formats import FlatAnswerFormat, RequestFields, TextFormat
from splitup_gateway.apis.image_parts import ResponseImage, join_content, list_images
from splitup_gateway.apis.requests import (
    MAX_MESSAGES,
    Conversing,
    StreamOptions,
    make_template_call,
)
from splitup_gateway.apis.tools import (
    MAX_TOOLS,
    FlatAllowedChoice,
    FlatTool,
    FlatToolChoice,
    Toolbox,
    make_toolbox,
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
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | FlatAllowedChoice | None = (
        None
    )

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer, None without a wish."""
        return self.max_output_tokens

    @property
    def recorded_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token; None: no report."""
        is_asked = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_asked else self.top_logprobs

    @property
    def format(self) -> FlatAnswerFormat:
        """The form of the answer's text."""
        asked = None if self.text is None else self.text.format
        return asked or TextFormat(type="text")

    @property
    def grammar(self) -> Grammar | None:
        """The form of the answer, None for any."""
        return self.format.make_grammar()

    def make_toolbox(self, template: str) -> Toolbox | None:
        """Return the tools, None without any; raise ApiError when the model cannot have them."""
        return make_toolbox(
            self.tools or (),
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            template=template,
        )

    def list_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates expect it."""
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
                call = make_template_call(item.call_id, item.name, item.arguments)
                if thought or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": "", **thought})
                    thought = {}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, CallOutputItem):
                output = join_content(item.output)
                messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
            else:
                role = "system" if item.role == "developer" else item.role
                said = {"role": role, "content": join_content(item.content)}
                messages.append({**said, **thought} if role == "assistant" else said)
                thought = {}
        return messages

    def list_images(self) -> tuple[bytes, ...]:
        """Return the files of its images in their order; raise ApiError for no data URL."""
        items = () if isinstance(self.input, str) else self.input
        return list_images([item.content for item in items if isinstance(item, MessageItem)])
