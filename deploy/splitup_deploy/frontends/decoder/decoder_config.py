"""The numbers and variations that describe a decoder-only language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitup_deploy.frontends.decoder.rotary import Rope


@dataclass(frozen=True, slots=True)
class Local:
    """The layers that see only the last ``window`` positions, their own included."""

    layers: frozenset[int]
    window: int
    rope: Rope


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The layers with a gated delta rule in the place of attention, and its sizes.

    ``taps`` is the length of the convolution. A memory decays as a whole, or ``by_channel`` of its
    keys. Of v value heads for every key head, head h has key head h div v. ``converted``: it is
    h mod key_heads, and what A_log is the logarithm of is stored, negated (GGUF's converter).
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_channel: bool = False
    converted: bool = False

    @property
    def channels(self) -> int:
        """Return how many values of a row the convolution takes: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention that keeps keys and values compressed
    (``splitup_deploy.frontends.decoder.latent_attention``).

    A cache row has ``rank`` compressed elements, then ``turned`` ones of a key that all heads
    share; these turn, 2i and 2i + 1 together. Without ``query_rank`` queries are not compressed.
    ``split``: what expands keys and values is stored as two weights.
    """

    rank: int
    turned: int
    value_dim: int
    query_rank: int | None
    norm_epsilon: float
    split: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The numbers that shape a decoder, and how it varies from Llama's (the defaults)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    local: Local | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # query and key heads are normed before they turn
    wide_qk_norm: bool = False  # the same, but all query heads as one row and all key heads as one
    fused: bool = False  # q, k, v and gate, up are stored as one tensor each
    output_gate: bool = False  # a query head is stored with a gate behind it, of what it reads
    unit_norms: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # what attention and MLP add is normed as well
    activation: Literal["silu", "gelu-tanh"] = "silu"
    attention_scale: float | None = None  # of the scores; None is head_dim^-0.5
    attention_cap: float | None = None  # scores s become cap * tanh(s / cap)
    logit_cap: float | None = None
    embedding_scale: float = 1.0
