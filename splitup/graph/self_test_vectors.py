"""Reference vectors: the outputs of a task for seeded inputs, which a node checks itself with.

Registration computes a task on seeded inputs and stores the digests of the outputs, together with
some of their elements, for the determinism class that it ran on. A node computes the same before it
serves the task, before its stake is at risk: ``audit`` says whether it would be slashed.

The inputs come from Philox 4x64 (Salmon et al., SC11; numpy's raw stream, which is stable across
versions), keyed by the SHA-256 of seed, step and port: floats uniform in ±√3, so of variance 1;
integers from 0 to 63, so that tokens and positions of every model are in range; bools 0 or 1.
The first step has ``rows`` rows, or the largest number where the vectors name none (those of older
registrations); every other step has one row. Few rows find a broken device as well as many, since
a kernel repeats itself over them, and a slow machine is done with them sooner.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from splitup.core import limits
from splitup.core.codec import compute_digest, decode_canonical, encode_canonical
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.records import Record
from splitup.core.tensors import ITEM_BYTES, TensorSpec, get_numpy_dtype
from splitup.graph.arrays import encode_array, round_array
from splitup.graph.compare import Comparison, Relation, compare_tensors
from splitup.graph.dtypes import FLOATS
from splitup.graph.manifest import Port
from splitup.graph.tolerances import Tolerance, find_tolerance

FORMAT: Final = "splitup.vectors"
VERSION: Final = 1
_INTEGERS: Final = 64

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Sample = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=limits.MAX_VECTORS_BYTES)
]


class PortVector(Record):
    """One output of one step: the digest of its bytes, and evenly spread elements in base64."""

    digest: _Digest
    sample: _Sample


class ClassVectors(Record):
    """The outputs of one determinism class, per step and output port."""

    determinism: Annotated[str, Field(min_length=1, max_length=limits.MAX_DETERMINISM_CHARS)]
    steps: Annotated[
        tuple[
            Annotated[tuple[PortVector, ...], Field(min_length=1, max_length=limits.MAX_PORTS)], ...
        ],
        Field(min_length=1, max_length=limits.MAX_VECTOR_STEPS),
    ]


class SelfTestVectors(Record):
    """The reference vectors of one task, one entry per class that was measured."""

    format: Literal["splitup.vectors"]
    version: Literal[1]
    task_id: _Digest
    seed: Annotated[int, Field(ge=0, le=2**53 - 1)]
    rows: Annotated[int, Field(ge=0, le=2**31)] = 0  # of the first step; 0: the largest number
    classes: Annotated[tuple[ClassVectors, ...], Field(min_length=1, max_length=64)]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        return encode_canonical(self.model_dump(mode="json"))


class AuditVerdict(Enum):
    """Whether a node that serves the task would be slashed."""

    EQUAL = "equal"  # the expected bytes
    WITHIN = "within tolerance"  # another class, within the task's tolerance
    PLAUSIBLE = "plausible"  # another class without a tolerance: only its own class verifies it
    SLASHED = "would be slashed"


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict on a machine; ``detail`` is one sentence for its owner."""

    verdict: AuditVerdict
    detail: str

    @property
    def may_serve(self) -> bool:
        """Return whether the task can be served without losing stake."""
        return self.verdict is not AuditVerdict.SLASHED

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON report."""
        return {**asdict(self), "verdict": self.verdict.value}


def make_inputs(ports: Sequence[TensorSpec], seed: int, step: int, rows: int = 0) -> list[bytes]:
    """Return the bytes of every input port for one step; ``rows`` is as in the vectors."""
    result = []
    for place, port in enumerate(ports):
        key = hashlib.sha256(f"{FORMAT}/{seed}/{step}/{place}".encode()).digest()
        count = math.prod(port.shape)
        if port.rows:
            most = port.shape[0]
            count = count // most * (1 if step else min(rows or most, most))
        # 128 of the 256 bits are a key; the raw stream is the generator's own, without numpy's
        # distributions, which may change
        raw = np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw(count)
        if port.dtype in FLOATS:
            uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
            array = round_array(port.dtype, (2.0 * uniform - 1.0) * math.sqrt(3.0))
        else:
            values = 2 if port.dtype == "bool" else _INTEGERS
            array = (raw % np.uint64(values)).astype(get_numpy_dtype(port.dtype))
        result.append(encode_array(port.dtype, array))
    return result


def make_vectors(
    task_id: str,
    seed: int,
    determinism: str,
    outputs: Sequence[Sequence[bytes]],
    ports: Sequence[TensorSpec],
    rows: int = 0,
) -> SelfTestVectors:
    """Return the vectors of a task from its outputs, per step and port, on one class.

    ``rows`` is what ``make_inputs`` was given.
    """
    steps = tuple(
        tuple(
            PortVector(
                digest=compute_digest(data),
                sample=base64.b64encode(take_sample(port.dtype, data)).decode(),
            )
            for port, data in zip(ports, step, strict=True)
        )
        for step in outputs
    )
    return SelfTestVectors(
        format=FORMAT,
        version=VERSION,
        task_id=task_id,
        seed=seed,
        rows=rows,
        classes=(ClassVectors(determinism=determinism, steps=steps),),
    )


def load_vectors(data: bytes, task_id: str, ports: Sequence[Port]) -> SelfTestVectors:
    """Return the vectors in ``data``; raises InvalidModel unless they are those of this task."""
    try:
        value = decode_canonical(data, max_bytes=limits.MAX_VECTORS_BYTES)
        vectors = SelfTestVectors.read(value)
    except InvalidInput as error:
        raise InvalidModel(
            f"the reference vectors of task {task_id} are invalid: {error}"
        ) from None
    if vectors.task_id != task_id:
        raise InvalidModel(f"the reference vectors are of task {vectors.task_id}, not {task_id}")
    steps = [step for entry in vectors.classes for step in entry.steps]
    if (
        any(len(step) != len(ports) for step in steps)
        or len({len(entry.steps) for entry in vectors.classes}) != 1
    ):
        raise InvalidModel(f"the reference vectors of task {task_id} do not fit its outputs")
    return vectors


def take_sample(dtype: str, data: bytes) -> bytes:
    """Return at most ``VECTOR_ELEMENTS`` elements of a tensor, evenly spread."""
    size = ITEM_BYTES[dtype]
    count = len(data) // size
    stride = -(-count // limits.VECTOR_ELEMENTS)
    return np.frombuffer(data, f"V{size}")[::stride].tobytes()


def audit(
    vectors: SelfTestVectors,
    determinism: str,
    outputs: Sequence[Sequence[bytes]],
    ports: Sequence[TensorSpec],
    tolerances: Sequence[Tolerance],
) -> Audit:
    """Return whether a node of class ``determinism`` that gives these outputs would be slashed.

    ``vectors`` are those of the task; ``outputs`` are per step and port. In a class that the
    vectors hold, bytes are compared. In another class the sample is compared within the task's
    tolerance. Without a tolerance, only nodes of that class verify the node, so the sample is
    compared within a wide one, which finds outputs that are not the task's at all.
    """
    known = next((c for c in vectors.classes if c.determinism == determinism), None)
    entry = known or vectors.classes[0]
    worst = Audit(AuditVerdict.EQUAL, "all bytes as they must be")
    for step, (wanted, got) in enumerate(zip(entry.steps, outputs, strict=True)):
        for port, vector, data in zip(ports, wanted, got, strict=True):
            if compute_digest(data) == vector.digest:
                continue
            where = f"output '{port.name}' of step {step}"
            if known is not None:
                return Audit(
                    AuditVerdict.SLASHED,
                    f"{where} differs from what {determinism} has to give; check the device, its "
                    "driver, memory and overclocking",
                )
            found, verdict = _compare_sample(port, vector, data, tolerances)
            if not found.is_accepted:
                size = "its length" if found.metrics is None else _describe(found)
                return Audit(
                    AuditVerdict.SLASHED, f"{where} differs from {entry.determinism}: {size}"
                )
            worst = Audit(verdict, f"{where}: {_describe(found)}")
    return worst


def _compare_sample(
    port: TensorSpec, vector: PortVector, data: bytes, tolerances: Sequence[Tolerance]
) -> tuple[Comparison, AuditVerdict]:
    tolerance, verdict = find_tolerance(tolerances, port.dtype), AuditVerdict.WITHIN
    if tolerance is None:
        verdict = AuditVerdict.PLAUSIBLE
        tolerance = Tolerance(
            dtype=port.dtype if port.dtype in FLOATS else "float32",  # type: ignore[arg-type]
            relative_l2_ppb=limits.PLAUSIBLE_L2_PPB,
            exponent_ppb=None,
            mantissa_ppb=None,
            max_ulp=None,
        )
    try:
        sample = base64.b64decode(vector.sample, validate=True)
        found = compare_tensors(port, take_sample(port.dtype, data), sample, tolerance)
    except (ValueError, InvalidInput) as error:
        raise InvalidModel(f"the sample of '{port.name}' is none: {error}") from None
    return found, verdict


def _describe(found: Comparison) -> str:
    if found.relation is Relation.EQUAL or found.metrics is None:
        return "the sampled elements are equal"
    problems = f" ({', '.join(found.broken)})" if found.broken else ""
    return f"relative L2 {found.metrics.relative_l2:.1e}{problems}"
