"""A confined process that applies one adapter to the ciphertexts of one client.

    {"width", "rank", "total_bits"} and a, b    float64, as in ``adapters.weights`` -> {}
    {"keys": true} and keys                     the client's, for rotations -> {}
    {"apply": true} and a ciphertext            -> {"seconds": [read, compute, write]}, the answer

SEAL reads what strangers send, so a crash or a full memory ends this client's session alone. The
process gets an open file in memory, through which SEAL reads and writes; its number is the
argument. ``splitup_private.adapters.host`` starts it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from splitup.core.errors import PeerFault
from splitup.core.limits import MIB
from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.serving import Answer

if TYPE_CHECKING:
    from splitup_private.adapters.ckks import Evaluation

_MAX_MEMORY_BYTES: Final = 1_024 * MIB  # of addresses: 190 MB for the largest adapter


class Applying:
    """The evaluation of this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._evaluation: Evaluation

    def answer(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        """Answer one question; raise PeerFault for bytes that SEAL refuses."""
        try:
            if "width" in question:
                return self._open(question, buffers)
            if "keys" in question:
                self._evaluation.load_keys(buffers[0])
                return {}, ()
            data, seconds = self._evaluation.apply(buffers[0])
        except MemoryError:
            raise PeerFault("the bytes expand to more than this process may hold") from None
        return {"seconds": seconds}, (data,)

    def _open(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        import numpy as np

        from splitup_private.adapters.ckks import Evaluation
        from splitup_private.adapters.layout import SlotLayout
        from splitup_private.adapters.parameters import choose_parameters

        width, rank = question["width"], question["rank"]
        layout = SlotLayout(width, rank, choose_parameters(width).degree // 2)
        a, b = (np.frombuffer(data, np.float64) for data in buffers)
        self._evaluation = Evaluation(
            layout,
            a.reshape(rank, width),
            b.reshape(width, rank),
            question["total_bits"],
            self._descriptor,
        )
        return {}, ()


def main() -> None:
    serve_confined(Applying(int(sys.argv[1])).answer, memory_bytes=_MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
