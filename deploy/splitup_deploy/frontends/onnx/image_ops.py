"""ONNX operations on pictures and volumes: resizing, pooling, sampling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from splitup_deploy.frontends.onnx.tinygrad_ops import onnx_ops


def resize_10(x: Tensor, scales: Sequence[float], mode: str = "nearest") -> Tensor:
    """Resize with the only coordinate transformation of opset 10 and of Upsample."""
    result: Tensor = onnx_ops["Resize"](
        x,
        scales=list(scales),
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    return result


def resize(
    x: Tensor,
    roi: Any = None,
    scales: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    """Resize; refuse the cases in which tinygrad's implementation differs."""
    mode = options.get("coordinate_transformation_mode", "half_pixel")
    if mode == "align_corners" and scales:
        last = x.shape[x.ndim - len(scales) :]
        if any(scale * int(n) % 1 for scale, n in zip(scales, last, strict=True)):
            raise NotImplementedError("align_corners with scales that give no whole size")
    return onnx_ops["Resize"](x, None, scales or None, sizes or None, **options)


def unpool_max(
    x: Tensor, places: Tensor, output_shape: Sequence[int] | None = None, **options: Any
) -> Tensor:
    """Return the values at the places from which MaxPool took them, with zeros elsewhere."""
    if output_shape is not None:
        raise NotImplementedError("an explicit output shape")
    return onnx_ops["MaxUnpool"](x, places, None, **options)


def space_to_depth(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Return x with square blocks of the picture moved into the channels."""
    to = "b (h1 w1 c) h w" if mode == "DCR" else "b (c h1 w1) h w"
    return x.rearrange(f"b c (h h1) (w w1) -> {to}", h1=blocksize, w1=blocksize)


def pool_lp(x: Tensor, p: int = 2, **options: Any) -> Tensor:
    """Return the Lp norm of every window."""
    count = math.prod(options["kernel_shape"])
    mean: Tensor = onnx_ops["AveragePool"](x.abs().pow(p), count_include_pad=1, **options)
    return (mean * count).pow(1.0 / p)


def sample_grid(
    x: Tensor,
    grid: Tensor,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Tensor:
    """Return x [batch, channels, …] at the places of ``grid`` [batch, …, axes], -1 to 1 each.

    A place lies between two samples along every axis; each corner adds its share.
    Source: https://onnx.ai/onnx/operators/onnx__GridSample.html.
    """
    if mode not in ("linear", "bilinear", "nearest"):
        raise NotImplementedError(f"mode {mode:.40}")
    batch, channels, *sizes = (int(size) for size in x.shape)
    corners: list[list[tuple[Tensor, Tensor]]] = []  # per axis: index and share
    for axis, size in enumerate(sizes):
        place = grid[..., len(sizes) - 1 - axis]
        place = (place + 1) * ((size - 1) / 2) if align_corners else ((place + 1) * size - 1) / 2
        if padding_mode == "reflection":
            low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
            place = _reflect(place, low, span)
        if padding_mode != "zeros":
            place = place.clip(0, size - 1)
        if mode == "nearest":
            corners.append([(place.round(), place.const_like(1))])
        else:
            low_index = place.floor()
            share = place - low_index
            corners.append([(low_index, 1 - share), (low_index + 1, share)])
    flat = x.reshape(batch, channels, -1)
    result: Tensor | None = None
    for corner in itertools.product(*corners):
        share, index = corner[0][1], corner[0][1].const_like(0).cast(dtypes.int32)
        for axis, (place, part) in enumerate(corner):
            size = sizes[axis]
            inside = (place >= 0) & (place <= size - 1)
            share = inside.where(part if axis == 0 else share * part, 0.0)
            index = index * size + place.clip(0, size - 1).cast(dtypes.int32)
        index = index.reshape(batch, 1, -1).expand(batch, channels, -1)
        value = flat.gather(2, index).reshape(batch, channels, *grid.shape[1:-1])
        value = value * share.unsqueeze(1)
        result = value if result is None else result + value
    if result is None:
        raise ValueError("no axes to sample along")
    return result


def _reflect(place: Tensor, low: float, span: float) -> Tensor:
    if span == 0:
        return place.const_like(low)
    distance = (place - low).abs()
    rest = distance - (distance / (2 * span)).floor() * (2 * span)
    return (rest > span).where(2 * span - rest, rest) + low
