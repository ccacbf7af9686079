"""The dtypes of the graph format by kind, and how a number is rounded to one of them."""

from __future__ import annotations

import math
from typing import Final

from splitup.core.tensors import get_numpy_dtype

FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
INTEGERS: Final = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
NUMBERS: Final = frozenset({*FLOATS, *INTEGERS})
ANY: Final = NUMBERS | {"bool"}


def round_float(value: float, dtype: str) -> float:
    """Return the nearest value that ``dtype`` can hold; every NaN becomes the canonical one."""
    if math.isnan(value):
        return math.nan
    if dtype == "float64" or math.isinf(value) or value == 0:
        return value
    if dtype == "bfloat16":
        return _round_bfloat16(value)
    import numpy as np

    with np.errstate(over="ignore"):  # beyond the range is infinity, as in the kernels
        return float(get_numpy_dtype(dtype).type(value))


def _round_bfloat16(value: float) -> float:
    if abs(value) >= 2.0**128:
        return math.copysign(math.inf, value)
    exponent = math.frexp(value)[1]  # |value| is in [2**(exponent - 1), 2**exponent)
    step = max(exponent - 8, -133)  # 8 bits of precision; subnormals end at 2**-133
    rounded = math.ldexp(float(round(math.ldexp(value, -step))), step)
    largest = (2.0 - 2.0**-7) * 2.0**127
    return rounded if abs(rounded) <= largest else math.copysign(math.inf, value)
