from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save_file

from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import (
    TensorSpec,
    array_to_bytes,
    bytes_to_array,
    check_inputs,
    encode_safetensors_header,
    parse_safetensors,
    validate_safetensors,
)

TOKENS = TensorSpec("tokens", "int32", (2,))


def test_arrays_round_trip() -> None:
    for dtype in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float64"):
        array = np.arange(6).reshape(2, 3).astype(dtype)
        spec = TensorSpec("x", dtype, (2, 3))
        data = array_to_bytes(spec, np.asfortranarray(array))
        assert data == array.tobytes() and len(data) == spec.nbytes
        np.testing.assert_array_equal(bytes_to_array(spec, memoryview(data)), array)


def test_messages_name_the_input_and_the_way_out() -> None:
    with pytest.raises(InvalidInput, match=r"'tokens' has dtype int64.*int32.*astype"):
        check_inputs([TOKENS], {"tokens": np.array([1, 2])})
    with pytest.raises(InvalidInput, match=r"'tokens' has shape \[3\].*\[2\]"):
        check_inputs([TOKENS], {"tokens": np.zeros(3, np.int32)})
    with pytest.raises(InvalidInput, match="'tokens' is missing"):
        check_inputs([TOKENS], {})
    with pytest.raises(InvalidInput, match="no input 'token'"):
        check_inputs([TOKENS], {"token": np.zeros(2, np.int32)})
    with pytest.raises(InvalidInput, match="9 bytes"):
        bytes_to_array(TOKENS, b"123456789")
    big_endian = np.zeros(2, np.dtype(np.int32).newbyteorder(">"))
    with pytest.raises(InvalidInput, match="dtype"):
        check_inputs([TOKENS], {"tokens": big_endian})


def test_files_of_the_reference_library_are_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(4, dtype=np.float16),
        "b": np.zeros((0, 3)),
        "c": np.ones((2, 2)),
    }
    save_file(arrays, path, metadata={"format": "np"})
    tensors = validate_safetensors(path)
    assert {name: t.shape for name, t in tensors.items()} == {n: a.shape for n, a in arrays.items()}
    start, end = tensors["a"].start, tensors["a"].end
    assert path.read_bytes()[start:end] == arrays["a"].tobytes()


def test_our_files_are_read_by_the_reference_library() -> None:
    specs = [TensorSpec("b", "float32", (2,)), TensorSpec("a", "uint8", (3,))]
    data = encode_safetensors_header(specs) + np.array([1, 2], np.float32).tobytes() + b"\1\2\3"
    loaded = load(data)
    np.testing.assert_array_equal(loaded["b"], [1, 2])
    np.testing.assert_array_equal(loaded["a"], [1, 2, 3])
    assert list(parse_safetensors(data)) == ["b", "a"]


def make(header: object, body: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def tensor(start: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE = {
    "length of 2^40": make({"a": tensor(0, 8, [8])}, length=2**40),
    "length past the end": make({"a": tensor(0, 8, [8])}, length=200),
    "shorter than 8 bytes": b"\0\0\0",
    "overlap": make({"a": tensor(0, 8, [8]), "b": tensor(4, 8, [4])}),
    "gap": make({"a": tensor(0, 3, [3]), "b": tensor(4, 8, [4])}),
    "past the end": make({"a": tensor(0, 16, [16])}),
    "trailing bytes": make({"a": tensor(0, 7, [7])}),
    "negative offset": make({"a": tensor(-8, 0, [8])}),
    "dimension of -1": make({"a": tensor(0, 8, [-1])}),
    "two negative dimensions": make({"a": tensor(0, 8, [-2, -4])}),
    "huge shape": make({"a": tensor(0, 8, [2**62, 4])}),
    "rank 1000": make({"a": tensor(0, 8, [1] * 999 + [8])}),
    "unknown dtype": make({"a": tensor(0, 8, [8], "PICKLE")}),
    "dtype that is no text": make({"a": {**tensor(0, 8, [8]), "dtype": ["U8"]}}),
    "float shape": make(b'{"a":{"dtype":"U8","shape":[8.0],"data_offsets":[0,8]}}'),
    "duplicate key": make(b'{"a":%s,"a":%s}' % ((json.dumps(tensor(0, 8, [8])).encode(),) * 2)),
    "extra key": make({"a": {**tensor(0, 8, [8]), "x": 1}}),
    "no object": make([1]),
    "no JSON": make(b"{"),
    "no UTF-8": make(b'{"\xff":1}'),
    "deep": make(b"[" * 1_000_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a06_hostile_headers_are_refused(
    name: str, tmp_path: Path, raised_recursion_limit: None
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(InvalidModel):
        validate_safetensors(path)
    with pytest.raises(InvalidModel):
        parse_safetensors(HOSTILE[name])


def test_names_are_escaped_and_cut_in_messages() -> None:
    row = tensor(0, 8, [4])
    for name, shown in (("a\n\x1b[31m", r"'a\\n\\x1b\[31m'"), ("a" * 10_000, "'a{119} whose")):
        with pytest.raises(InvalidModel, match=shown):
            parse_safetensors(make({name: row}))


GOOD = make({"a": tensor(0, 4, [2, 2]), "b": tensor(4, 8, [4])})


@given(st.data())
def test_a06_mutations_never_reach_outside_the_file(data: st.DataObject) -> None:
    mutated = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(mutated[: data.draw(st.integers(0, len(mutated)))])
    for file in (bytes(mutated), cut):
        try:
            tensors = parse_safetensors(file)
        except InvalidModel:
            continue
        assert all(8 <= t.start <= t.end <= len(file) for t in tensors.values())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"absent\.safetensors"):
        validate_safetensors(tmp_path / "absent.safetensors")


def test_inputs_of_one_symbol_have_as_many_rows() -> None:
    specs = [TensorSpec("tokens", "int32", (8,), "rows"), TensorSpec("at", "int32", (8,), "rows")]
    two, three = np.zeros(2, np.int32), np.zeros(3, np.int32)
    assert check_inputs(specs, {"tokens": two, "at": two}) == [bytes(8), bytes(8)]
    with pytest.raises(InvalidInput, match=r"'at' has shape \[3\]; 'tokens' has 2 rows"):
        check_inputs(specs, {"tokens": two, "at": three})
