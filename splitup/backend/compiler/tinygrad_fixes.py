"""Mend faults of tinygrad 0.14's code generator, by which kernels left their buffers.

**The guard of a load within an address.** Where a graph pads or selects a value that it looked up,
the padding guards both loads: that of the row and that of its number. tinygrad simplifies the row's
address under the condition that the row is read, and drops the same condition from the number's
load within. But code computes an address, and so loads the number, whether or not the row is read.
Here it simplifies the address without seeing what is loaded for it.

**The places of arguments.** A kernel takes its buffers, then its variables. tinygrad numbers the
variables from the number of buffers on; a buffer that turns out not to be needed is not counted,
and the others keep their numbers. So a variable could have the number of a buffer, and each was
taken for the other. Here variables have numbers above those of all buffers.

**Registers that were put on the stack.** On x86-64 a conversion to a smaller integer is no
instruction, only a use of the register as another dtype. Where the register had been put on the
stack, tinygrad used what it loaded again as the dtype that was put there, with a constant of the
other one: an instruction of 32 bits with a constant of 16, so that the next bytes of code were read
as instructions at the wrong place. Here it is used as the dtype that the instruction asks for.

**Small float16 numbers.** For a device without float16 tinygrad converts it by its bits, and takes
numbers below the normal range, of which weights have many, to be zero, and those that round down to
the largest float16 to be infinite. Here they are converted.

**The order of products and sums.** In C, tinygrad writes a * (b * c) without parentheses unless
b * c is used twice: then two kernels of one expression round differently. Here they are kept, but
not where an accumulator is added to: there numbers are added one after the other, each in the
operation that multiplies it. Without an accumulator, the compiler chooses which of two products it
adds so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tinygrad import codegen
from tinygrad.codegen.decomp import dtype as dtype_decompositions
from tinygrad.codegen.late import coalesce, regalloc
from tinygrad.dtype import DType, dtypes
from tinygrad.renderer.cstyle import CStyleLanguage
from tinygrad.uop.ops import Ops, PatternMatcher, UOp

_convert_normal: Final = dtype_decompositions.f2f
_clamp: Final = dtype_decompositions.f2f_clamp
_ATOM: Final = re.compile(r"-?[\w.]+")
_ACCUMULATOR: Final = "(*(buf"  # how tinygrad writes one in C
_FIRST_VARIABLE: Final = 2**30  # more than a kernel takes buffers


@functools.cache
def install_fixes() -> None:
    """Mend tinygrad in this process."""
    _change_first_rule(coalesce.indexing_simplify, _simplify_address)
    _change_first_rule(codegen.pm_number_params, _number_variable)
    _change_first_rule(regalloc.pm_regalloc_rewrite, _allocate_registers)
    dtype_decompositions.f2f = _convert_float
    dtype_decompositions.f2f_clamp = _clamp_float
    PatternMatcher.__add__.cache_clear()  # sums of rules that hold the old ones


def keep_order(renderer: Any) -> None:
    """Have a code generator for C keep the order of sums and products of floats."""
    if not isinstance(renderer, CStyleLanguage) or "code_for_op" in vars(renderer):
        return
    signs = {Ops.ADD: "+", Ops.MUL: "*"}
    kept = {op: functools.partial(_compose, renderer.code_for_op[op], signs[op]) for op in signs}
    renderer.code_for_op = {**renderer.code_for_op, **kept}


def _compose(usual: Callable[..., str], sign: str, left: str, right: str, dtype: DType) -> str:
    is_sum = sign == "+" and left.startswith(_ACCUMULATOR)
    if dtype not in dtypes.floats or is_sum or _ATOM.fullmatch(right):
        return usual(left, right, dtype)
    return f"({left}{sign}({right}))"


def _change_first_rule(rules: PatternMatcher, function: Callable[..., Any]) -> None:
    """Change rules in place: tinygrad copies the globals of whatever uses them."""
    (pattern, _), *others = rules.patterns
    rules.__init__([(pattern, function), *others])


def _convert_float(value: UOp, source: DType, target: DType, sat: bool = True) -> UOp:
    """Convert bits of a float dtype; of float16 also those below the normal range.

    A device may flush float32 numbers below its normal range to zero; none occurs here.
    """
    if (source, target) == (dtypes.float32, dtypes.float16):
        return _shrink_to_float16(value, sat)
    normal = _convert_normal(value, source, target, sat)
    if (source, target) != (dtypes.float16, dtypes.float32):
        return normal
    word = value.cast(dtypes.uint32)
    size = (word & 0x3FF).cast(dtypes.float32) * 2.0**-24
    small = (word & 0x8000).ne(0).where(-size, size)
    return (word & 0x7C00).eq(0).where(small, normal)


def _clamp_float(value: UOp, dtype: DType, sat: bool = True) -> UOp:
    """Return infinity in place of what is too large for a dtype: for float16 from 65520 on."""
    if dtype != dtypes.float16:
        return _clamp(value, dtype, sat)
    size = (value < 0).where(-value, value)
    infinity = value.const_like(float("inf"))
    return (size < 65520.0).where(value, (value < 0).where(-infinity, value + infinity))


def _shrink_to_float16(value: UOp, sat: bool) -> UOp:
    """Return the bits of the float16 number that is nearest to a float32 number, given by bits."""
    normal = _convert_normal(value, dtypes.float32, dtypes.float16, sat)
    word = value.cast(dtypes.uint32)
    # adding 0.5 leaves 24 bits, the last of which is worth 2^-24, rounded to the nearest even
    raised = (word & 0x7FFFFFFF).bitcast(dtypes.float32) + 0.5
    small = (raised.bitcast(dtypes.uint32) - 0x3F000000) | ((word >> 16) & 0x8000)
    is_small = (word & 0x7FFFFFFF) < 0x38800000  # 2^-14
    return is_small.where(small.cast(dtypes.uint16), normal)


# The names of these functions' parameters are those of tinygrad's patterns.


def _simplify_address(buf: UOp, x: UOp, i: UOp, cond: UOp) -> UOp | None:
    """Simplify an address that is read under a condition, except for what is loaded for it."""
    loads = [uop for uop in x.toposort() if uop.op is Ops.LOAD]
    hidden = {
        load: UOp.variable(f"load{place}", load.vmin, load.vmax, load.dtype, param=True)
        for place, load in enumerate(loads)
    }
    address = x.substitute(hidden)
    if address.op_in_backward_slice_with_self(Ops.INDEX):
        return None
    found = coalesce.simplify_valid_load(buf, address, cond.substitute(hidden))
    shown = {variable: load for load, variable in hidden.items()}
    return None if found is None else found.substitute(shown)


def _number_variable(ctx: list[int], x: UOp) -> UOp | None:
    """Give a variable the next number; ``ctx`` holds how many parameters have one."""
    if x.arg.slot != -1:
        return None
    ctx[0] += 1
    return x.replace(arg=replace(x.arg, slot=_FIRST_VARIABLE + ctx[0]))


def _allocate_registers(ctx: Any, x: UOp) -> tuple[UOp, list[UOp]] | None:
    """Give an instruction registers, and what is loaded from the stack the dtype of its use."""
    found: tuple[UOp, list[UOp]] | None = regalloc.regalloc_rewrite(ctx, x)
    if found is None or x.op is Ops.BUFFER:
        return found
    new, instructions = found
    sources = [
        loaded.replace(dtype=used.dtype) if used.op is Ops.NOOP and loaded is not used else loaded
        for loaded, used in zip(new.src, x.src, strict=True)
    ]
    mended = new.replace(src=tuple(sources))
    return mended, [mended if uop is new else uop.substitute({new: mended}) for uop in instructions]
