"""The numbers and variations that describe a decoder-only language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from splitup.graph.manifest import DiffusionInfo, ImageInfo
from splitup_deploy.frontends.decoder.rotary import Rope
from splitup_deploy.frontends.decoder.row_operations import Activation

PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Local:
    """Layers that see only the last ``window`` positions, their own included.

    ``aligned``: of these only the ones behind the last multiple of ``window``.
    """

    layers: frozenset[int]
    window: int
    rope: Rope
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class Global:
    """Attention of the layers without a window, where its heads are others than those with one.

    ``values_are_keys``: there is no projection of values; they are the keys before norm and rope.
    """

    kv_heads: int
    head_dim: int
    values_are_keys: bool = False


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Layers that attend to the keys and values of another one, and project none of their own.

    The lender is the one of ``lenders`` that has a window, or none, as they have. ``double_mlp``:
    their MLP is twice as wide.
    """

    layers: frozenset[int]
    lenders: frozenset[int]
    double_mlp: bool = False


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """A vector of ``size`` for every layer and token, which the layer adds behind its MLP.

    It is the mean, times sqrt(2), of one looked up in a table of ``vocab`` tokens and one computed
    from the token's embedding.
    """

    size: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The layers with a gated delta rule instead of attention, and its sizes.

    ``taps`` is the length of the convolution. A memory decays as a whole, or by key channel
    (``by_channel``). With v value heads for every key head, value head h uses key head h div v.
    ``exponentiated``: the file holds -exp(A_log) instead of A_log, as those of GGUF. ``converted``:
    in the order of GGUF's converter value head h uses key head h mod key_heads. ``grouped``:
    queries, keys, values and gates are one projection, of every key head in turn.
    ``grouped_rates``: strengths and decays are another.
    ``selective``: a state space (Mamba-2) instead of the delta rule. ``activation`` is that of the
    convolution.
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_channel: bool = False
    exponentiated: bool = False
    converted: bool = False
    grouped: bool = False
    grouped_rates: bool = False
    selective: bool = False
    conv_bias: bool = False
    bias: bool = False  # of the projections, if ``selective``
    activation: Activation = "silu"

    @property
    def channels(self) -> int:
        """Return the number of values of a row in the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Indexer:
    """What chooses a row's ``count`` positions (``sparse_positions``), with ``heads`` of ``size``.

    ``neighbours``: rope rotates element 2i with 2i + 1.
    """

    heads: int
    size: int
    count: int
    neighbours: bool


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (``splitup_deploy.frontends.decoder.latent_attention``).

    ``indexer`` chooses the positions that a row sees; without it rows see all of them.

    A cache row has ``rank`` compressed elements, then ``turned`` elements of a key that all heads
    share; rope rotates these, element 2i with 2i + 1. Without ``query_rank`` queries are not
    compressed. ``split``: the expansions of keys and of values are two weights in the file.
    """

    rank: int
    turned: int
    value_dim: int
    query_rank: int | None
    norm_epsilon: float
    split: bool = False
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """Queries that grow with position p, by 1 + rate ln(1 + floor((p + offset) / positions)).

    ``unturned_only``: those of layers without rope.
    """

    rate: float
    positions: int
    offset: int = 0
    unturned_only: bool = False


@dataclass(frozen=True, slots=True)
class Clamped:
    """The activation (up + 1) gate sigmoid(alpha gate), with gate and up bounded by ``limit``.

    A gate is bounded above, up on both sides.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Router:
    """How a row's experts are chosen and weighted.

    ``renormalised``: the gates of a row's chosen experts add up to one. ``scale`` multiplies them
    after that. ``biased``: the choice, but not the gates, uses scores plus a bias of every expert.
    With several ``groups`` of neighbouring experts, only experts in the ``groups_taken`` best
    groups can be chosen; a group is ranked by the sum of its ``group_best`` best experts.
    ``name`` is its layer; ``linear_bias``: that has a bias, which changes the gates as well.
    ``scaled``: rows are normalised and multiplied by "scale" [hidden] / sqrt(hidden) before, gates
    by "per_expert_scale" [experts] at the end; both weights stand beside the layer.
    ``jitter`` is that of a sparse mixer (arXiv 2409.12136, without sampling): the experts are
    chosen one after the other, and a gate is the softmax over those that are left and differ from
    the best one by at most 2 jitter, relatively.
    """

    scoring: Literal["softmax", "sigmoid", "mixer"] = "softmax"
    name: str = "gate"
    linear_bias: bool = False
    scaled: bool = False
    jitter: float = 0.0
    renormalised: bool = False
    scale: float = 1.0
    biased: bool = False
    groups: int = 1
    groups_taken: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared experts: one MLP for every row, the ``module`` of a block.

    ``gated``: its output is multiplied by the sigmoid of another projection, ``module``_gate.
    """

    intermediate: int
    module: str
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of all layers except ``dense_layers``, and the names of their weights.

    ``prefix`` is their module in a block; ``names`` are gate, up and down projection, or the
    projection whose rows are of gate and up in turn, and down. ``biased``: they have biases.
    ``gated_input``: a gate multiplies what its expert reads, not what it gives. ``latent``: experts
    read and write rows of this width; projections lead there and back (fc1 and fc2_latent_proj).
    ``beside_dense``: every row passes the dense MLP as well. Then router and experts read the rows
    before the MLP's norm, by norms of their own, and what both give is normalised and added.
    """

    count: int
    active: int
    intermediate: int
    router: Router
    prefix: str = "mlp"
    names: tuple[str, ...] = PROJECTIONS
    dense_layers: frozenset[int] = frozenset()
    shared: Shared | None = None
    biased: bool = False
    gated_input: bool = False
    latent: int | None = None
    beside_dense: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes of a decoder, and its variations; the defaults are Llama's.

    What differs between layers stands in sets of layers, here or in a part of it: layers that no
    set tells apart are traced once (``splitup_deploy.frontends.decoder.repeated_layers``).
    """

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
    wide: Global | None = None  # ``kv_heads`` and ``head_dim`` are then those of local layers
    borrowed: Borrowed | None = None
    token_vectors: TokenVectors | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    experts: Experts | None = None
    diffusion: DiffusionInfo | None = None  # how texts are written; changes no step
    images: ImageInfo | None = None  # rows of images replace those of their tokens
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # query and key heads are normalised before rope
    value_norm: bool = False  # value heads are normalised, without a weight
    wide_qk_norm: bool = False  # the same, all query heads as one row and all key heads as one
    fused: bool = False  # q, k, v are one tensor in the file, and gate, up another
    output_gate: bool = False  # after every query head comes a gate for that head's output
    unit_norms: bool = False  # norms multiply by 1 + weight
    layer_norms: bool = False  # norms subtract the mean before
    norm_bias: bool = False  # norms add a bias
    parallel: bool = False  # attention and MLP have one input, and both are added to it
    pre_norms: bool = True  # the inputs of attention and MLP are normalised
    post_norms: bool = False  # the outputs of attention and MLP are normalised
    unturned: frozenset[int] = frozenset()  # layers without rope
    neighbours: bool = False  # rope rotates element 2i with 2i + 1
    late_qk_norm: bool = False  # query and key heads are brought to one length after rope
    sinks: bool = False  # every query head has a score of its own that no value belongs to
    growth: Growth | None = None
    activation: Activation | Clamped = "silu"
    gated: bool = True  # gate and up are two projections; otherwise both are the one called up
    mlp_layers: frozenset[int] | None = None  # are an MLP alone, and all others attention alone
    attention_scale: float | None = None  # factor of the scores; None is head_dim^-0.5
    attention_cap: float | None = None  # scores s become cap * tanh(s / cap)
    head_bias: bool = False
    logit_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    layer_scales: bool = False  # what a layer gives is multiplied by a number of its own

    def is_local(self, layer: int) -> bool:
        """Say whether a layer has a window."""
        return self.local is not None and layer in self.local.layers

    def get_heads(self, layer: int) -> Global:
        """Return the key-value heads of a layer's attention."""
        if self.wide is None or self.is_local(layer):
            return Global(self.kv_heads, self.head_dim)
        return self.wide

    def get_intermediate(self, layer: int) -> int:
        """Return the width of a layer's dense MLP."""
        borrowed = self.borrowed
        is_double = borrowed is not None and borrowed.double_mlp and layer in borrowed.layers
        return self.intermediate * (2 if is_double else 1)
