from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenNode(_message.Message):
    __slots__ = ("token_id", "log_prob", "children")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    log_prob: float
    children: _containers.RepeatedCompositeFieldContainer[TokenNode]
    def __init__(self, token_id: _Optional[int] = ..., log_prob: _Optional[float] = ..., children: _Optional[_Iterable[_Union[TokenNode, _Mapping]]] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("tokens", "parents", "log_probs", "roots")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    roots: _containers.RepeatedCompositeFieldContainer[TokenNode]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., roots: _Optional[_Iterable[_Union[TokenNode, _Mapping]]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "seed", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "prompt_length")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    seed: int
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    prompt_length: int
    def __init__(self, temperature: _Optional[float] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., prompt_length: _Optional[int] = ...) -> None: ...

class TelemetryMetadata(_message.Message):
    __slots__ = ("span_id", "wall_time_ns", "model_time_ns")
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    MODEL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    span_id: int
    wall_time_ns: int
    model_time_ns: int
    def __init__(self, span_id: _Optional[int] = ..., wall_time_ns: _Optional[int] = ..., model_time_ns: _Optional[int] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("session_id", "expected_prefix_length", "digest")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    expected_prefix_length: int
    digest: int
    def __init__(self, session_id: _Optional[str] = ..., expected_prefix_length: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class GenerateDraftsRequest(_message.Message):
    __slots__ = ("prefix", "tokens", "guessed", "sampling", "max_nodes", "max_depth", "telemetry")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GUESSED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    tokens: _containers.RepeatedScalarFieldContainer[int]
    guessed: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_nodes: int
    max_depth: int
    telemetry: TelemetryMetadata
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., guessed: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., telemetry: _Optional[_Union[TelemetryMetadata, _Mapping]] = ...) -> None: ...

class GenerateDraftsResponse(_message.Message):
    __slots__ = ("drafts", "telemetry")
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    drafts: TokenTree
    telemetry: TelemetryMetadata
    def __init__(self, drafts: _Optional[_Union[TokenTree, _Mapping]] = ..., telemetry: _Optional[_Union[TelemetryMetadata, _Mapping]] = ...) -> None: ...

class VerifyDraftsRequest(_message.Message):
    __slots__ = ("prefix", "kept", "tokens", "drafts", "sampling", "telemetry")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    kept: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    drafts: TokenTree
    sampling: Sampling
    telemetry: TelemetryMetadata
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., kept: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Union[TokenTree, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., telemetry: _Optional[_Union[TelemetryMetadata, _Mapping]] = ...) -> None: ...

class VerifyDraftsResponse(_message.Message):
    __slots__ = ("accepted", "telemetry")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    telemetry: TelemetryMetadata
    def __init__(self, accepted: _Optional[_Iterable[int]] = ..., telemetry: _Optional[_Union[TelemetryMetadata, _Mapping]] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("model_id", "vocabulary", "context", "max_rows", "sessions", "is_recurrent")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    IS_RECURRENT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    vocabulary: int
    context: int
    max_rows: int
    sessions: int
    is_recurrent: bool
    def __init__(self, model_id: _Optional[str] = ..., vocabulary: _Optional[int] = ..., context: _Optional[int] = ..., max_rows: _Optional[int] = ..., sessions: _Optional[int] = ..., is_recurrent: _Optional[bool] = ...) -> None: ...
