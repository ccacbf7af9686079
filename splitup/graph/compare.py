"""Compare two outputs of one task: equal bytes, or within a calibrated tolerance.

Within one determinism class bytes have to be equal. Across classes sums are taken in another order,
so honest outputs differ in their last bits; a ``Tolerance`` says by how much. It is measured per
task and dtype (``splitup-deploy calibrate``). It names only metrics that separated honest from
dishonest outputs in the measurement, and every metric it names must hold.

The result is defined for every input:

    -0 and +0      equal across classes, unequal within one (their bytes differ)
    NaN            any NaN equals any NaN; a NaN opposite a number is a difference, at any tolerance
    infinities     must be equal, sign included; opposite a number: a difference, at any tolerance
    integers, bool must be equal, at any tolerance
    argmax         of every row of logits must be equal, the lowest index winning ties; a *near tie*
                   is accepted: with e = relative L2 bound × ‖row‖ as the largest honest error, two
                   logits that differ by up to 2 e may change places

Metrics are computed over the elements that are finite on both sides, in float64, scaled by the
largest of them to avoid overflow. The top-k metrics are those of TOPLOC (arXiv 2501.16007): of the
k largest elements of the recomputed output, how often sign and exponent agree, and how far the
mantissas are apart where they do. Cosine similarity is blind to scale; it is reported, never used.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.core.tensors import ITEM_BYTES, TensorSpec, get_numpy_dtype
from splitup.graph.dtypes import FLOATS
from splitup.graph.tolerances import Tolerance

Array = np.ndarray[Any, Any]
PPB: Final = 10**9
MANTISSA_BITS: Final = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
_EXPONENT_BITS: Final = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11}


class Relation(Enum):
    """The result of a comparison."""

    EQUAL = "equal"  # byte for byte
    WITHIN = "within"  # not equal, within the tolerance
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Metrics:
    """How far two tensors are apart; 0 everywhere, and cosine 1, when they are equal."""

    relative_l2: float  # inf when only the claimed one is not zero
    exponent_mismatch: float  # share of the top k
    mantissa_distance: float  # mean, in binades
    max_ulp: int
    cosine: float
    manhattan: float
    hamming: int  # elements that differ, -0 and +0 being equal, and NaN and NaN
    nonfinite: int  # elements where NaN or an infinity stands opposite something else
    argmax: int  # rows of logits with another argmax and no near tie
    near_ties: int  # rows of logits with another argmax, forgiven

    def measure(self, name: str) -> int:
        """Return the metric that the bound of this name limits, in the bound's unit."""
        if name == "max_ulp":
            return self.max_ulp
        value = {
            "relative_l2_ppb": self.relative_l2,
            "exponent_ppb": self.exponent_mismatch,
            "mantissa_ppb": self.mantissa_distance,
        }[name]
        return limits.MAX_TOLERANCE + 1 if math.isinf(value) else math.ceil(value * PPB)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the fields for a JSON report; infinity becomes None."""
        return {
            name: value if math.isfinite(value) else None for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """A result and its reasons: ``broken`` names the metrics that exceed their bound."""

    relation: Relation
    metrics: Metrics | None  # None when the bytes are equal or have another length
    broken: tuple[str, ...] = ()

    @property
    def is_accepted(self) -> bool:
        """Return whether the claimed output is accepted."""
        return self.relation is not Relation.DIFFERENT


def compare_tensors(
    spec: TensorSpec,
    claimed: bytes | memoryview,
    recomputed: bytes | memoryview,
    tolerance: Tolerance | None,
    *,
    is_logits: bool = False,
) -> Comparison:
    """Compare the claimed bytes of one output port with recomputed ones.

    ``tolerance`` is None within one determinism class. Of ``spec`` only the dtype is used, and the
    last axis when the tensor holds logits. The claimed bytes may be anything: another length is a
    difference. Raises InvalidInput when ``recomputed`` does not fit the dtype, or the tolerance is
    for another dtype or names no metric.
    """
    if len(recomputed) % ITEM_BYTES[spec.dtype]:
        raise InvalidInput(f"'{spec.name}' has {len(recomputed)} bytes, which is no {spec.dtype}")
    if len(claimed) != len(recomputed):
        return Comparison(Relation.DIFFERENT, None, ("length",))
    if bytes(claimed) == bytes(recomputed):
        return Comparison(Relation.EQUAL, None)
    width = spec.shape[-1] if is_logits and spec.shape else 0
    bound = None if tolerance is None else tolerance.relative_l2_ppb
    metrics = compute_metrics(spec.dtype, claimed, recomputed, width, bound)
    if tolerance is None or spec.dtype not in FLOATS:
        broken: tuple[str, ...] = ("bytes",) if tolerance is None or metrics.hamming else ()
        return Comparison(Relation.DIFFERENT if broken else Relation.WITHIN, metrics, broken)
    if tolerance.dtype != spec.dtype or not tolerance.list_bounds():
        raise InvalidInput(f"the tolerance for '{spec.name}' bounds nothing of {spec.dtype}")
    broken = tuple(name for name in ("nonfinite", "argmax") if getattr(metrics, name))
    broken += tuple(n for n, most in tolerance.list_bounds().items() if metrics.measure(n) > most)
    return Comparison(Relation.DIFFERENT if broken else Relation.WITHIN, metrics, broken)


def compute_metrics(
    dtype: str,
    claimed: bytes | memoryview,
    recomputed: bytes | memoryview,
    row_width: int = 0,
    relative_l2_ppb: int | None = None,
) -> Metrics:
    """Return the metrics of two tensors of equal length.

    ``row_width`` is the length of a row of logits, 0 for a tensor of something else. A tie is near
    within ``relative_l2_ppb``; with None no tie is.
    """
    bits = [np.frombuffer(data, _get_bits_dtype(dtype)) for data in (claimed, recomputed)]
    a, r = (_to_float64(dtype, item) for item in bits)
    nan = np.isnan(a) & np.isnan(r)
    if dtype in FLOATS:
        differs = (a != r) & ~nan
    else:
        differs = bits[0] != bits[1]  # float64 does not represent all 64-bit integers
    finite = np.isfinite(a) & np.isfinite(r)
    nonfinite = int(np.count_nonzero(differs & ~finite))
    exponent = mantissa = 0.0
    ulp = 0
    if dtype in FLOATS:
        exponent, mantissa = _compare_largest(dtype, bits[0][finite], bits[1][finite], r[finite])
        ulp = _find_max_ulp(dtype, bits[0][finite], bits[1][finite])
    wrong, near = _compare_argmax(a, r, row_width, relative_l2_ppb) if row_width else (0, 0)
    relative_l2, cosine, manhattan = _compute_norms(a[finite], r[finite])
    return Metrics(
        relative_l2=relative_l2,
        exponent_mismatch=exponent,
        mantissa_distance=mantissa,
        max_ulp=ulp,
        cosine=cosine,
        manhattan=manhattan,
        hamming=int(np.count_nonzero(differs)),
        nonfinite=nonfinite,
        argmax=wrong,
        near_ties=near,
    )


def _get_bits_dtype(dtype: str) -> np.dtype[Any]:
    if dtype in FLOATS:
        return np.dtype(f"<u{ITEM_BYTES[dtype]}")
    return get_numpy_dtype(dtype)


def _to_float64(dtype: str, bits: Array) -> Array:
    values = bits
    if dtype == "bfloat16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    elif dtype in FLOATS:
        values = bits.view(get_numpy_dtype(dtype))
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return values.astype(np.float64)


def _compute_norms(a: Array, r: Array) -> tuple[float, float, float]:
    """Return relative L2, cosine similarity and Manhattan distance of finite float64 vectors."""
    scale = max(float(np.max(np.abs(a), initial=0.0)), float(np.max(np.abs(r), initial=0.0)))
    if scale == 0.0:
        return 0.0, 1.0, 0.0
    scale = math.ldexp(1.0, math.frexp(scale)[1] - 1)  # a power of two, so that nothing is rounded
    a, r = a / scale, r / scale
    difference = a - r
    norm_a, norm_r = math.sqrt(float(a @ a)), math.sqrt(float(r @ r))
    norm = math.sqrt(float(difference @ difference))
    relative = norm / norm_r if norm_r else math.inf
    # in two steps: the product of two norms may vanish where neither does
    cosine = float((a / norm_a) @ (r / norm_r)) if norm_a and norm_r else 0.0
    return relative, min(1.0, max(-1.0, cosine)), float(np.abs(difference).sum()) * scale


def _compare_largest(dtype: str, a: Array, r: Array, values: Array) -> tuple[float, float]:
    """Return the share of the top k with another sign or exponent, and the others' distance."""
    if not len(values):
        return 0.0, 0.0
    order = np.argsort(-np.abs(values), kind="stable")[: limits.COMPARED_LARGEST]
    bits = MANTISSA_BITS[dtype]
    a, r = a[order].astype(np.uint64), r[order].astype(np.uint64)
    top = (a >> np.uint64(bits)) == (r >> np.uint64(bits))  # sign and exponent
    mask = np.uint64(2**bits - 1)
    apart = ((a[top] & mask).astype(np.float64) - (r[top] & mask).astype(np.float64)) / 2.0**bits
    mantissa = float(np.abs(apart).mean()) if len(apart) else 0.0
    return 1.0 - float(top.mean()), mantissa


def _find_max_ulp(dtype: str, a: Array, r: Array) -> int:
    """Return the largest distance in representable numbers; -0 and +0 are one number."""
    if not len(a):
        return 0
    width = 1 + _EXPONENT_BITS[dtype] + MANTISSA_BITS[dtype]
    sign = np.uint64(2 ** (width - 1))
    parts = []
    for bits in (a.astype(np.uint64), r.astype(np.uint64)):
        magnitude = (bits & (sign - np.uint64(1))).astype(np.int64)
        parts.append(np.where(bits & sign, -magnitude, magnitude))
    # two finite numbers are less than 2^63 apart in float32; in float64 they may be 2^64 apart
    low, high = np.minimum(*parts), np.maximum(*parts)
    distance = high.astype(np.uint64) - low.astype(np.uint64)  # modulo 2^64, so it is exact
    return int(distance.max())


def _compare_argmax(a: Array, r: Array, width: int, relative_l2_ppb: int | None) -> tuple[int, int]:
    """Return how many rows have another argmax, without and with a near tie. NaN is lowest."""
    lowered = [np.where(np.isnan(item), -np.inf, item).reshape(-1, width) for item in (a, r)]
    first, second = (np.argmax(item, axis=1) for item in lowered)
    wrong = near = 0
    for row in np.flatnonzero(first != second):
        values = lowered[1][row]
        gap = float(values[second[row]]) - float(values[first[row]])
        scale = float(np.max(np.abs(values)))
        norm = 0.0
        if math.isfinite(scale) and scale > 0.0:
            norm = scale * math.sqrt(float((values / scale) @ (values / scale)))
        allowed = 2.0 * (relative_l2_ppb or 0) / PPB * norm
        if relative_l2_ppb is not None and gap <= allowed:
            near += 1
        else:
            wrong += 1
    return wrong, near
