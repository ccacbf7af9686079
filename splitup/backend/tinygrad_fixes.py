"""Mend two faults of tinygrad 0.14's code generator, by which kernels left their buffers.

**The guard of a load within an address.** Where a graph pads or selects a value that it looked up,
the padding guards both loads: that of the row and that of its number. tinygrad simplifies the row's
address under the condition that the row is read, and drops the same condition from the number's
load within. But code computes an address, and so loads the number, whether or not the row is read.
tinygrad leaves such addresses alone in one of two places (``symbolic.gated_given_valid``); this
makes it two.

**The places of arguments.** A kernel takes its buffers, then its variables. tinygrad numbers the
variables from the number of buffers on; a buffer that turns out not to be needed is not counted,
and the others keep their numbers. So a variable could have the number of a buffer, and each was
taken for the other. Here variables have numbers above those of all buffers.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Final

from tinygrad import codegen
from tinygrad.codegen.late import coalesce
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

_FIRST_VARIABLE: Final = 2**30  # more than a kernel takes buffers


def install_fixes() -> None:
    """Mend tinygrad in this process, once."""
    original = coalesce.simplify_valid_load
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def simplify(buffer: UOp, index: UOp, guard: UOp) -> Any:
        if index.op_in_backward_slice_with_self(Ops.INDEX):
            return None
        return original(buffer, index, guard)

    coalesce.simplify_valid_load = simplify
    codegen.pm_number_params = PatternMatcher([(UPat(Ops.PARAM, name="param"), _number_variable)])


def _number_variable(ctx: list[int], param: UOp) -> UOp | None:
    """Give a variable the next number; ``ctx`` holds how many parameters have one."""
    if param.arg.slot != -1:
        return None
    ctx[0] += 1
    return param.replace(arg=replace(param.arg, slot=_FIRST_VARIABLE + ctx[0]))
