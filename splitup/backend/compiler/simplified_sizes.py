"""Keep what tinygrad simplified: of a model's sizes and places the same come thousands of times.

Simplifying them again takes a third of the time of tracing a model, and a tenth of compiling one.
"""

from __future__ import annotations

from typing import Final

from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops, UOp

_MAX_KEPT: Final = 4_096  # expressions; a model has some hundreds
_simplify: Final = UOp.simplify
_kept: Final[dict[UOp, UOp]] = {}


def keep_simplified() -> None:
    """Make tinygrad keep them in this process."""
    UOp.simplify = _simplify_once


def _simplify_once(self: UOp, tracked: bool = False) -> UOp:
    """Return the simplified expression; equal expressions are one object."""
    if tracked or self.op is Ops.CONST:
        return _simplify(self, tracked)
    if (found := _kept.get(self)) is None:
        found = _simplify(self)
        # an expression that is kept would keep its buffer's memory, too
        if not any(map(_has_memory, self.toposort())):
            if len(_kept) >= _MAX_KEPT:
                _kept.clear()
            _kept[self] = found
    return found


def _has_memory(uop: UOp) -> bool:
    """Return whether it is a buffer, and not a variable."""
    return uop.op is Ops.BUFFER and uop.arg.addrspace is not AddrSpace.ALU
