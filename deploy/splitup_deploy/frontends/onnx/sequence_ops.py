"""ONNX operations on sequences: attention, rotary positions, and recurrent layers, unrolled."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from splitup_deploy.frontends.onnx.tinygrad_ops import OnnxDataType

MAX_UNROLLED: Final = 1_024  # steps of a recurrent layer; each is about twenty operations
_FORBIDDEN: Final = -float("inf")


def compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> tuple[Tensor, ...]:
    """Return the result, the keys and values with the past, and the scores that the mode selects.

    The result is zero for a query that may see no key. A causal query sees the keys up to its own
    place, which is counted from the end of the past, or of the valid keys (``nonpad_kv_seqlen``).
    Source: https://onnx.ai/onnx/operators/onnx__Attention.html.
    """
    flat = q.ndim == 3
    if flat:
        if not q_num_heads or not kv_num_heads:
            raise ValueError("three axes need q_num_heads and kv_num_heads")
        q, k, v = (
            x.reshape(x.shape[0], x.shape[1], heads, -1).permute(0, 2, 1, 3)
            for x, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    if past_key is not None and past_value is not None:
        k, v = past_key.cat(k, dim=2), past_value.cat(v, dim=2)
    keys, values = k, v
    if (groups := int(q.shape[1]) // int(k.shape[1])) > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    root = math.sqrt(1.0 / math.sqrt(int(q.shape[3])) if scale is None else scale)
    scores = (q * root) @ (k * root).transpose(-1, -2)
    shown = scores
    if softcap > 0:
        scores = (scores / softcap).tanh() * softcap
    if qk_matmul_output_mode == 1:
        shown = scores
    past = 0 if past_key is None else int(past_key.shape[2])
    window = (left_window_size, right_window_size)
    allowed = _find_allowed(q, k, past, nonpad_kv_seqlen, bool(is_causal), window)
    if attn_mask is not None:
        seen, bias = _read_mask(attn_mask, int(k.shape[2]))
        allowed = seen if allowed is None else allowed & seen
        if bias is not None:
            scores = scores + bias
    if allowed is not None:
        scores = allowed.where(scores, _FORBIDDEN)
    if qk_matmul_output_mode == 2:
        shown = scores
    scores = scores.contiguous()
    if softmax_precision is not None:
        scores = scores.cast(OnnxDataType(softmax_precision).to_dtype())
    weights = scores.softmax(-1) if allowed is None else _compute_masked_softmax(scores)
    weights = weights.cast(q.dtype)
    if qk_matmul_output_mode == 3:
        shown = weights
    result = weights @ v
    if flat:
        result = result.permute(0, 2, 1, 3).flatten(2)
    return result, keys, values, shown.cast(q.dtype)


def _read_mask(mask: Tensor, keys: int) -> tuple[Tensor, Tensor | None]:
    """Return which of the keys a mask allows, and what a mask of numbers adds to the scores.

    A mask for fewer keys forbids the rest.
    """
    missing = keys - int(mask.shape[-1])
    kept: Tensor | None = None
    if missing > 0:
        padding = (*((0, 0),) * (mask.ndim - 1), (0, missing))
        kept = mask.const_like(1).cast(dtypes.bool).pad(padding)
        mask = mask.pad(padding)
    if mask.dtype == dtypes.bool:
        return mask, None
    bias = mask if kept is None else kept.where(mask, _FORBIDDEN)
    seen = bias != _FORBIDDEN
    return seen, seen.where(bias, 0.0)


def _compute_masked_softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last axis; zeros where every score is forbidden."""
    top = scores.max(-1, keepdim=True)
    top = (top == _FORBIDDEN).where(0.0, top)
    powers = (scores - top).exp()
    total = powers.sum(-1, keepdim=True)
    return powers / (total == 0).where(1.0, total)


def _find_allowed(
    q: Tensor,
    k: Tensor,
    past: int,
    valid: Tensor | None,
    causal: bool,
    window: tuple[int, int],
) -> Tensor | None:
    """Return which keys a query may see, for [batch or 1, 1, queries, keys]; None is all."""
    rows, columns = int(q.shape[2]), int(k.shape[2])
    column = Tensor.arange(columns).reshape(1, 1, 1, columns)
    place = Tensor.arange(rows).reshape(1, 1, rows, 1) + past
    allowed: list[Tensor] = []
    if valid is not None:
        valid = valid.reshape(-1, 1, 1, 1).cast(dtypes.int32)
        place = Tensor.arange(rows).reshape(1, 1, rows, 1) + valid - rows
        allowed.append(column < valid)
    if causal:
        allowed.append(column <= place)
    if window[0] >= 0:
        allowed.append(column >= place - window[0])
    if window[1] >= 0:
        allowed.append(column <= place + window[1])
    if not allowed:
        return None
    return functools.reduce(operator.and_, allowed)


def rotate_embedding(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Return x with the first elements of every head rotated by their positions."""
    shape = x.shape
    if x.ndim == 4:
        x = x.permute(0, 2, 1, 3)
    else:
        x = x.unflatten(-1, (num_heads, int(x.shape[-1]) // num_heads))
    size = int(x.shape[-1])
    dims = rotary_embedding_dim or size
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    cosine, sine = (table[..., : dims // 2].unsqueeze(2) for table in (cos_cache, sin_cache))
    turned = x[..., :dims]
    first, second = (
        (turned[..., ::2], turned[..., 1::2])
        if interleaved
        else (turned[..., : dims // 2], turned[..., dims // 2 :])
    )
    pair = (first * cosine - second * sine, first * sine + second * cosine)
    result = (
        Tensor.stack(*pair, dim=-1).flatten(-2) if interleaved else pair[0].cat(pair[1], dim=-1)
    )
    if dims < size:
        result = result.cat(x[..., dims:], dim=-1)
    return result.permute(0, 2, 1, 3) if len(shape) == 4 else result.reshape(shape)


def reverse_sequence(
    x: Tensor, sequence_lens: Tensor, batch_axis: int = 1, time_axis: int = 0
) -> Tensor:
    """Return x with the first steps of every sequence in reverse order, as many as it has."""
    if (time_axis, batch_axis) == (1, 0):
        return reverse_sequence(x.transpose(0, 1), sequence_lens).transpose(0, 1)
    if (time_axis, batch_axis) != (0, 1):
        raise ValueError(f"time axis {time_axis} and batch axis {batch_axis}")
    steps = Tensor.arange(int(x.shape[0])).reshape(-1, 1)
    lengths = sequence_lens.reshape(1, -1).cast(dtypes.int32)
    index = (steps < lengths).where(lengths - 1 - steps, steps)
    return x.gather(0, index.reshape(*index.shape, *(1,) * (x.ndim - 2)).expand(x.shape))


# ---- recurrent layers ----------------------------------------------------------------------------

# takes x @ W^T + bias and the states; returns the new states, of which the first is the output
_Cell = Callable[[Tensor, list[Tensor]], list[Tensor]]


def compute_rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return all outputs and the last one of a plain recurrent layer."""
    kinds = _check(options, ("Tanh",), w.shape[0])
    functions = {"Tanh": Tensor.tanh, "Relu": Tensor.relu, "Sigmoid": Tensor.sigmoid}

    def make(direction: int) -> _Cell:
        activation = functions[kinds[direction]]

        def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
            return [activation(gates + states[0] @ r[direction].T)]

        return step

    return _unroll(x, w, b, 1, lengths, [initial_h], make, options)


def compute_gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    linear_before_reset: int = 0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return all outputs and the last one of gated recurrent units."""
    _check(options, ("Sigmoid", "Tanh"), w.shape[0])
    size = int(r.shape[-1])

    def make(direction: int) -> _Cell:
        gate, update = r[direction][: 2 * size], r[direction][2 * size :]
        bias = None if b is None else b[direction][5 * size :]

        def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
            h = states[0]
            both = (gates[:, : 2 * size] + h @ gate.T).sigmoid().contiguous()
            z, reset = both[:, :size], both[:, size:]
            if linear_before_reset:
                inner = h @ update.T if bias is None else h @ update.T + bias
                fresh = (gates[:, 2 * size :] + reset * inner).tanh()
            else:
                inner = (reset * h) @ update.T
                fresh = (gates[:, 2 * size :] + (inner if bias is None else inner + bias)).tanh()
            return [(1.0 - z) * fresh + z * h]

        return step

    return _unroll(x, w, b, 3, lengths, [initial_h], make, options, hidden_bias=2 * size)


def compute_lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return all outputs, the last one and the last cells of long short-term memory."""
    _check(options, ("Sigmoid", "Tanh", "Tanh"), w.shape[0])
    size = int(r.shape[-1])

    def make(direction: int) -> _Cell:
        def peep(part: int, cell: Tensor) -> Tensor | float:
            return 0.0 if p is None else p[direction][part * size : (part + 1) * size] * cell

        def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
            h, cell = states
            gates = (gates + h @ r[direction].T).contiguous()
            i, o, f, c = (gates[:, part * size : (part + 1) * size] for part in range(4))
            cell = (f + peep(2, cell)).sigmoid() * cell + (i + peep(0, cell)).sigmoid() * c.tanh()
            cell = cell.contiguous()
            return [(o + peep(1, cell)).sigmoid() * cell.tanh(), cell]

        return step

    return _unroll(x, w, b, 4, lengths, [initial_h, initial_c], make, options)


def _check(options: dict[str, Any], usual: Sequence[str], directions: int) -> list[str]:
    """Return the activations per direction; raise for attributes that are not supported."""
    kinds: list[str] = [str(kind) for kind in options.get("activations", list(usual) * directions)]
    if len(usual) > 1 and kinds != list(usual) * directions:
        raise NotImplementedError(f"activations {', '.join(kinds)}")
    if len(kinds) != directions * len(usual):
        raise ValueError("as many activations as directions are wanted")
    if bad := set(kinds) - {"Tanh", "Relu", "Sigmoid"}:
        raise NotImplementedError(f"activation {sorted(bad)[0]:.40}")
    for name in ("activation_alpha", "activation_beta", "clip", "input_forget"):
        if options.get(name):
            raise NotImplementedError(f"attribute {name}")
    return kinds


def _unroll(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    gates: int,
    lengths: Tensor | None,
    initial: Sequence[Tensor | None],
    make: Callable[[int], _Cell],
    options: dict[str, Any],
    hidden_bias: int | None = None,
) -> tuple[Tensor, ...]:
    """Run the cells over the sequence [length, batch, features], or [batch, length, …] (layout).

    ``hidden_bias``: from this row on a cell adds the recurrent bias itself.
    """
    if options.get("layout", 0):
        x = x.transpose(0, 1)
        initial = [None if state is None else state.transpose(0, 1) for state in initial]
    steps, batch = int(x.shape[0]), int(x.shape[1])
    directions, rows = int(w.shape[0]), int(w.shape[1])
    size = rows // gates
    if steps > MAX_UNROLLED:
        raise NotImplementedError(f"a sequence of {steps} steps; at most {MAX_UNROLLED} are")
    kind = options.get("direction", "forward")
    if {"forward": 1, "reverse": 1, "bidirectional": 2}.get(kind) != directions:
        raise ValueError(f"direction '{kind:.40}' with {directions} sets of weights")
    ends: list[list[Tensor]] = []
    outputs: list[Tensor] = []
    for direction in range(directions):
        backwards = kind == "reverse" or direction == 1
        inner = x @ w[direction].T
        if b is not None:
            second = b[direction][rows:]
            if hidden_bias is not None:
                second = second[:hidden_bias].pad((0, rows - hidden_bias))
            inner = inner + b[direction][:rows] + second
        inner = inner.contiguous()
        zero = Tensor.zeros(batch, size, dtype=x.dtype, buffer=False)
        states = [zero if state is None else state[direction] for state in initial]
        cell, made = make(direction), {}
        for step in reversed(range(steps)) if backwards else range(steps):
            fresh = cell(inner[step], states)
            live = None if lengths is None else (lengths > step).reshape(batch, 1)
            made[step] = fresh[0].contiguous() if live is None else live.where(fresh[0], 0.0)
            if live is None:
                states = [made[step], *fresh[1:]]
            else:
                pairs = zip(fresh, states, strict=True)
                states = [live.where(new, old).contiguous() for new, old in pairs]
        outputs.append(Tensor.stack(*(made[step] for step in range(steps))))
        ends.append(states)
    y = Tensor.stack(*outputs, dim=1)
    last = [Tensor.stack(*(states[i] for states in ends)) for i in range(len(initial))]
    if options.get("layout", 0):
        y = y.permute(2, 0, 1, 3)
        last = [state.transpose(0, 1) for state in last]
    return (y, *last)
