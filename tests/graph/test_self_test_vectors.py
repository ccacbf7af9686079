from __future__ import annotations

import hashlib

import numpy as np
import pytest

from splitup.core import limits
from splitup.core.codec import encode_canonical
from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.manifest import Port
from splitup.graph.self_test_vectors import (
    AuditVerdict,
    audit,
    load_vectors,
    make_inputs,
    make_vectors,
    take_sample,
)
from splitup.graph.tolerances import Tolerance

TASK = "ab" * 32
PORT = TensorSpec("y", "float32", (3000,))
PORTS = [Port(name="y", dtype="float32", shape=(3000,))]
OUTPUTS = [[np.linspace(-1, step + 1, 3000, dtype=np.float32).tobytes()] for step in range(3)]
VECTORS = make_vectors(TASK, 7, "here", OUTPUTS, [PORT])
TOLERANCE = Tolerance(
    dtype="float32", relative_l2_ppb=1000, exponent_ppb=None, mantissa_ppb=None, max_ulp=None
)


def change(factor: float) -> list[list[bytes]]:
    return [[(np.frombuffer(d, np.float32) * np.float32(factor)).tobytes()] for (d,) in OUTPUTS]


def test_inputs_are_the_same_for_everybody_for_ever() -> None:
    ports = [TensorSpec(dtype, dtype, (5,)) for dtype in sorted(ITEM_BYTES)]
    data = b"".join(b"".join(make_inputs(ports, 1, step)) for step in range(2))
    digest = hashlib.sha256(data).hexdigest()
    assert digest == "963b76cff5881a2b634f2499ab53c651ffb3314cf78cf7504e9cb7d6cfbf8bfe"


def test_inputs_are_in_range_and_differ() -> None:
    for dtype in sorted(ITEM_BYTES):
        spec = TensorSpec("x", dtype, (100,))
        (first,), (second,) = make_inputs([spec], 1, 0), make_inputs([spec], 1, 1)
        assert len(first) == spec.nbytes and first != second
        if dtype == "bool":
            assert set(first) == {0, 1}
    one, other = make_inputs([PORT, PORT], 1, 0)
    assert one != other
    floats = np.frombuffer(one, np.float32)
    assert abs(floats.mean()) < 0.1 and abs(floats.std() - 1) < 0.1
    tokens = np.frombuffer(make_inputs([TensorSpec("t", "int64", (500,))], 1, 0)[0], np.int64)
    assert 0 <= tokens.min() and tokens.max() == 63


def test_the_first_step_has_as_many_rows_as_the_vectors_say() -> None:
    ports = [TensorSpec("x", "float32", (64, 3), "n"), TensorSpec("w", "float32", (5,))]
    most, few, one = [make_inputs(ports, 1, *step) for step in ((0,), (0, 8), (1, 8))]
    assert [len(data) for data in most] == [64 * 12, 20]
    assert [len(data) for data in few] == [8 * 12, 20] and most[0].startswith(few[0])
    assert [len(data) for data in one] == [12, 20]
    assert len(make_inputs(ports, 1, 0, 100)[0]) == 64 * 12


def test_vectors_come_back_from_their_bytes() -> None:
    data = VECTORS.to_bytes()
    assert load_vectors(data, TASK, PORTS) == VECTORS
    assert len(data) < 3 * 4 * limits.VECTOR_ELEMENTS * 1.5


def test_bad_vectors_are_refused() -> None:
    value = VECTORS.model_dump(mode="json")
    short = {**value["classes"][0], "steps": value["classes"][0]["steps"][:1]}
    for wrong in (
        {**value, "task_id": "cd" * 32},
        {**value, "classes": []},
        {**value, "classes": [*value["classes"], short]},
        {**value, "extra": 1},
    ):
        with pytest.raises(InvalidModel):
            load_vectors(encode_canonical(wrong), TASK, PORTS)
    with pytest.raises(InvalidModel, match="do not fit"):
        load_vectors(VECTORS.to_bytes(), TASK, PORTS * 2)
    with pytest.raises(InvalidModel):
        load_vectors(b"[" * 10**6, TASK, PORTS)


def test_within_a_class_every_byte_counts() -> None:
    assert audit(VECTORS, "here", OUTPUTS, [PORT], ()).verdict is AuditVerdict.EQUAL
    almost = [[OUTPUTS[0][0]], [OUTPUTS[1][0]], [OUTPUTS[2][0][:-1] + b"\0"]]
    found = audit(VECTORS, "here", almost, [PORT], (TOLERANCE,))
    assert not found.may_serve and "step 2" in found.detail


def test_another_class_is_held_to_the_tolerance_or_to_plausibility() -> None:
    near, far, wrong = change(1 + 3e-7), change(1.01), change(1.2)
    assert audit(VECTORS, "there", OUTPUTS, [PORT], ()).verdict is AuditVerdict.EQUAL
    assert audit(VECTORS, "there", near, [PORT], (TOLERANCE,)).verdict is AuditVerdict.WITHIN
    assert audit(VECTORS, "there", far, [PORT], (TOLERANCE,)).verdict is AuditVerdict.SLASHED
    assert audit(VECTORS, "there", far, [PORT], ()).verdict is AuditVerdict.PLAUSIBLE
    assert audit(VECTORS, "there", wrong, [PORT], ()).verdict is AuditVerdict.SLASHED
    broken = [[bytes(12_000)], *OUTPUTS[1:]]
    assert not audit(VECTORS, "there", broken, [PORT], ()).may_serve
    short = [[OUTPUTS[0][0][:4]], *OUTPUTS[1:]]
    assert not audit(VECTORS, "there", short, [PORT], ()).may_serve


def test_a_sample_that_is_none_is_the_models_fault() -> None:
    step = (VECTORS.classes[0].steps[0][0].model_copy(update={"sample": "A"}),)
    entry = VECTORS.classes[0].model_copy(update={"steps": (step,) * 3})
    vectors = VECTORS.model_copy(update={"classes": (entry,)})
    with pytest.raises(InvalidModel, match="sample"):
        audit(vectors, "there", change(1.01), [PORT], ())


def test_samples_are_spread_and_bounded() -> None:
    assert take_sample("float32", bytes(12)) == bytes(12)
    data = np.arange(10_000, dtype=np.float32).tobytes()
    sample = np.frombuffer(take_sample("float32", data), np.float32)
    assert len(sample) <= limits.VECTOR_ELEMENTS and sample[-1] > 9_900
