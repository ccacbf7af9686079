"""Requests of the OpenAI API, validated: their fields, defaults and errors.

Fields, names and defaults are those of OpenAI's API reference; ``top_k`` and ``min_p`` are common
extensions. A field that would change the answer and is not supported is an error, never ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import AliasChoices, Field, ValidationError, model_validator

from splitup.client.text.chat_template import OWN_VARIABLES
from splitup.client.text.grammar import Grammar
from splitup.core import limits
from splitup.core.codec import check_structure, parse_json
from splitup.decode.adjusted_sampler import MAX_TOP_LOGPROBS, Adjustments
from splitup.decode.sampler import Sampler
from splitup_gateway.apis.formats import (
    AnswerFormat,
    ImagePart,
    RequestFields,
    TextPart,
    TokenId,
    join_content,
    list_images,
)
from splitup_gateway.apis.tools import (
    MAX_TOOLS,
    AllowedChoice,
    Tool,
    Toolbox,
    ToolChoice,
    ToolMode,
    make_toolbox,
)
from splitup_gateway.errors import ApiError

MAX_BIASES: Final = 1_024  # of tokens, as at OpenAI
MAX_CHOICES: Final = 16  # texts of one request: ``n`` times the number of prompts
MAX_PROMPTS: Final = 16
MAX_MESSAGES: Final = 2_048
DEFAULT_COMPLETION_TOKENS: Final = 16
_CALL_CHARS: Final = 46  # at least, of a call beside its arguments
Texts = str | list[TokenId] | list[str | list[TokenId]]  # one, or several; as tokens, too
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CalledFunction(RequestFields):
    """A function that the model called; ``arguments`` is JSON."""

    name: str
    arguments: str


class MessageCall(RequestFields):
    """A call in an earlier answer."""

    harmless = RequestFields.harmless | {"index"}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it; raise ApiError for no JSON object."""
        try:
            value = parse_json(self.function.arguments or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ApiError(
                f"the arguments of the call '{self.id:.80}' are no JSON object", param="arguments"
            )
        function = {"name": self.function.name, "arguments": value}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(RequestFields):
    """A message of a conversation: what was said, called, or returned by a tool."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    # what the model thought before it answered; some servers call it "reasoning"
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    # of answers that are sent back; the model is not told them
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message has content")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError(f"only the assistant has reasoning_content, not role '{self.role}'")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant calls tools, not role '{self.role}'")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of role 'tool', and no other, has a tool_call_id")
        parts = () if isinstance(self.content, str) else self.content or ()
        if self.role != "user" and any(isinstance(part, ImagePart) for part in parts):
            raise ValueError(f"only the user sends images, not role '{self.role}'")
        return self

    def to_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it; "developer" is the newer name of "system".

        Raises ApiError for arguments of a call that are no JSON object.
        """
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": join_content(self.content or "")}
        if self.tool_calls:
            found["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        if self.name is not None:
            found["name"] = self.name
        return found


class StreamOptions(RequestFields):
    """What a stream contains besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Reasoning(RequestFields):
    """How much a model is to think; other servers can also summarise what it thought."""

    harmless = RequestFields.harmless | {"summary", "generate_summary", "exclude", "max_tokens"}

    effort: ReasoningEffort | None = None
    enabled: bool | None = None


class Sampling(RequestFields):
    """The fields that every request for a text has."""

    harmless = RequestFields.harmless | {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity"),
    }

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None

    @property
    def choices(self) -> int:
        """How many texts each prompt gets."""
        return self.n or 1

    def make_samplers(self) -> list[Sampler]:
        """Return a sampler for each choice; without a seed every request has another one."""
        first = secrets.randbits(63) if self.seed is None else self.seed % 2**63
        return [
            Sampler(
                temperature=1.0 if self.temperature is None else self.temperature,
                seed=first + index,
                top_k=max(self.top_k or 0, 0),  # -1 means all, too
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
            )
            for index in range(self.choices)
        ]

    def make_adjustments(self, top_logprobs: int | None) -> Adjustments:
        """Return what is added to the logits; raise ApiError for a bias of no token."""
        bias = []
        for token, value in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ApiError(f"'{token:.20}' is no token id", param="logit_bias")
            bias.append((int(token), value))
        return Adjustments(
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            bias=tuple(bias),
            top_logprobs=top_logprobs,
        )


class _Generation(Sampling):
    """The fields that chats and completions share."""

    format_field: ClassVar[str] = "response_format"  # as errors name it

    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    response_format: AnswerFormat | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The form of the answer, None for any."""
        return None if self.response_format is None else self.response_format.make_grammar()

    def convert(self, **_: object) -> Self:
        """Return itself: other APIs' requests become one of these."""
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings before which a text ends."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


R = TypeVar("R", bound=RequestFields)


class Conversing(Sampling):
    """The fields that chats and responses share."""

    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ChatRequest(_Generation, Conversing):
    """POST /v1/chat/completions."""

    caps_limit: ClassVar[bool] = False  # a limit beyond the context means: as far as it goes

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolMode | ToolChoice | AllowedChoice | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def effort(self) -> str | None:
        """How much the model is to think, None without a wish."""
        return self.reasoning_effort or (None if self.reasoning is None else self.reasoning.effort)

    def make_variables(self) -> dict[str, Any]:
        """Return what the chat template is given besides the conversation.

        Thinking is switched as most templates call it. Raises ApiError for a name that is taken.
        """
        made: dict[str, Any] = {}
        if self.reasoning is not None and self.reasoning.enabled is not None:
            made["enable_thinking"] = self.reasoning.enabled
        if self.effort is not None:
            made = {"enable_thinking": self.effort != "none", "reasoning_effort": self.effort}
        for name, value in (self.chat_template_kwargs or {}).items():
            if name in OWN_VARIABLES:
                raise ApiError(
                    f"the server itself gives the chat template '{name}'; leave it out",
                    param=f"chat_template_kwargs.{name}",
                )
            made[name] = value
        return made

    def make_toolbox(self, template: str) -> Toolbox | None:
        """Return the tools, None without any; raise ApiError when the model cannot have them."""
        return make_toolbox(
            [tool.function for tool in self.tools or ()],
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            template=template,
        )

    def convert(self, **given: object) -> Self:
        """Return itself, its conversation read, which takes time. Raises ApiError."""
        _ = self.template_messages
        return self

    @cached_property
    def template_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates expect it. Raises ApiError.

        Arguments of calls are texts in JSON: one by one they may be small enough, and too many
        together.
        """
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        texts = ("," + " " * _CALL_CHARS).join(call.function.arguments for call in calls)
        try:
            check_structure(texts, max_growth=limits.DENSE_GROWTH)
        except ValueError as error:
            raise ApiError(f"the arguments of calls: {error}", param="arguments") from None
        return [message.to_template() for message in self.messages]

    def list_images(self) -> tuple[bytes, ...]:
        """Return the files of its images in their order; raise ApiError for no data URL."""
        return list_images([message.content for message in self.messages])

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer, None without a wish."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def recorded_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token; None: no report."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: Texts
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or tokens; raises ApiError for none or too many."""
        return list_texts("prompt", self.prompt, MAX_PROMPTS)


def list_texts(field: str, given: Texts, most: int) -> list[str | list[int]]:
    """Return the texts of a field, each a string or tokens; raise ApiError for too many."""
    if isinstance(given, str):
        return [given]
    if tokens := [item for item in given if isinstance(item, int)]:
        return [tokens]
    several = [item for item in given if not isinstance(item, int)]
    if not 1 <= len(several) <= most:
        raise ApiError(f"give 1 to {most} {field}s, not {len(several)}", param=field)
    return several


def parse_body(body: bytes) -> object:
    """Return what a body holds; raise ApiError for one that is not JSON."""
    try:
        return parse_json(body)
    except ValueError:
        raise ApiError("the request's body is not JSON") from None


def read_request(kind: type[R], body: bytes) -> R:
    """Return a request; raise what ``parse_body`` and ``parse_request`` do."""
    return parse_request(kind, parse_body(body))


def parse_request(kind: type[R], body: Any) -> R:
    """Return a request; raise ApiError that names a field at fault."""
    if not isinstance(body, dict):
        raise ApiError("the request's body is no JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        first = max(
            found, key=lambda one: len(one["loc"])
        )  # of alternatives the one that was meant
        param = ".".join(_find_path(first["loc"], body, first["type"] == "missing"))
        if first["type"] == "extra_forbidden":
            raise ApiError(
                f"this server does not support the field '{param:.100}'", param=param
            ) from None
        raise ApiError(f"field '{param:.100}': {first['msg']}", param=param) from None


def _find_path(place: Sequence[str | int], value: Any, is_missing: bool) -> list[str]:
    """Return the path of a field in a request, without pydantic's names of alternatives.

    A name of an alternative may be that of a field, too: then the path that leads further is right.
    """
    if not place:
        return []
    part, *rest = place
    if is_missing and not rest:
        return [str(part)]
    found = _find_path(rest, value, is_missing)
    is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
    if is_index or (isinstance(value, dict) and part in value):
        taken = [str(part), *_find_path(rest, value[part], is_missing)]
        return taken if len(taken) > len(found) or found[-1:] != [str(place[-1])] else found
    return found
