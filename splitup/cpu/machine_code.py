"""Machine code in executable memory, and bound to the memory that it works on."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Hashable, Sequence


class MachineCode:
    """Machine code in executable memory, callable while this object lives."""

    __slots__ = ("_memory", "address", "function")

    def __init__(self, code: bytes) -> None:
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._memory = mmap.mmap(-1, len(code), prot=rights)
        self._memory.write(code)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.function: Callable[..., None] = ctypes.CFUNCTYPE(None)(self.address)


@functools.lru_cache(maxsize=8_192)
def load_code(assemble: Callable[..., bytes], *shape: Hashable) -> MachineCode:
    """Return the machine code that ``assemble`` makes for a shape."""
    return MachineCode(assemble(*shape))


class BoundCode:
    """A kernel on certain memory, in one part or several. A call computes it, part after part.

    ``addresses`` holds, for each argument, the words of its address in all parts; they may be
    changed between calls. ``natives`` is each part's function and its argument.
    """

    __slots__ = ("_keep", "addresses", "natives")

    def __init__(
        self, parts: Sequence[tuple[MachineCode, Sequence[int]]], arguments: int, *keep: object
    ) -> None:
        """``parts`` are codes and their words, which begin with the arguments' addresses."""
        blocks = [(ctypes.c_int64 * len(words))(*words) for _, words in parts]
        self.natives = [
            (code.address, [ctypes.c_uint64(ctypes.addressof(block))])
            for (code, _), block in zip(parts, blocks, strict=True)
        ]
        self.addresses = [
            [ctypes.c_uint64.from_buffer(block, 8 * place) for block in blocks]
            for place in range(arguments)
        ]
        self._keep = [code for code, _ in parts], blocks, keep

    def __call__(self) -> None:
        """Compute."""
        for code, (_, arguments) in zip(self._keep[0], self.natives, strict=True):
            code.function(*arguments)
