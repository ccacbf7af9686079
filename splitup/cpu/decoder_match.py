"""Read how a kernel makes float32 of blocks of bytes, as a program of vector instructions.

Quantised weights are blocks of k: small numbers, scales and minima, packed in bytes. Which ones is
written in the graph alone, so nothing here knows a format: the expression of the weight is
evaluated for eight neighbouring k at a time. What depends on k alone is then a constant; a load has
eight neighbouring addresses, or one; and what is left are a few operations on vectors, each as the
graph writes it. An expression with any other operation does not match.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, UOp

from splitup.cpu.decoder_rules import WORD_BYTES, Value, is_constant, list_places, shorten
from splitup.cpu.loop_indices import AffineIndex, IndexReader, NoMatch, Operand, SubLoop, refuse_if
from splitup.cpu.matmul_shape import LANES, LOADS, VECTOR_REGISTERS, BlockDecoder
from splitup.cpu.registers import Instruction, allocate_registers

MAX_INSTRUCTIONS: Final = 4_096  # of a block
MAX_NODES: Final = 65_536  # of the values of a block

_INTEGERS: Final = (dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.int8, dtypes.int32)
_FLOATS: Final = ("half", "float", "add", "multiply")
_BITWISE: Final = {Ops.AND: "and", Ops.OR: "or", Ops.SHR: "shift right", Ops.SHL: "shift left"}


def read_decoder(reader: IndexReader, uop: UOp, loop: UOp) -> Operand:
    """Return how an operand is decoded along the loop of the sum.

    Its index is in bytes, except along the loop, where it is in elements.
    """
    indices: dict[UOp, AffineIndex] = {}
    slots = set()
    nodes: dict[UOp, int] = {}  # of a value, which names what it shares as often as it is used
    for part in uop.toposort():
        nodes[part] = 1 + sum(nodes[source] for source in part.src if part.op is not Ops.INDEX)
        if part.op is Ops.INDEX:
            slot, indices[part] = reader.read_load(part, dtypes.uint8)
            slots.add(slot)
    refuse_if(len(slots) != 1)
    subs = reader.split_loop(loop)
    elements, nbytes = _find_block(list(indices.values()), subs)
    refuse_if(nodes[uop] * elements > MAX_NODES * LANES)
    others = [
        {sub: factor for sub, factor in index.factors.items() if sub.loop is not loop}
        for index in indices.values()
    ]
    refuse_if(any(other != others[0] for other in others))
    start = min(index.const for index in indices.values())
    evaluation = _Evaluation(reader, indices, [sub for sub in subs if sub.weight < elements], start)
    values = [evaluation.evaluate(uop, first) for first in range(0, elements, LANES)]
    places = [place for value in values for place in list_places(value)]
    refuse_if(not places)
    # the graph loads the first and the last of these bytes itself
    words = range(min(places), max(places) - WORD_BYTES + 1)
    values = [shorten(value, words) for value in values]
    along = {sub: sub.weight for sub in subs}
    index = AffineIndex(0, {**others[0], **along})
    try:
        registers, instructions = _write_program(values, ("bytes", *_FLOATS))
    except NoMatch:  # too few registers
        registers, instructions = _write_program(values, _FLOATS)
    decoder = BlockDecoder(elements, nbytes, registers, instructions)
    return Operand("blocks", slots.pop(), index, start, decoder)


def _find_block(indices: list[AffineIndex], subs: list[SubLoop]) -> tuple[int, int]:
    """Return the fewest elements from which on all loads advance by equal steps, and the step."""
    for weight in (*(sub.weight for sub in subs), subs[-1].weight * subs[-1].size):
        outer = [sub for sub in subs if sub.weight >= weight]
        steps = {index.get(sub) * weight / sub.weight for index in indices for sub in outer}
        step = max(steps, default=0)  # there may be one block only
        if weight % LANES == 0 and len(steps) <= 1 and step == int(step) >= 0:
            return weight, int(step)
    raise NoMatch


class _Evaluation:
    """Evaluates the expression of an operand for eight k."""

    def __init__(
        self,
        reader: IndexReader,
        indices: dict[UOp, AffineIndex],
        subs: list[SubLoop],
        start: int,
    ) -> None:
        self._reader, self._indices, self._subs, self._start = reader, indices, subs, start

    def evaluate(self, uop: UOp, first: int) -> Value:
        """Return the value for the eight k from ``first`` on."""
        self._first = first
        self._known: dict[UOp, Value] = {}
        return self._get(uop)

    def _get(self, uop: UOp) -> Value:
        if uop not in self._known:
            self._known[uop] = self._compute(uop)
        return self._known[uop]

    def _compute(self, uop: UOp) -> Value:
        if uop.op is Ops.CONST:
            return (uop.val,) * LANES
        if uop.op is Ops.INDEX:
            return self._load(self._place(self._indices[uop], -self._start))
        if uop.op is Ops.WHERE:
            return self._choose(*uop.src)
        if uop.op is Ops.CAST:
            return _cast(uop, self._get(uop.src[0]))
        if uop.op is Ops.BITCAST:
            return _reinterpret(uop, self._get(uop.src[0]))
        if uop.op in _BITWISE and uop.dtype in _INTEGERS:
            one, two = map(self._get, uop.src)
            refuse_if(is_constant(one) or (uop.op in (Ops.SHR, Ops.SHL) and not is_constant(two)))
            return _BITWISE[uop.op], one, two
        if uop.op in (Ops.ADD, Ops.MUL) and uop.dtype == dtypes.float32:
            one, two = map(self._get, uop.src)
            refuse_if(is_constant(one) and is_constant(two))
            return "add" if uop.op is Ops.ADD else "multiply", one, two
        raise NoMatch

    def _place(self, index: AffineIndex, const: int) -> list[int]:
        """Return an index for each of the eight k, counted from the block."""
        ks = range(self._first, self._first + LANES)
        factors = [(sub, index.get(sub)) for sub in self._subs if index.get(sub)]
        return [
            index.const + const + sum(f * (k // sub.weight % sub.size) for sub, f in factors)
            for k in ks
        ]

    @staticmethod
    def _load(places: list[int]) -> Value:
        steps = {two - one for one, two in itertools.pairwise(places)}
        if steps == {0}:
            return "byte", places[0], False
        if steps == {1}:
            return "bytes", places[0], False
        raise NoMatch

    def _choose(self, condition: UOp, one: UOp, two: UOp) -> Value:
        refuse_if(condition.op is not Ops.CMPNE)
        if condition.src[0].dtype in _INTEGERS:
            return _look_up(*map(self._get, (*condition.src, two, one)))
        lanes = [self._place_within(src) for src in condition.src]
        chosen = [left != right for left, right in zip(*lanes, strict=True)]
        if all(chosen):
            return self._get(one)
        if not any(chosen):
            return self._get(two)
        return _merge(chosen, self._get(one), self._get(two))

    def _place_within(self, uop: UOp) -> list[int]:
        index = self._reader.read(uop)
        refuse_if(not set(index.factors) <= set(self._subs))
        return self._place(index, 0)


def _cast(uop: UOp, value: Value) -> Value:
    source = uop.src[0].dtype
    if source in _INTEGERS and uop.dtype in _INTEGERS and uop.dtype.itemsize > source.itemsize:
        return value
    if uop.dtype == dtypes.float32 and source == dtypes.float16:
        return _load_half(value)
    # the lanes are signed, and hold every number of 16 bits
    if uop.dtype == dtypes.float32 and source in _INTEGERS and source.itemsize < 4:
        return "float", value
    raise NoMatch


def _look_up(bit: Value, zero: Value, *branches: Value) -> Value:
    """Return a number of a table of 16; the bits of its index choose, one after the other."""
    refuse_if(bit[0] != "and" or zero != (0,) * LANES)
    _, index, mask = bit
    entries: list[float] = []
    for branch in branches:
        refuse_if(not is_constant(branch) and branch[:2] != ("part of a table", index))
        entries += branch[:1] if is_constant(branch) else branch[2]
    refuse_if(mask != (len(entries) // 2,) * LANES or len(entries) > 2 * LANES)
    if len(entries) < 2 * LANES:
        return "part of a table", index, tuple(entries)
    low, high = tuple(entries[:LANES]), tuple(entries[LANES:])
    sign = "shift left", index, (28,) * LANES  # the bit of the half
    return "blend", ("permute", index, low), ("permute", index, high), sign


def _load_half(value: Value) -> Value:
    """Return one load for the two bytes of a float16."""
    if value[0] == "or" and value[1][0] == "byte":
        place = value[1][1]
        if value[2] == ("shift left", ("byte", place + 1, False), (8,) * LANES):
            return "half", place
    raise NoMatch


def _reinterpret(uop: UOp, value: Value) -> Value:
    source = uop.src[0].dtype
    if (source, uop.dtype) == (dtypes.uint8, dtypes.int8) and value[0] in ("byte", "bytes"):
        return value[0], value[1], True
    if (source, uop.dtype) in ((dtypes.uint16, dtypes.float16), (dtypes.uint32, dtypes.float32)):
        return value
    raise NoMatch


def _merge(chosen: list[bool], one: Value, two: Value) -> Value:
    """Return the value that is ``one`` in the chosen lanes and ``two`` in the others."""
    if one == two:
        return one
    if is_constant(one) and is_constant(two):
        return tuple(a if is_one else b for is_one, a, b in zip(chosen, one, two, strict=True))
    nothing = (0,) * LANES
    if one[0] == "shift right" and one[1] == two:
        two = "shift right", two, nothing
    if two[0] == "shift right" and two[1] == one:
        one = "shift right", one, nothing
    pairs = list(zip(one, two, strict=False))
    refuse_if(one[0] != two[0] or any(a != b for a, b in pairs if not isinstance(a, tuple)))
    return tuple(_merge(chosen, a, b) if isinstance(a, tuple) else a for a, b in pairs)


def _write_program(
    values: list[Value], kept: tuple[str, ...]
) -> tuple[int, tuple[Instruction, ...]]:
    """Return how many registers the values take, and their instructions.

    Results of the instructions ``kept`` serve later vectors, too, if all lanes are equal or it is a
    load.
    """
    program = _Program()
    for value in values:
        program.add_store(value, kept)
    # others hold sums
    return allocate_registers(program.instructions, VECTOR_REGISTERS - 4, LOADS)


class _Program:
    """Instructions in the order of their numbers; each names those whose results it takes."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._numbers: dict[Value, int] = {}

    def add_store(self, value: Value, kept: tuple[str, ...]) -> None:
        """Add the computation of the next eight elements."""
        self._numbers = {
            known: number
            for known, number in self._numbers.items()
            if known[0] in kept and (known[0] == "bytes" or _is_uniform(known))
        }
        self._append(("store", self._add(value)))

    def _add(self, value: Value) -> int | tuple[Any, ...]:
        """Return the number of the instruction of a value; a constant as it is."""
        if is_constant(value):
            return value
        if value not in self._numbers:
            name, *operands = value
            refuse_if(name == "part of a table")
            sources = [self._add(one) if isinstance(one, tuple) else one for one in operands]
            self._numbers[value] = self._append((name, *sources))
        return self._numbers[value]

    def _append(self, instruction: Instruction) -> int:
        refuse_if(len(self.instructions) == MAX_INSTRUCTIONS)
        self.instructions.append(instruction)
        return len(self.instructions) - 1


def _is_uniform(value: Value) -> bool:
    return value[0] != "bytes" and all(
        _is_uniform(one) for one in value[1:] if isinstance(one, tuple) and not is_constant(one)
    )
