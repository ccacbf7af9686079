"""Give the results of instructions vector registers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from splitup.cpu.loop_indices import refuse_if

Instruction = tuple[Any, ...]  # a name, and operands; behind the name comes the result's register


def allocate_registers(
    instructions: Sequence[Instruction], count: int, loads: Collection[str]
) -> tuple[int, tuple[Instruction, ...]]:
    """Return the number of registers, and instructions with registers for instructions' numbers.

    Operands that are integers are numbers of instructions, except those of ``loads``. A "store" has
    no result. Raises NoMatch if ``count`` registers do not suffice.
    """
    last = {
        operand: place
        for place, (name, *operands) in enumerate(instructions)
        for operand in operands
        if name not in loads and isinstance(operand, int)
    }
    registers: dict[int, int] = {}
    free, done = list(range(count)), []
    for place, (name, *operands) in enumerate(instructions):
        if name not in loads:
            ended = {one for one in operands if last.get(one) == place}
            operands = [registers[one] if isinstance(one, int) else one for one in operands]
            free = sorted([*free, *(registers.pop(one) for one in ended)])
        if name != "store":
            refuse_if(not free)
            registers[place] = free.pop(0)
            operands.insert(0, registers[place])
        done.append((name, *operands))
    used = max(target for _, target, *_ in done) + 1
    return used, tuple(done)
