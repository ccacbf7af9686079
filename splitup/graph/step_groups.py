"""Which consecutive steps of a task whoever computes it again runs in one pass.

Several steps take one pass while their rows are no more than a single step may have, and their
inputs no more than ``tuning.MERGE_INPUT_BYTES``. Whether a program can do that at all follows from
its kernels (``splitup.backend.merging``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from splitup.core import tuning
from splitup.core.tensors import TensorSpec
from splitup.graph.gates import shut
from splitup.graph.ir import count_rows

Tensors = Sequence[bytes | memoryview]  # of one step, by port


@dataclass(slots=True)
class StepGroup:
    """At most ``most`` consecutive steps. One whose gate is zero is known without a run."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    gate: int | None
    most: int = 1
    _steps: list[tuple[Tensors, Tensors | None]] = field(default_factory=list)
    _rows: dict[str, int] = field(default_factory=dict)
    _bytes: int = 0  # of the inputs of the steps that have to be run

    def add(self, tensors: Tensors) -> bool:
        """Add a step's inputs; return False, and change nothing, where the group is full.

        Raises InvalidInput for inputs of a wrong length, or that disagree on their rows.
        """
        if len(self._steps) >= self.most:
            return False
        if (zeros := shut(self.inputs, self.outputs, self.gate, tensors)) is not None:
            self._steps.append(zeros)
            return True
        if self.to_run and self._bytes + sum(map(len, tensors)) > tuning.MERGE_INPUT_BYTES:
            return False
        total = dict(self._rows)
        for symbol, count in count_rows(self.inputs, tensors).items():
            total[symbol] = total.get(symbol, 0) + count
        most = {spec.rows: spec.shape[0] for spec in self.inputs if spec.rows}
        if self.to_run and any(count > most[symbol] for symbol, count in total.items()):
            return False
        self._steps.append((tensors, None))
        self._rows = total
        self._bytes += sum(map(len, tensors))
        return True

    @property
    def to_run(self) -> list[Tensors]:
        """Return the inputs of the steps that have to be run."""
        return [tensors for tensors, outputs in self._steps if outputs is None]

    def pop(self, results: Sequence[Tensors]) -> list[tuple[Tensors, Tensors]]:
        """Return what counts as the inputs of every step, and its outputs; the group is empty then.

        ``results`` are the outputs of ``to_run``.
        """
        steps, self._steps, self._rows = self._steps, [], {}
        self._bytes = 0
        ran = iter(results)
        return [(tensors, next(ran) if outputs is None else outputs) for tensors, outputs in steps]
