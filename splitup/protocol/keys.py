"""Where every tensor of an execution is stored: a pure function of plan and manifest.

A producer does not store one object per step. It writes *log segments*: the port's tensors of many
consecutive steps, concatenated. A port too large for a frame has segments of one step, so that the
segment is the tensor itself and its consumers can fetch it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from splitup import limits
from splitup.tensors import TensorSpec
from splitup.wire import CLIENT


@dataclass(frozen=True, slots=True)
class Segment:
    """One log object: steps ``first_step`` … ``first_step + steps - 1`` of one port."""

    key: str
    task: int  # producer, or CLIENT for a graph input
    port: int
    index: int
    first_step: int
    steps: int
    tensor_bytes: int

    @property
    def length(self) -> int:
        """Size of the object in bytes; steps that never ran are zero bytes."""
        return self.steps * self.tensor_bytes


def compute_segment_steps(tensor_bytes: int) -> int:
    """Return how many steps of a port share one object."""
    if tensor_bytes > limits.INLINE_TENSOR_BYTES:
        return 1
    return max(1, min(limits.SEGMENT_STEPS, limits.SEGMENT_BYTES // max(1, tensor_bytes)))


def iter_segments(
    execution_id: str, task: int, port: int, tensor_bytes: int, steps: int
) -> Iterator[Segment]:
    """Yield the segments that hold ``steps`` steps of one port, in order."""
    per_segment = compute_segment_steps(tensor_bytes)
    producer = "input" if task == CLIENT else f"t{task:04d}"
    for index, first in enumerate(range(0, steps, per_segment)):
        yield Segment(
            key=f"executions/{execution_id[2:]}/{producer}.{port}/{index:05d}",
            task=task,
            port=port,
            index=index,
            first_step=first,
            steps=min(per_segment, steps - first),
            tensor_bytes=tensor_bytes,
        )


def measure_record(spec: TensorSpec) -> int:
    return spec.nbytes + 8 if spec.rows else spec.nbytes


def encode_record(data: bytes | memoryview, spec: TensorSpec) -> bytes | memoryview:
    if not spec.rows:
        return data
    return len(data).to_bytes(8, "little") + bytes(data).ljust(spec.nbytes, b"\0")


def decode_record(record: memoryview, spec: TensorSpec) -> memoryview:
    return record[8 : 8 + int.from_bytes(record[:8], "little")] if spec.rows else record
