"""Machine code that decodes blocks of bytes to float32 (``splitup.cpu.decoder_match``)."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from splitup.cpu.assembler import R15, Assembler, Mem
from splitup.cpu.matmul_shape import FLOAT_BYTES, LANES, LOADS, VECTOR_REGISTERS, BlockDecoder

_VECTOR_BYTES: Final = LANES * FLOAT_BYTES
_LABEL: Final = "constants"
_HIGHEST: Final = VECTOR_REGISTERS - 1


class Constants:
    """Vectors of constants behind the code; r15 is their address."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}

    def get(self, lanes: tuple[float, ...]) -> Mem:
        """Return where a constant stands."""
        if isinstance(lanes[0], float):
            data = struct.pack(f"<{LANES}f", *lanes)
        else:
            data = struct.pack(f"<{LANES}I", *(int(lane) % 2**32 for lane in lanes))
        return Mem(R15, _VECTOR_BYTES * self._places.setdefault(data, len(self._places)))

    def emit_kept(
        self, asm: Assembler, decoder: BlockDecoder, registers: Sequence[int]
    ) -> dict[Mem, int]:
        """Emit loading the constants that are used most; return the register of each."""
        used = Counter(
            self.get(operand)
            for _, *operands in decoder.instructions
            for operand in operands
            if isinstance(operand, tuple)
        )
        kept = {place: reg for (place, _), reg in zip(used.most_common(), registers, strict=False)}
        for place, register in kept.items():
            asm.load_vector(register, place)
        return kept

    @staticmethod
    def emit_address(asm: Assembler) -> None:
        """Emit r15 = the address of the constants."""
        asm.load_address(R15, _LABEL)

    def emit(self, asm: Assembler) -> None:
        """Append the constants."""
        asm.label(_LABEL)
        asm.code += b"".join(self._places)


def emit_decoder(
    asm: Assembler,
    decoder: BlockDecoder,
    constants: Constants,
    kept: Mapping[Mem, int],
    block: Mem,
    finish: Callable[[int, int], None],
) -> None:
    """Emit the decoding of a block, with the highest vector registers and those of ``kept``.

    ``finish`` emits what is done with the register of each vector, given its number.
    """
    vectors = 0
    for name, target, *operands in decoder.instructions:
        if name == "store":
            finish(_HIGHEST - target, vectors)
            vectors += 1
        elif name in LOADS:
            _EMITTERS[name](
                asm, _HIGHEST - target, Mem(block.base, block.offset + operands[0]), *operands[1:]
            )
        else:
            # the form with a constant wants it last; the others commute
            operands.sort(key=lambda one: isinstance(one, tuple))
            places = [
                constants.get(one) if isinstance(one, tuple) else _HIGHEST - one for one in operands
            ]
            sources = [kept.get(one, one) if isinstance(one, Mem) else one for one in places]
            _EMITTERS[name](asm, _HIGHEST - target, *sources)


def _emit_byte(asm: Assembler, target: int, source: Mem, is_signed: bool) -> None:
    asm.broadcast_8(target, source)
    _emit_bytes(asm, target, target, is_signed)


def _emit_bytes(asm: Assembler, target: int, source: Mem | int, is_signed: bool) -> None:
    (asm.widen_int8 if is_signed else asm.widen_uint8)(target, source)


def _emit_half(asm: Assembler, target: int, source: Mem) -> None:
    asm.broadcast_16(target, source)
    asm.widen_half(target, target)


_EMITTERS: Final[dict[str, Callable[..., None]]] = {
    "byte": _emit_byte,
    "bytes": _emit_bytes,
    "half": _emit_half,
    "word": Assembler.broadcast,
    "and": Assembler.mask,
    "or": Assembler.combine,
    "shift right": Assembler.shift_lanes_right,
    "shift left": Assembler.shift_lanes_left,
    "permute": Assembler.permute,
    "blend": Assembler.blend,
    "float": Assembler.convert_int32,
    "add": Assembler.add_floats,
    "multiply": Assembler.multiply,
}
