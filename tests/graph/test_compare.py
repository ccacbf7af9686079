from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.compare import Relation, compare_tensors, compute_metrics
from splitup.graph.dtypes import FLOATS
from splitup.graph.tolerances import Tolerance, find_tolerance


def make_tolerance(dtype: str = "float32", **bounds: int) -> Tolerance:
    fields: dict[str, Any] = dict.fromkeys(
        ("relative_l2_ppb", "exponent_ppb", "mantissa_ppb", "max_ulp")
    )
    return Tolerance(dtype=dtype, **(fields | bounds))  # type: ignore[arg-type]


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


SPEC = TensorSpec("y", "float32", (4,))
LOOSE = make_tolerance(relative_l2_ppb=10**6)


def test_equal_bytes_are_equal_whatever_they_hold() -> None:
    data = floats(math.nan, math.inf, -0.0, 1.0)
    for tolerance in (None, LOOSE):
        assert compare_tensors(SPEC, data, data, tolerance).relation is Relation.EQUAL


def test_within_a_class_only_equal_bytes_count() -> None:
    found = compare_tensors(SPEC, floats(1, 2, 3, 0.0), floats(1, 2, 3, -0.0), None)
    assert (found.relation, found.broken) == (Relation.DIFFERENT, ("bytes",))
    assert found.metrics is not None and found.metrics.hamming == 0


def test_across_classes_a_tolerance_decides() -> None:
    claimed, recomputed = floats(1, 2, 3, 4.000001), floats(1, 2, 3, 4)
    assert compare_tensors(SPEC, claimed, recomputed, LOOSE).relation is Relation.WITHIN
    tight = make_tolerance(relative_l2_ppb=100)
    found = compare_tensors(SPEC, claimed, recomputed, tight)
    assert (found.is_accepted, found.broken) == (False, ("relative_l2_ppb",))
    assert found.metrics is not None
    assert found.metrics.max_ulp == 2 and found.metrics.hamming == 1


def test_another_length_is_a_difference_and_not_an_error() -> None:
    for claimed in (b"", b"\0", floats(1), bytes(1000)):
        assert compare_tensors(SPEC, claimed, floats(1, 2, 3, 4), LOOSE).broken == ("length",)
    with pytest.raises(InvalidInput):
        compare_tensors(SPEC, bytes(3), bytes(3), LOOSE)


def test_a_tolerance_has_to_bound_something_of_the_dtype() -> None:
    for tolerance in (make_tolerance(), make_tolerance("float16", max_ulp=1)):
        with pytest.raises(InvalidInput, match="bounds nothing"):
            compare_tensors(SPEC, floats(1, 2, 3, 4), floats(1, 2, 3, 5), tolerance)


def test_a_tolerance_is_found_by_dtype() -> None:
    assert find_tolerance((LOOSE,), "float32") is LOOSE
    assert find_tolerance((LOOSE,), "float16") is None
    assert find_tolerance((LOOSE,), "int32") is LOOSE  # integers are equal or not all the same
    assert find_tolerance((), "int32") is None


@pytest.mark.parametrize("dtype", ["int8", "uint64", "int64", "bool"])
def test_integers_have_to_be_equal(dtype: str) -> None:
    recomputed = np.array([0, 1, 1, 0]).astype(dtype)
    claimed = recomputed.copy()
    claimed[2] = 0
    spec = TensorSpec("y", dtype, (4,))
    found = compare_tensors(spec, claimed.tobytes(), recomputed.tobytes(), LOOSE)
    assert found.broken == ("bytes",)


def test_64_bit_integers_are_not_compared_as_floats() -> None:
    one, other = (np.array([2**63 - 1 - n], np.int64).tobytes() for n in (0, 1))
    found = compare_tensors(TensorSpec("y", "int64", (1,)), one, other, LOOSE)
    assert found.metrics is not None and found.metrics.hamming == 1 and not found.is_accepted


@pytest.mark.parametrize(
    ("claimed", "recomputed", "accepted"),
    [
        ((math.nan, 1), (-math.nan, 1), True),  # any NaN is any other
        ((math.nan, 1), (0.0, 1), False),
        ((0.0, 1), (math.nan, 1), False),
        ((math.inf, 1.0000001), (math.inf, 1), True),
        ((math.inf, 1), (-math.inf, 1), False),
        ((math.inf, 1), (3.4e38, 1), False),
        ((-0.0, 1), (0.0, 1), True),
        ((0.0, 0.0), (1e-45, 0.0), False),  # all that is there is gone
    ],
)
def test_a08_special_values_are_defined(
    claimed: tuple[float, ...], recomputed: tuple[float, ...], accepted: bool
) -> None:
    spec = TensorSpec("y", "float32", (2,))
    found = compare_tensors(spec, floats(*claimed), floats(*recomputed), LOOSE)
    assert found.is_accepted is accepted, found


@given(st.data())
def test_a08_any_bytes_have_a_verdict(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(ITEM_BYTES)))
    count = data.draw(st.integers(1, 6))
    size = count * ITEM_BYTES[dtype]
    claimed = data.draw(st.binary(min_size=size, max_size=size))
    recomputed = data.draw(st.one_of(st.just(claimed), st.binary(min_size=size, max_size=size)))
    if dtype == "bool":
        claimed, recomputed = (bytes(byte & 1 for byte in item) for item in (claimed, recomputed))
    spec = TensorSpec("y", dtype, (1, count))
    tolerance = make_tolerance(
        dtype if dtype in FLOATS else "float32",
        relative_l2_ppb=data.draw(st.integers(0, limits.MAX_TOLERANCE)),
        exponent_ppb=data.draw(st.integers(0, 10**9)),
        mantissa_ppb=data.draw(st.integers(0, 10**9)),
        max_ulp=data.draw(st.integers(0, limits.MAX_TOLERANCE)),
    )
    found = compare_tensors(spec, claimed, recomputed, tolerance, is_logits=True)
    assert (found.relation is Relation.EQUAL) == (claimed == recomputed)
    metrics = compute_metrics(dtype, claimed, recomputed, count, 0)
    assert metrics.relative_l2 >= 0 and 0 <= metrics.exponent_mismatch <= 1
    assert 0 <= metrics.mantissa_distance <= 1 and -1 <= metrics.cosine <= 1
    assert 0 <= metrics.max_ulp < 2**64 and metrics.manhattan >= 0
    assert 0 <= metrics.nonfinite <= metrics.hamming <= count
    back = compute_metrics(dtype, recomputed, claimed)
    assert (back.max_ulp, back.hamming) == (metrics.max_ulp, metrics.hamming)
    metrics.to_dict()
    if dtype not in FLOATS:
        assert found.is_accepted == (claimed == recomputed)
    elif metrics.nonfinite:
        assert not found.is_accepted


def test_huge_and_tiny_values_do_not_overflow() -> None:
    for value in (1e308, 5e-324):
        one, other = np.array([value, -value]), np.array([value, value])
        metrics = compute_metrics("float64", one.tobytes(), other.tobytes())
        assert metrics.relative_l2 == pytest.approx(math.sqrt(2))
        assert metrics.cosine == pytest.approx(0, abs=1e-15)


def test_ulp_distance_crosses_zero() -> None:
    one, other = np.array([5e-324]), np.array([-5e-324])
    assert compute_metrics("float64", one.tobytes(), other.tobytes()).max_ulp == 2
    most = np.finfo(np.float64).max
    widest = compute_metrics("float64", np.array([most]).tobytes(), np.array([-most]).tobytes())
    assert widest.max_ulp == 2 * int(np.array([most]).view(np.uint64)[0])


def test_bfloat16_is_compared_as_what_it_is() -> None:
    one, other = np.array([0x3F80], "<u2").tobytes(), np.array([0x3F81], "<u2").tobytes()
    metrics = compute_metrics("bfloat16", other, one)
    assert metrics.max_ulp == 1 and metrics.relative_l2 == 2.0**-7
    assert metrics.mantissa_distance == 2.0**-7


def test_exponents_and_mantissas_of_the_largest() -> None:
    recomputed = np.linspace(1, 1.9, 200, dtype=np.float32)
    claimed = recomputed.copy()
    claimed[0] = 100  # not among the 128 largest of the recomputed ones
    assert (
        compute_metrics("float32", claimed.tobytes(), recomputed.tobytes()).mantissa_distance == 0
    )
    claimed = -recomputed
    metrics = compute_metrics("float32", claimed.tobytes(), recomputed.tobytes())
    assert metrics.exponent_mismatch == 1 and metrics.cosine == pytest.approx(-1)


def test_cosine_is_blind_to_scale_and_decides_nothing() -> None:
    recomputed = np.arange(1, 5, dtype=np.float32)
    found = compare_tensors(SPEC, (2 * recomputed).tobytes(), recomputed.tobytes(), LOOSE)
    assert found.metrics is not None and found.metrics.cosine == pytest.approx(1)
    assert found.broken == ("relative_l2_ppb",)


def test_the_argmax_of_logits_has_to_be_equal_but_for_near_ties() -> None:
    spec = TensorSpec("logits", "float32", (2, 3))
    recomputed = floats(1.0, 1.0000001, 0, 5, 1, 1)
    flipped = floats(1.0000001, 1.0, 0, 5, 1, 1)
    found = compare_tensors(spec, flipped, recomputed, LOOSE, is_logits=True)
    assert found.relation is Relation.WITHIN
    assert found.metrics is not None and (found.metrics.near_ties, found.metrics.argmax) == (1, 0)
    # within the tolerance as a whole, but no honest error moves these two past each other
    wide = make_tolerance(max_ulp=limits.MAX_TOLERANCE)
    found = compare_tensors(spec, flipped, recomputed, wide, is_logits=True)
    assert found.broken == ("argmax",)
    assert compare_tensors(spec, flipped, recomputed, wide).is_accepted
    equal = floats(1, 1, 1, 5, 1, 1)  # the lowest index wins a tie
    found = compare_tensors(spec, equal, recomputed, wide, is_logits=True)
    assert found.broken == ("argmax",)


def test_nan_is_the_lowest_logit() -> None:
    spec = TensorSpec("logits", "float32", (1, 3))
    claimed, recomputed = floats(math.nan, 1, 2.0000002), floats(-math.nan, 1, 2)
    assert compare_tensors(spec, claimed, recomputed, LOOSE, is_logits=True).is_accepted
