"""The form of a matmul that machine code is made for, and the block of arguments it takes.

What is computed, and in which order, is written in ``splitup.cpu.matmul_codegen``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

LANES: Final = 8
FLOAT_BYTES: Final = 4
INT_BYTES: Final = 4
VECTOR_REGISTERS: Final = 16
ARGUMENTS: Final = (  # 64 bits each; the last five for rows that are looked up
    *("out", "a", "b", "numbers", "table", "entries", "n", "address of t"),
    *("address of rows", "zero", "largest"),
)
OFFSETS: Final = {name: 8 * place for place, name in enumerate(ARGUMENTS)}

Bound = Literal["mask", "clamp"]
ProductKind = Literal["float32", "float16", "bfloat16", "int8", "blocks"]
LOADS: Final = ("byte", "bytes", "half", "word")
ITEM_BYTES: Final[dict[ProductKind, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class BlockDecoder:
    """How a block of bytes becomes float32.

    An instruction is a name, the register of the result, and operands: a place in the block for
    those of ``LOADS``, otherwise registers and constants of eight lanes.
    """

    elements: int  # of a block
    nbytes: int  # from one block to the next
    registers: int
    instructions: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class LookupShape:
    """How rows of b are looked up. Strides are in bytes."""

    bound: Bound
    largest: int  # row of b
    b_row: int
    step: int  # from one number to the next
    out_row: int
    a_row: int
    number_row: int


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """What the machine code depends on. Strides are in bytes; n, t and entries are arguments."""

    style: Literal["dot", "outer"]
    kind: ProductKind  # of b
    length: int  # of a sum
    out_n: int
    out_t: int
    a_t: int
    a_k: int  # "outer" only
    b_n: int  # "dot" only
    b_k: int  # "outer" only
    lookup: LookupShape | None = None  # with one, b_n and b_k are 0
    decoder: BlockDecoder | None = None  # of kind "blocks"

    @property
    def n_unit(self) -> int:
        """Return what the number n must be divisible by."""
        return LANES if self.style == "outer" else 1
