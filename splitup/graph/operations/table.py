"""The operations of the graph format: all that it says of each, in one table.

To add an operation, add an entry here and one to ``splitup.backend.compiler.lowering``, which says
what it is in tinygrad. What an operation means is described in ``splitup.graph.ir``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from splitup.graph.arrays import Array
from splitup.graph.dtypes import ANY, FLOATS, INTEGERS, NUMBERS
from splitup.graph.operations import error_bounds as bounds
from splitup.graph.operations import known_values as known
from splitup.graph.operations import numpy_reference as reference
from splitup.graph.operations import polynomials, shapes
from splitup.graph.operations.spec import Bound, Compute, Infer, Kind, OpSpec, Propagate

_FLOATS: Final = frozenset(FLOATS)
_INTEGERS: Final = frozenset(INTEGERS)
_BITS: Final = _INTEGERS | {"bool"}


def _given(
    kind: Kind, infer: Infer, compute: Compute | None = None, propagate: Propagate = known.unknown
) -> OpSpec:
    return OpSpec(
        kind=kind,
        arity=0,
        infer=infer,
        compute=compute,
        bound=None,
        propagate=propagate,
        work=shapes.no_work,
        has_argument=True,
    )


def _moved(
    arity: int | None, infer: Infer, compute: Compute, propagate: Propagate = known.known_same
) -> OpSpec:
    return OpSpec(
        kind="other",
        arity=arity,
        infer=infer,
        compute=compute,
        bound=bounds.moved_bound(compute),
        propagate=propagate,
        work=shapes.no_work,
    )


def _movement(
    infer: Infer,
    compute: Compute,
    propagate: Propagate = known.known_same,
    *,
    is_sized_by_result: bool = False,
) -> OpSpec:
    spec = _moved(1, infer, compute, propagate)
    return replace(spec, kind="movement", has_argument=True, is_sized_by_result=is_sized_by_result)


def _conversion(
    infer: Infer, compute: Compute, bound: Bound, dtypes: frozenset[str] = ANY
) -> OpSpec:
    return OpSpec(
        kind="conversion",
        arity=1,
        infer=infer,
        compute=compute,
        bound=bound,
        propagate=known.zero_if_all_are,
        work=shapes.no_work,
        dtypes=dtypes,
    )


def _arithmetic(
    arity: int,
    dtypes: frozenset[str],
    compute: Compute,
    bound: Bound,
    propagate: Propagate = known.unknown,
    *,
    infer: Infer = shapes.infer_arithmetic,
    kind: Kind = "arithmetic",
) -> OpSpec:
    return OpSpec(
        kind=kind,
        arity=arity,
        infer=infer,
        compute=compute,
        bound=bound,
        propagate=propagate,
        work=shapes.work_per_result,
        dtypes=dtypes,
    )


def _comparison(function: Callable[..., Array], propagate: Propagate) -> OpSpec:
    compute = reference.elementwise(function)
    bound, infer = bounds.bound_comparison, shapes.infer_comparison
    return _arithmetic(2, ANY, compute, bound, propagate, infer=infer, kind="comparison")


def _integer_division(function: Callable[..., Array]) -> OpSpec:
    compute = reference.elementwise(function)
    return _arithmetic(2, _INTEGERS, compute, bounds.bound_exact_only, infer=shapes.infer_division)


def _shift(function: Callable[..., Array]) -> OpSpec:
    compute = reference.elementwise(function)
    return _arithmetic(2, _INTEGERS, compute, bounds.bound_exact_only, infer=shapes.infer_shift)


def _function(function: Callable[..., Array], bound: Bound, arity: int = 1) -> OpSpec:
    return _arithmetic(arity, _FLOATS, reference.elementwise_float64(function), bound)


def _plain(
    function: Callable[..., Array],
    dtypes: frozenset[str],
    bound: Bound,
    propagate: Propagate = known.unknown,
    *,
    arity: int = 2,
) -> OpSpec:
    return _arithmetic(arity, dtypes, reference.elementwise(function), bound, propagate)


OPERATIONS: Final = MappingProxyType(
    {
        # values that are given
        "INPUT": _given("param", shapes.infer_param(lambda graph: graph.inputs)),
        "WEIGHT": _given("param", shapes.infer_param(lambda graph: graph.weights)),
        "STATE": _given("param", shapes.infer_param(lambda graph: graph.states)),
        "IOTA": _given("constant", shapes.infer_iota, reference.compute_iota),
        "CONST": _given("constant", shapes.infer_const, reference.compute_const, known.known_const),
        # movement
        "RESHAPE": _movement(
            shapes.infer_reshape, reference.compute_reshape, is_sized_by_result=True
        ),
        "EXPAND": _movement(shapes.infer_expand, reference.compute_expand),
        "PERMUTE": _movement(shapes.infer_permute, reference.compute_permute),
        "PAD": _movement(
            shapes.infer_pad_or_shrink,
            reference.compute_pad,
            known.zero_if_all_are,
            is_sized_by_result=True,
        ),
        "SHRINK": _movement(shapes.infer_pad_or_shrink, reference.compute_shrink),
        "FLIP": _movement(shapes.infer_flip, reference.compute_flip),
        # conversions
        "CAST": _conversion(shapes.infer_cast, reference.compute_cast, bounds.bound_cast),
        "BITCAST": _conversion(
            shapes.infer_bitcast, reference.compute_bitcast, bounds.bound_exact_only, NUMBERS
        ),
        # arithmetic
        "EXP2": _function(
            polynomials.compute_exp2,
            bounds.arithmetic_bound(bounds.carry_exp2, bounds.FUNCTION_UNITS),
        ),
        "LOG2": _function(
            polynomials.compute_log2,
            bounds.arithmetic_bound(bounds.carry_log2, bounds.FUNCTION_UNITS),
        ),
        "SIN": _function(  # the error of GPUs' functions is absolute near zeros
            polynomials.compute_sin,
            bounds.arithmetic_bound(bounds.carry_sine, bounds.FUNCTION_UNITS, least_magnitude=1.0),
        ),
        "POW": _function(
            polynomials.compute_pow,
            bounds.arithmetic_bound(bounds.carry_power, bounds.POWER_UNITS),
            arity=2,
        ),
        "SQRT": _plain(
            np.sqrt,
            _FLOATS,
            bounds.arithmetic_bound(bounds.carry_square_root, bounds.DIVISION_UNITS),
            arity=1,
        ),
        "RECIPROCAL": _plain(
            reference.invert,
            _FLOATS,
            bounds.arithmetic_bound(bounds.carry_reciprocal, bounds.DIVISION_UNITS),
            arity=1,
        ),
        "TRUNC": _plain(
            np.trunc, _FLOATS, bounds.arithmetic_bound(bounds.carry_truncation), arity=1
        ),
        "NEG": _plain(np.negative, NUMBERS, bounds.arithmetic_bound(bounds.carry_same), arity=1),
        "ADD": _plain(
            np.add, ANY, bounds.arithmetic_bound(bounds.carry_sum), known.zero_if_all_are
        ),
        "SUB": _plain(np.subtract, NUMBERS, bounds.arithmetic_bound(bounds.carry_sum)),
        "MUL": _plain(
            np.multiply, ANY, bounds.arithmetic_bound(bounds.carry_product), known.zero_if_any_is
        ),
        "FDIV": _plain(
            np.divide,
            _FLOATS,
            bounds.arithmetic_bound(bounds.carry_quotient, bounds.DIVISION_UNITS),
        ),
        "MAX": _plain(
            np.maximum, ANY, bounds.arithmetic_bound(bounds.carry_maximum), known.zero_if_all_are
        ),
        "AND": _plain(np.bitwise_and, _BITS, bounds.bound_bitwise, known.zero_if_any_is),
        "OR": _plain(np.bitwise_or, _BITS, bounds.bound_bitwise, known.zero_if_all_are),
        "XOR": _plain(np.bitwise_xor, _BITS, bounds.bound_bitwise),
        "CDIV": _integer_division(reference.divide_to_zero),
        "CMOD": _integer_division(reference.compute_remainder),
        "FLOORDIV": _integer_division(np.floor_divide),
        "FLOORMOD": _integer_division(np.mod),
        "SHL": _shift(np.left_shift),
        "SHR": _shift(np.right_shift),
        "CMPLT": _comparison(np.less, known.known_less),
        "CMPNE": _comparison(np.not_equal, known.known_unequal),
        "CMPEQ": _comparison(np.equal, known.known_equal),
        "WHERE": _arithmetic(
            3,
            ANY,
            reference.elementwise(np.where),
            bounds.bound_where,
            known.known_choice,
            infer=shapes.infer_where,
        ),
        # the others
        "LOOKUP": OpSpec(
            kind="other",
            arity=2,
            infer=shapes.infer_lookup,
            compute=reference.compute_lookup,
            bound=bounds.bound_lookup(reference.compute_lookup),
            propagate=known.zero_if_first_is,
            work=shapes.work_per_result,
            is_sized_by_result=True,
        ),
        "STACK": _moved(None, shapes.infer_stack, reference.compute_stack, known.zero_if_all_are),
        "REDUCE": OpSpec(
            kind="other",
            arity=1,
            infer=shapes.infer_reduce,
            compute=reference.compute_reduce,
            bound=bounds.bound_reduce,
            propagate=known.zero_if_all_are,
            work=shapes.work_per_operand,
            has_argument=True,
        ),
        "CONTIGUOUS": _moved(1, shapes.infer_same, reference.compute_contiguous),
    }
)


def _list_kinds(*kinds: Kind) -> frozenset[str]:
    return frozenset(op for op, spec in OPERATIONS.items() if spec.kind in kinds)


PARAMS: Final = _list_kinds("param")
MOVEMENT: Final = _list_kinds("movement")
CONVERSIONS: Final = _list_kinds("conversion")
COMPARISONS: Final = _list_kinds("comparison")
ARITHMETIC: Final = _list_kinds("arithmetic", "comparison")
