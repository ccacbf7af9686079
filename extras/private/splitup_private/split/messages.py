"""Messages of split inference: a device keeps text, tokens and choices, nodes run the layers.

A message is either JSON, where a tensor is base64, or binary: the length of a JSON header (4 bytes,
little-endian), the header, which has the same fields without the tensor, and the tensor's bytes.
Tensors are float32 [seq_len, hidden_dim], little-endian, row by row. The specification is
``docs/spec/split.md``.

No message has room for text, token ids, logits or choices: unknown fields are refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
from pydantic import Field

from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.errors import InvalidInput, SplitUpError
from splitup.messages.base import Bytes32Field, Count, DigestField, Message

PATH: Final = "/api/v1/split"
PROTOCOL: Final = "splitup.split.v1"  # of the WebSocket
KEY_PROTOCOL: Final = "splitup.key."  # and an API key: browsers can send no other header
MAX_MESSAGE_BYTES: Final = 4 * limits.MIB  # longer prompts are sent in several messages
MAX_HEADER_BYTES: Final = 4 * limits.KIB
_LENGTH_BYTES: Final = 4

# 128 random bits at least, in hexadecimal, base64url or as a UUID; the server's own have 192
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{32,64}$")]
ModelName = Annotated[str, Field(min_length=1, max_length=100)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
T = TypeVar("T", bound=Message)


class SplitError(SplitUpError):
    """An error with a code for programs; ``status`` is that of an HTTP answer."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


# ---- requests ----------------------------------------------------------------------------------


class Ping(Message):
    """Ask whether the server is there."""

    type: Literal["ping"]


class AskConfig(Message):
    """Ask what a device needs to know of a model; without a name, of the first one."""

    type: Literal["config"]
    model: ModelName | None = None


class Forward(Message):
    """Run the nodes' layers on rows of hidden states.

    ``position`` is that of the first row. An incremental one continues a session at the position
    where it ended; another one begins a session, or an existing one anew, at position 0. Whoever
    begins one may leave the id to the server.
    """

    type: Literal["forward"]
    model: ModelName
    seq_len: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT)]
    hidden_dim: Annotated[int, Field(ge=1, le=limits.MAX_DIMENSION)]
    session_id: SessionId | None = None
    incremental: bool = False
    position: Annotated[int, Field(ge=0, le=limits.MAX_CONTEXT)] = 0
    # an adapter is applied by its host, which the device asks itself: it would learn nothing more
    expert_name: None = None
    use_he: Literal[False] = False


class EndSession(Message):
    """Forget a session."""

    type: Literal["end"]
    session_id: SessionId


# ---- answers -----------------------------------------------------------------------------------


class Pong(Message):
    """The server is there."""

    type: Literal["pong"] = "pong"


class Ended(Message):
    """A session is forgotten."""

    type: Literal["end"] = "end"
    session_id: SessionId


class Forwarded(Message):
    """What the nodes computed: the rows before the model's last private layers.

    ``cached_seq_len`` is the number of rows that the session holds now, and the position of the
    next one. ``he_active`` is always False: encryption is between the device and an adapter host.
    """

    type: Literal["forward"] = "forward"
    session_id: SessionId
    execution_id: Bytes32Field
    seq_len: Count
    hidden_dim: Count
    incremental: bool
    cached_seq_len: Count
    he_active: Literal[False] = False
    steps: Count  # of the execution, which are paid for
    cost_micro_usdc: Count
    wait_ms: Milliseconds  # for an execution
    nodes_ms: Milliseconds  # from the first row sent to the last one received
    total_ms: Milliseconds


class ErrorAnswer(Message):
    """Why a request was refused or failed; the session is as before unless the code says not."""

    type: Literal["error"] = "error"
    code: str
    message: str


class PrivateModel(Message):
    """A model whose first and last layers stay on the device.

    ``client`` is that part of the manifest (``splitup.graph.manifest.ClientPart``). The manifest
    itself is a file, too: its digest is the model's id.
    """

    name: str
    model_id: Bytes32Field
    private_blocks: Count  # at each end, besides embedding and head
    hidden_dim: Count
    context: Count
    chunk: Count  # rows of one step, which is what is paid for
    max_rows: Count  # of one forward
    price_nano_usdc_per_step: Count
    vocab: Count
    eos_ids: tuple[Count, ...]
    is_recurrent: bool
    chat: dict[str, Any] | None
    tokenizer_digest: DigestField
    tokenizer_bytes: Count
    input: str  # the nodes' input that takes hidden states
    output: str  # the nodes' output that returns them
    client: dict[str, Any]
    measured: tuple[str, ...] = ()  # what attacks recovered, in sentences for people


class PrivateModels(Message):
    """What a server offers to devices: models, and the URLs of hosts of encrypted adapters.

    Where there are ``adapter_signers``, one of these keys has to have signed what a host offers.
    """

    models: tuple[PrivateModel, ...]
    adapter_hosts: tuple[str, ...] = ()
    adapter_signers: tuple[str, ...] = ()


class ConfigAnswer(Message):
    """A model, and how long the server keeps sessions."""

    type: Literal["config"] = "config"
    model: PrivateModel
    max_sessions: Count
    session_ttl_s: Milliseconds
    max_message_bytes: Count = MAX_MESSAGE_BYTES


REQUESTS: Final[dict[str, type[Message]]] = {
    "ping": Ping,
    "config": AskConfig,
    "forward": Forward,
    "end": EndSession,
}


# ---- on the wire -------------------------------------------------------------------------------


def decode_text(text: str | bytes) -> tuple[Message, bytes]:
    """Return a request in JSON and its tensor, b"" for one without; raise SplitError."""
    fields = _parse_object(text)
    encoded = fields.pop("hidden_states", None)
    request = _check_request(fields)
    if not isinstance(request, Forward):
        if encoded is not None:
            raise SplitError("bad_message", f"'{fields['type']}' has no hidden_states")
        return request, b""
    if not isinstance(encoded, str):
        raise SplitError("bad_tensor", "hidden_states is missing, or no string of base64")
    try:
        return request, base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise SplitError("bad_tensor", "hidden_states is not base64") from None


def decode_binary(data: bytes) -> tuple[Message, bytes]:
    """Return a request in binary form and its tensor; raise SplitError."""
    header, tensor = split_binary(data)
    if "hidden_states" in header:
        raise SplitError("bad_message", "a binary message has its tensor behind the header")
    request = _check_request(header)
    if tensor and not isinstance(request, Forward):
        raise SplitError("bad_message", f"'{header['type']}' has no tensor")
    return request, tensor


def split_binary(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the rest of a binary message; raise SplitError."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if len(data) < _LENGTH_BYTES or length > MAX_HEADER_BYTES or end > len(data):
        raise SplitError(
            "bad_message",
            f"a binary message is 4 bytes of length, a header of at most {MAX_HEADER_BYTES} bytes, "
            "and a tensor",
        )
    return _parse_object(data[_LENGTH_BYTES:end]), data[end:]


def encode_text(message: Message, tensor: bytes | memoryview = b"", name: str = "") -> str:
    """Return a message in JSON; ``name`` is the field that a tensor goes into."""
    fields = message.model_dump(mode="json", exclude_none=True)
    if name:
        fields[name] = base64.b64encode(tensor).decode()
    return json.dumps(fields, separators=(",", ":"))


def encode_binary(message: Message, tensor: bytes | memoryview = b"") -> bytes:
    """Return a message in binary form."""
    header = message.model_dump_json(exclude_none=True).encode()
    return b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, tensor))


def decode_rows(request: Forward, tensor: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the rows of a request, [seq_len, hidden_dim]; raise SplitError for other bytes."""
    expected = request.seq_len * request.hidden_dim * 4
    if len(tensor) != expected:
        raise SplitError(
            "bad_tensor",
            f"hidden_states has {len(tensor)} bytes; float32 [{request.seq_len}, "
            f"{request.hidden_dim}] has {expected}",
        )
    rows = np.frombuffer(tensor, "<f4").reshape(request.seq_len, request.hidden_dim)
    if not np.isfinite(rows).all():
        raise SplitError("bad_tensor", "hidden_states has a NaN or an infinity")
    return rows


def parse_answer(kind: type[T], fields: dict[str, Any]) -> T:
    """Return a server's answer; raise SplitError for an error, and for another kind."""
    if fields.get("type") == "error":
        error = _check(ErrorAnswer, fields)
        raise SplitError(error.code, error.message)
    return _check(kind, fields)


def decode_models(data: bytes) -> tuple[PrivateModel, ...]:
    """Return the models in a server's answer; raise SplitError."""
    return _check(PrivateModels, _parse_object(data)).models


def _parse_object(text: str | bytes) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise SplitError("bad_message", f"the message is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise SplitError("bad_message", "the message is no JSON object")
    return value


def _check_request(fields: dict[str, Any]) -> Message:
    kind = fields.get("type")
    if kind == "tokenize":
        raise SplitError(
            "tokenize_on_device",
            "this server does not tokenize: a server that tokenizes has seen the text; use the "
            "model's tokenizer.json, which GET /api/v1/split/models names, on the device",
        )
    if fields.get("use_he") or fields.get("expert_name") is not None:
        raise SplitError(
            "adapter_host",
            "this server applies no adapter, with or without encryption: the device asks the "
            "adapter host itself, so that no server of the market sees its keys and ciphertext; "
            "leave out use_he and expert_name",
        )
    if not isinstance(kind, str) or kind not in REQUESTS:
        raise SplitError("bad_message", f"the message's type is none of {', '.join(REQUESTS)}")
    return _check(REQUESTS[kind], fields)


def _check(kind: type[T], fields: dict[str, Any]) -> T:
    try:
        return kind.read(fields)
    except InvalidInput as error:
        raise SplitError("bad_message", f"{error!s:.300}") from None
