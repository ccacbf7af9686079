"""One step as arrays of fixed shapes, for a graph without control flow, slices or addresses.

Small devices run such graphs. The model's three inputs of a step (``splitup.decode.step``) become

    input_ids       int64 [batch, block]
    positions       int64 [batch, block]
    kv_cache        [layers, 2, batch, kv_heads, max_len, head_dim]   keys, then values
    attention_mask  [layers, batch, 1, block, max_len + block]        0 sees, -10000 does not
    insert_matrix   [layers, batch, 1, max_len, block]                1: block row -> cache row
    keep_mask       [layers, batch, 1, max_len, 1]                    1 keeps a cache row

and the graph returns ``logits [batch, block, vocab]`` and the cache ``kv_cache * keep_mask +
insert_matrix @ new rows``. A step that commits keeps all but its own rows and inserts these; one
that iterates keeps all and inserts nothing. The mask is that of the step's layout: every row sees
the cache before the start, and of the new rows those that the layout names. So rows of a prompt
never see a later block. The batch is 1. A step may have fewer rows than the block: the others see
nothing, and nothing of them stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput

HIDDEN: Final = -10_000.0  # exp() of it is 0, and float16 holds it
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StaticShape:
    """The sizes of a static step. ``windows``: by layer, how many positions it sees; 0 is all."""

    layers: int
    kv_heads: int
    head_dim: int
    max_len: int
    block: int
    windows: tuple[int, ...] = ()

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the graph's inputs, by name in their order."""
        layers, block, length = self.layers, self.block, self.max_len
        return {
            "input_ids": (1, block),
            "positions": (1, block),
            "kv_cache": (layers, 2, 1, self.kv_heads, length, self.head_dim),
            "attention_mask": (layers, 1, 1, block, length + block),
            "insert_matrix": (layers, 1, 1, length, block),
            "keep_mask": (layers, 1, 1, length, 1),
        }

    def count_cache_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the cache: layers x 2 x batch x kv_heads x max_len x head_dim."""
        return 2 * self.layers * self.kv_heads * self.max_len * self.head_dim * item_bytes

    def new_cache(self, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Return an empty cache."""
        return np.zeros(self.inputs["kv_cache"], dtype)


def make_static_inputs(
    arrays: Arrays,
    shape: StaticShape,
    *,
    commits: bool = True,
    dtype: npt.DTypeLike = np.float32,
) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a static step, without the cache, for a step of the model.

    ``arrays`` are what ``splitup.decode.step.make_arrays`` gives. Raises InvalidInput for a step of
    more rows than the block, or one that ends behind ``max_len``.
    """
    layout, tokens = arrays["layout"], arrays["tokens"]
    rows, start, chunk = len(tokens), int(layout[0, 1]), (layout.shape[1] - 2) // 2
    if not 1 <= rows <= shape.block:
        raise InvalidInput(
            f"a step has {rows} rows, and the model was exported for {shape.block}: "
            f"export it with --block {rows}"
        )
    places = layout[:, 0]
    last = max(start + rows, int(places.max()) + 1)
    if last > shape.max_len or min(start, int(places.min())) < 0:
        raise InvalidInput(
            f"the text needs {last} positions, and the model was exported for {shape.max_len}: "
            f"shorten it, or export the model with --max-len {last}"
        )
    result = {
        name: np.zeros(size, np.int64 if name in ("input_ids", "positions") else dtype)
        for name, size in shape.inputs.items()
        if name != "kv_cache"
    }
    result["input_ids"][0, :rows], result["positions"][0, :rows] = tokens, places
    result["keep_mask"][:] = 1
    if commits:
        new = np.arange(rows)
        result["keep_mask"][..., start : start + rows, :] = 0
        result["insert_matrix"][..., start + new, new] = 1
    mask = result["attention_mask"]
    mask[:] = HIDDEN
    mask[:, 0, 0, :rows, :start] = 0
    sources = layout[:, 2 : 2 + chunk]
    seeing, at = np.nonzero(sources)
    seen = sources[seeing, at] - 1
    if seen.size and seen.max() >= rows:
        raise InvalidInput(f"a row of a step sees row {seen.max()}, and the step has {rows}")
    mask[:, 0, 0, seeing, shape.max_len + seen] = 0
    for layer, window in enumerate(shape.windows):
        if window:
            key_places = np.arange(shape.max_len + shape.block)
            key_places[shape.max_len : shape.max_len + rows] = places
            far = places[:, None] >= key_places[None, :] + window
            mask[layer, 0, 0, :rows][far] = HIDDEN
    return result


def keep_rows(cache: npt.NDArray[Any], layout: npt.NDArray[np.int32]) -> None:
    """Move the rows of the step before that stay behind the others, as the layout says.

    ``cache`` is a static step's, and is changed.
    """
    start, chunk = int(layout[0, 1]), (layout.shape[1] - 2) // 2
    for column, shift in enumerate(layout[0, 2 + chunk :]):
        place = start - chunk + column
        if shift > 0 and 0 <= place and place + shift < cache.shape[4]:
            cache[..., place, :] = cache[..., place + shift, :]
