"""Constant propagation: the one number that all elements of a result are, where it is known.

Gates are proved with it (``splitup.graph.gates``), so a number is known only where the bytes are: a
minus zero compares as zero and is not zero bytes, so nothing is known of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from splitup.graph.dtypes import FLOATS
from splitup.graph.ir import Node, decode_float, encode_float
from splitup.graph.operations.spec import Known, Propagate

_ZERO_FLOAT: Final = encode_float(0.0)


def is_zero(known: Known) -> bool:
    """Return whether all elements are known to be zero."""
    return known == 0 and known is not None


def unknown(node: Node, operands: Sequence[Known]) -> Known:
    return None


def known_const(node: Node, operands: Sequence[Known]) -> Known:
    text = str(node.arg)
    if node.dtype not in FLOATS:
        return int(text)
    value = decode_float(text)
    return None if value == 0 and text != _ZERO_FLOAT else value


def known_same(node: Node, operands: Sequence[Known]) -> Known:
    return operands[0]


def zero_if_all_are(node: Node, operands: Sequence[Known]) -> Known:
    return 0 if all(map(is_zero, operands)) else None


def zero_if_any_is(node: Node, operands: Sequence[Known]) -> Known:
    """Return zero for a product with zero; of floats all have to be: 0 times infinity is NaN."""
    if node.dtype in FLOATS:
        return zero_if_all_are(node, operands)
    return 0 if any(map(is_zero, operands)) else None


def zero_if_first_is(node: Node, operands: Sequence[Known]) -> Known:
    return 0 if is_zero(operands[0]) else None


def known_choice(node: Node, operands: Sequence[Known]) -> Known:
    condition, chosen, other = operands
    if condition is None:
        return 0 if is_zero(chosen) and is_zero(other) else None
    return other if is_zero(condition) else chosen


def known_comparison(compare: Callable[[Any, Any], bool]) -> Propagate:
    """Return the rule of a comparison: known where both operands are."""

    def propagate(node: Node, operands: Sequence[Known]) -> Known:
        left, right = operands
        return None if left is None or right is None else int(compare(left, right))

    return propagate


known_less: Final = known_comparison(operator.lt)
known_equal: Final = known_comparison(operator.eq)
known_unequal: Final = known_comparison(operator.ne)
