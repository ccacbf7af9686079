"""Turns a user's inputs into steps and micro-USDC; raises InvalidInput before any payment."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Final

from splitup.core import limits
from splitup.core.codec import encode_canonical
from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec, check_array, check_inputs

if TYPE_CHECKING:  # it brings the committee's certificates, which compiling a model does without
    from splitup.client.outcome import Array

MICRO: Final = 1_000_000
BPS: Final = 10_000
PER_MILLION_STEPS: Final = " per million steps"
_MAX_USDC: Final = 10**9  # more is certainly a typing error


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one execution; ``stacked`` when the inputs had a leading step axis."""

    rows: tuple[Mapping[str, Array], ...]
    stacked: bool


def split_steps(specs: Sequence[TensorSpec], inputs: Mapping[str, Array]) -> Steps:
    """Return one mapping per step.

    Every array has its port's shape (one step), or every array has a leading axis of n steps.
    Raises InvalidInput naming the first input that does not fit.
    """
    import numpy as np

    arrays = {name: np.asarray(array) for name, array in inputs.items()}
    lengths = {
        spec.name: arrays[spec.name].shape[0]
        for spec in specs
        if spec.name in arrays and arrays[spec.name].ndim == len(spec.shape) + 1
    }
    if not lengths:
        check_inputs(specs, arrays)
        return Steps((arrays,), stacked=False)
    name, count = next(iter(lengths.items()))
    if not 1 <= count <= limits.MAX_STEPS:
        raise InvalidInput(
            f"input '{name}' has {count} steps on its first axis; give 1 to {limits.MAX_STEPS}"
        )
    for spec in specs:
        if spec.name not in arrays:
            continue  # check_inputs reports it below
        if lengths.get(spec.name) is None:
            raise InvalidInput(
                f"input '{name}' has a leading step axis and input '{spec.name}' has none; "
                "give every input the same number of steps"
            )
        if lengths[spec.name] != count:
            raise InvalidInput(
                f"input '{name}' has {count} steps and input '{spec.name}' has "
                f"{lengths[spec.name]}; give every input the same number of steps"
            )
        check_array(spec, arrays[spec.name][0])
    known = {spec.name for spec in specs}
    # an unknown name keeps its whole array: the check below reports it
    rows = tuple({n: a[i] if n in known else a for n, a in arrays.items()} for i in range(count))
    check_inputs(specs, rows[0])
    return Steps(rows, stacked=True)


def check_execution_id(text: str) -> None:
    """Raise InvalidInput unless ``text`` is 0x and 64 hexadecimal digits."""
    if not re.fullmatch("0x[0-9a-f]{64}", text):
        raise InvalidInput(
            f"{text} is no id of an execution, which has 0x and 64 hexadecimal digits"
        )


def parse_usdc(amount: float | int | str | Decimal, *, name: str) -> int:
    """Return micro-USDC; raise InvalidInput unless it is an amount of at most 6 decimals."""
    try:
        micro = Decimal(str(amount)) * MICRO
    except InvalidOperation:
        micro = Decimal("NaN")
    if not micro.is_finite() or micro < 0 or micro > _MAX_USDC * MICRO:
        raise InvalidInput(f"{name} is {amount}; give an amount of USDC such as 0.25")
    if micro != micro.to_integral_value():
        raise InvalidInput(f"{name} is {amount}; USDC has 6 decimals, give no more")
    return int(micro)


def parse_price(usdc: str, *, name: str) -> int:
    """Return nano-USDC per step; raise InvalidInput unless ``usdc`` is a price of a million."""
    price, finer = divmod(parse_usdc(usdc, name=name) * limits.NANO_PER_MICRO, 10**6)
    if finer:
        raise InvalidInput(
            f"{name} is {usdc}; a price has 3 decimals of USDC{PER_MILLION_STEPS}, give no more"
        )
    return price


def parse_share(share: float | str) -> int:
    """Return a share in 1/10,000: of "50%", "0.5" or 0.5; raise InvalidInput for another value."""
    text = str(share)
    try:
        part = Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except InvalidOperation:
        part = Decimal("NaN")
    if not part.is_finite() or not 0 < part <= 1 or part * BPS % 1:
        raise InvalidInput(
            f"the share of tasks to verify is {share}; give up to 100%, such as 50% or 0.5, with "
            "at most two decimals of a percent"
        )
    return int(part * BPS)


def format_share(share_bps: int) -> str:
    """Return a share of 1/10,000 as people write it: "12.5 %"."""
    return f"{share_bps / 100:g} %"


def format_scaled(count: int, units: Sequence[str]) -> str:
    """Return three significant digits, and the unit of a thousand times the one before."""
    value, unit = float(count), 0
    while value >= 999.5 and unit + 1 < len(units):
        value /= 1000
        unit += 1
    return f"{value:.3g} {units[unit]}"


def format_bytes(count: int) -> str:
    """Return a size in decimal units: 12_300_000 is "12.3 MB"."""
    return format_scaled(count, ("B", "kB", "MB", "GB", "TB"))


def format_usdc(micro_usdc: int) -> str:
    """Return an amount as people write it: "0.25 USDC"."""
    whole, fraction = divmod(micro_usdc, MICRO)
    digits = f"{fraction:06d}".rstrip("0")
    return f"{whole:,}.{digits} USDC" if digits else f"{whole:,} USDC"


def format_price(nano_usdc: int) -> str:
    """Return the price of a step as people write it: "0.04 USDC per million steps"."""
    return format_usdc(nano_usdc * 10**6 // limits.NANO_PER_MICRO) + PER_MILLION_STEPS


def digest_inputs(rows: Sequence[Mapping[str, Array]]) -> str:
    """Return the digest of all inputs, port by port, which the chain records."""
    import numpy as np

    digests = {
        name: hashlib.sha256(b"".join(np.asarray(row[name]).tobytes() for row in rows)).hexdigest()
        for name in sorted(rows[0])
    }
    return "0x" + hashlib.sha256(encode_canonical(digests)).hexdigest()
