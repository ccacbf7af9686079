"""How far honest outputs of a task may differ between determinism classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from splitup.core import limits
from splitup.core.records import Record
from splitup.graph.dtypes import FLOATS

_Bound = Annotated[int, Field(ge=0, le=limits.MAX_TOLERANCE)] | None


class Tolerance(Record):
    """How far honest outputs of a task in one dtype may differ between determinism classes.

    None leaves a metric out. A tolerance without any metric would accept everything and is refused
    where it is used. Bounds are integers, because canonical documents hold no floats.
    """

    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    relative_l2_ppb: _Bound  # ‖claimed − recomputed‖ / ‖recomputed‖, in 10^-9
    exponent_ppb: _Bound  # of the top k, those with another sign or exponent, in 10^-9
    mantissa_ppb: _Bound  # mean distance of the others' mantissas, in 10^-9 of a binade
    max_ulp: _Bound  # the largest distance in units in the last place

    def list_bounds(self) -> dict[str, int]:
        """Return the bounds by metric's name, in the order of the fields."""
        return {
            name: bound
            for name, bound in self.model_dump(exclude={"dtype"}).items()
            if bound is not None
        }


def find_tolerance(tolerances: Sequence[Tolerance], dtype: str) -> Tolerance | None:
    """Return a task's tolerance for ports of one dtype, None where bytes have to be equal.

    For integers and bool any tolerance is right: values have to be equal under each.
    """
    if dtype not in FLOATS:
        return tolerances[0] if tolerances else None
    return next((entry for entry in tolerances if entry.dtype == dtype), None)
