"""Keep the guard of a load whose value is part of another load's address.

Where a graph pads or selects a value that it looked up, the padding guards both loads: that of the
row and that of its number. tinygrad 0.14 simplifies the row's address under the condition that the
row is read, and drops the same condition from the number's load within. But code computes an
address, and so loads the number, whether or not the row is read; the number would be read outside
its buffer. tinygrad leaves such addresses alone in one of two places
(``tinygrad.uop.symbolic.gated_given_valid``); this makes it two.
"""

from __future__ import annotations

from typing import Any

from tinygrad.codegen.late import coalesce
from tinygrad.uop.ops import Ops, UOp


def install_nested_guards() -> None:
    """Make tinygrad leave an address alone that depends on loaded values."""
    original = coalesce.simplify_valid_load
    if getattr(original, "splitup", False):
        return

    def simplify(buffer: UOp, index: UOp, guard: UOp) -> Any:
        if index.op_in_backward_slice_with_self(Ops.INDEX):
            return None
        return original(buffer, index, guard)

    simplify.splitup = True  # type: ignore[attr-defined]
    coalesce.simplify_valid_load = simplify
