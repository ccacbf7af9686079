"""The step function of encoders, traced with tinygrad: whole texts in, a vector or score of each.

A step processes T rows, 1 to C: texts side by side, each at most ``context`` rows long, without
padding. ``splitup.decode.texts`` describes its inputs. A row sees the rows of its own text. It
finds them by their positions in the text, so a text's result is the same bytes wherever it stands
in a step and whatever stands beside it.

A family (``splitup_deploy.frontends.families``) is an ``Encoder``: how rows are computed from
tokens, and a reranker's score from a text's rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.decode.texts import LAYOUT_COLUMNS, SPAN_COLUMNS
from splitup_deploy.frontends.decoder.rotary import Rope, RopeTable
from splitup_deploy.frontends.decoder.row_operations import RowOperations, Weights, rotate_heads
from splitup_deploy.frontends.tracing import TracedModel, Tracer, tracing
from splitup_deploy.frontends.weight_sources import WeightSource


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """``context`` is the largest number of a text's tokens, ``chunk`` of a step's rows."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    context: int
    norm_epsilon: float

    @property
    def head_dim(self) -> int:
        """Return the elements of a head."""
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a text's rows become its vector: their mean, or the first one; then of length 1."""

    kind: Literal["mean", "cls"] = "mean"
    is_normalised: bool = False


class Encoder(Protocol):
    """One family of encoders with its configuration."""

    @property
    def sizes(self) -> EncoderSizes:
        """Return the sizes that all families have."""
        ...

    @property
    def takes_types(self) -> bool:
        """Return whether the second text of a pair has another token type."""
        ...

    def encode(self, step: EncoderStep) -> Tensor:
        """Return the last layer's rows [rows, hidden]."""
        ...

    def score(self, step: EncoderStep, x: Tensor) -> Tensor:
        """Return what a reranker says of each text [texts, 1], from the rows [rows, hidden]."""
        ...


def trace_encoder(
    encoder: Encoder, weights: Weights, pooling: Pooling | None, chunk: int | None = None
) -> TracedModel:
    """Trace a step of up to ``chunk`` rows: tokens, layout, texts -> vectors [R, hidden].

    Without ``pooling`` it is a reranker, with scores [R, 1]. The default of ``chunk`` is the
    context. Raises InvalidModel for a chunk that is less.
    """
    context = encoder.sizes.context
    chunk = context if chunk is None else chunk
    if not context <= chunk <= limits.MAX_CONTEXT:
        raise InvalidModel(
            f"a step of {chunk} rows does not hold a text of {context}; give a --chunk from "
            f"{context} on, or a smaller --context"
        )
    with tracing():
        tracer = Tracer()
        rows = tracer.symbol("T", chunk) if chunk > 1 else 1
        texts = tracer.symbol("R", chunk) if chunk > 1 else 1
        names = ("T", "R") if chunk > 1 else ("", "")
        specs = (
            TensorSpec("tokens", "int32", (chunk,), names[0]),
            TensorSpec("layout", "int32", (chunk, LAYOUT_COLUMNS), names[0]),
            TensorSpec("texts", "int32", (chunk, SPAN_COLUMNS), names[1]),
        )
        inputs = [tracer.input(spec) for spec in specs]
        step = EncoderStep(encoder.sizes, weights, tracer, rows, texts, chunk, *inputs)
        x = encoder.encode(step)
        if pooling is None:
            return tracer.finish({"scores": tracer.mark(encoder.score(step, x), "scores")}, {})
        vectors = step.take_first(x) if pooling.kind == "cls" else step.take_mean(x)
        if pooling.is_normalised:
            vectors = step.normalise(vectors)
        return tracer.finish({"vectors": tracer.mark(vectors, "vectors")}, {})


class EncoderStep(RowOperations):
    """One step while it is traced: what the families' parts have in common."""

    def __init__(
        self,
        sizes: EncoderSizes,
        weights: Weights,
        tracer: Tracer,
        rows: UOp | int,
        texts: UOp | int,
        chunk: int,
        tokens: Tensor,
        layout: Tensor,
        spans: Tensor,
    ) -> None:
        super().__init__(weights, tracer, rows)
        self.sizes, self.chunk, self.tokens = sizes, chunk, tokens
        self.texts = RowOperations(weights, tracer, texts)
        self._layout, self._spans = layout, spans

    def _column(self, column: int) -> Tensor:
        """Return a column of the layout: int32 [rows]."""
        return self._layout.shrink(((0, self.rows), (column, column + 1))).reshape(self.rows)

    @property
    def positions(self) -> Tensor:
        """Return the position of each row in its text: int32 [rows]."""
        return self._column(0)

    @property
    def types(self) -> Tensor:
        """Return the token type of each row, 0 or 1 for most models: int32 [rows]."""
        return self._column(3)

    def find_slots(self, window: int | None = None) -> Tensor:
        """Return the rows that each row sees, by position: int32 [rows, places].

        It is negative where there is none. The places are all positions of a text; with ``window``
        only so many before and after the row's own.
        """
        start, length = (self._column(column).reshape(self.rows, 1) for column in (1, 2))
        context = self.sizes.context
        if window is None or 2 * window + 1 >= context:
            place = self.tracer.iota(context).reshape(1, context)
            return (place < length).where(start + place, -1)
        near = self.tracer.iota(2 * window + 1).reshape(1, 2 * window + 1) - window
        place = self.positions.reshape(self.rows, 1) + near
        return ((place >= 0) & (place < length)).where(start + place, -1)

    # ---- layers --------------------------------------------------------------------------------

    def embed(self, index: Tensor, name: str, length: int) -> Tensor:
        """Return rows of a table [length, hidden]."""
        return self.select(
            index, length, self.tensor(self.weights.get(name, length, self.sizes.hidden))
        )

    def norm(self, x: Tensor, name: str, label: str, *, bias: bool = True) -> Tensor:
        """Return the layer norm of x [rows, hidden] (arXiv 1607.06450)."""
        return apply_layer_norm(self, x, name, self.sizes, label, bias=bias)

    def attend(
        self,
        qkv: Tensor,
        label: str,
        *,
        window: int | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of each text's rows to each other: [rows, hidden].

        ``qkv`` [rows, 3 heads, size] are queries, keys and values; ``bias`` as in ``attend_rows``.
        """
        s, mark = self.sizes, self.tracer.mark
        query = qkv[:, : s.heads].reshape(self.rows, s.heads, 1, 1, s.head_dim)
        fresh = qkv[:, s.heads :].reshape(self.rows, 2, s.heads, s.head_dim)
        # all rows that there may be, so that no lookup of a key needs a guard
        whole = self.tracer.lookup(mark(fresh, f"{label}: k, v"), self.tracer.iota(self.chunk))
        whole = mark(whole, f"{label}: all k, v")
        slots = mark(self.find_slots(window), f"{label}: rows seen")
        scale = 1.0 / math.sqrt(s.head_dim)
        return self.attend_rows(query, whole[:, 0], whole[:, 1], slots, scale, label, bias=bias)

    def rotate(self, heads: Tensor, count: int, rope: Rope, name: str, label: str) -> Tensor:
        """Return heads [rows, heads, size], the first ``count`` of them rotated by position."""
        spec = TensorSpec(name, "float32", (self.sizes.context, 2, rope.pairs))
        table = self.tracer.weight(WeightSource(spec, (RopeTable(rope, self.sizes.context),)))
        angles = self.select(self.positions, self.sizes.context, table)
        angles = self.tracer.mark(angles, f"{label}: rope angles")
        return Tensor.cat(rotate_heads(heads, count, angles), heads[:, count:], dim=1)

    # ---- texts ---------------------------------------------------------------------------------

    def _span(self, column: int) -> Tensor:
        """Return the first row of each text, or its length: int32 [texts, 1]."""
        return self._spans.shrink(((0, self.texts.rows), (column, column + 1)))

    def take_first(self, x: Tensor) -> Tensor:
        """Return the first row of each text [texts, hidden]."""
        index = self._span(0).reshape(self.texts.rows)
        return self.tracer.mark(self.tracer.lookup(x, index), "first rows")

    def take_mean(self, x: Tensor) -> Tensor:
        """Return the mean of each text's rows [texts, hidden]."""
        start, length = self._span(0), self._span(1)
        place = self.tracer.iota(self.sizes.context).reshape(1, self.sizes.context)
        index = (place < length).where(start + place, -1)
        index = self.tracer.mark(index, "rows of texts")
        total = self.tracer.mark(self.tracer.lookup(x, index).sum(1), "sums of rows")
        return self.tracer.mark(total / length.maximum(1), "means of rows")

    def normalise(self, vectors: Tensor) -> Tensor:
        """Return vectors [texts, hidden] divided by their lengths, as PyTorch's ``normalize``."""
        length = self.tracer.mark(vectors.square().sum(1, keepdim=True), "squares of lengths")
        return vectors / length.sqrt().maximum(1e-12)


def apply_layer_norm(
    on: RowOperations, x: Tensor, name: str, sizes: EncoderSizes, label: str, *, bias: bool = True
) -> Tensor:
    """Return the layer norm of x, [rows or texts, hidden]."""
    centred = on.tracer.mark(x - x.mean(1, keepdim=True), f"{label}: centred")
    variance = centred.square().mean(1, keepdim=True)
    result = centred * (variance + sizes.norm_epsilon).rsqrt()
    result = result * on.tensor(on.weights.get(f"{name}.weight", sizes.hidden))
    if bias:
        result = result + on.tensor(on.weights.get(f"{name}.bias", sizes.hidden))
    return on.tracer.mark(result, label)


def apply_tanh(x: Tensor) -> Tensor:
    """Return tanh(x), without overflow at either end."""
    return 1.0 - 2.0 * (1.0 + (2.0 * x).exp()).reciprocal()
