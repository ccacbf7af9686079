"""Requests of the OpenAI API, validated: their fields, defaults and errors.

Fields, names and defaults are those of OpenAI's API reference; ``top_k`` and ``min_p`` are common
extensions. A field that would change the answer and is not supported is an error, never ignored.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitup.core.errors import SplitUpError
from splitup.decode.adjusted_sampler import MAX_TOP_LOGPROBS, Adjustments
from splitup.decode.sampler import Sampler

MAX_CHOICES: Final = 16  # texts of one request: ``n`` times the number of prompts
MAX_PROMPTS: Final = 16
DEFAULT_COMPLETION_TOKENS: Final = 16
# fields that do not change the answer here
IGNORED: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls"),
    }
)


class ApiError(SplitUpError):
    """An error in OpenAI's form; ``param`` names the field at fault, if one is."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextPart(_Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def to_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it; "developer" is the newer name of "system"."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class StreamOptions(_Fields):
    """What a stream contains besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(_Fields):
    """The only supported format of an answer."""

    type: Literal["text"]


class _Sampling(_Fields):
    """The fields that every request for a text has."""

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
    logit_bias: dict[str, float] | None = None

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
            bias=tuple(bias),
            top_logprobs=top_logprobs,
        )


class _Generation(_Sampling):
    """The fields that chats and completions share."""

    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None

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


R = TypeVar("R", bound=_Sampling)


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: TextFormat | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer, None without a wish."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def recorded_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token; None: no report."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ResponseText(_Fields):
    """How the text of a response is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsePart(_Fields):
    """A part of an input item; answers that are sent back have parts of type "output_text"."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponseItem(_Fields):
    """A message of a conversation, in the form of the Responses API."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ResponsePart]
    id: str | None = None
    status: str | None = None


class ResponseRequest(_Sampling):
    """POST /v1/responses. Nothing is stored, so that ``previous_response_id`` is not supported."""

    input: str | Annotated[list[ResponseItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: ResponseText | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    n: Literal[1] | None = None
    stream_options: StreamOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None

    @property
    def recorded_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token; None: no report."""
        return (self.top_logprobs or 0) if self.include else self.top_logprobs

    def list_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates expect it."""
        items = self.input
        if isinstance(items, str):
            items = [ResponseItem(role="user", content=items)]
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in items:
            content = item.content
            if not isinstance(content, str):
                content = "".join(part.text for part in content)
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": content})
        return messages


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str | list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or tokens; raises ApiError for none or too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [item for item in self.prompt if isinstance(item, int)]
        if tokens:
            return [tokens]
        several = [item for item in self.prompt if not isinstance(item, int)]
        if not 1 <= len(several) <= MAX_PROMPTS:
            raise ApiError(f"give 1 to {MAX_PROMPTS} prompts, not {len(several)}", param="prompt")
        return several


def parse_request(kind: type[R], body: Any) -> R:
    """Return a request; raise ApiError that names the first field at fault."""
    if not isinstance(body, dict):
        raise ApiError("the request's body is no JSON object")
    known = {name: value for name, value in body.items() if name not in IGNORED}
    try:
        return kind.model_validate(known, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ApiError(
                f"this server does not support the field '{param:.100}'", param=param
            ) from None
        raise ApiError(f"field '{param:.100}': {first['msg']}", param=param) from None
