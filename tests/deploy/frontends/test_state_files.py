from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.huggingface.directory import load_huggingface
from splitup_deploy.frontends.pytorch import state_files
from splitup_deploy.frontends.pytorch.pickle_reader import PickledBytes
from splitup_deploy.frontends.pytorch.state_files import _LEGACY_MAGIC as _MAGIC
from splitup_deploy.frontends.pytorch.state_files import read_state_file
from splitup_deploy.uncut_model import load_reference

from splitup.core.errors import InvalidModel
from splitup.graph.rules import load_graph
from tests.builders import HANG_S
from tests.deploy import statefiles as sf
from tests.deploy.checkpoints import CASES, GOLDEN, Case, iter_shapes, make_weights, save_checkpoint

REAL = sorted(path for path in GOLDEN.glob("state.*"))
EVERY_DTYPE = {
    "first": ("float32", (2, 3), np.arange(6, dtype="<f4") / np.float32(7)),
    "second": ("float32", (3, 2), np.arange(6, 12, dtype="<f4") / np.float32(7)),
    "parameter": ("float32", (2, 2), np.full(4, 0.5, "<f4")),
    "half": ("float16", (3,), np.arange(3, dtype="<f2")),
    "brain": ("bfloat16", (5,), np.array([0, 0x3F80, 0x4000, 0x4040, 0x4080], "<u2")),
    "double": ("float64", (), np.array([2.5], "<f8")),
    "long": ("int64", (2,), np.array([-1, 2**40], "<i8")),
    "byte": ("uint8", (1, 1), np.array([255], "u1")),
    "flag": ("bool", (2,), np.array([1, 0], "u1")),
}


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (source.spec.dtype, source.spec.shape, b"".join(source.read()))
        for name, source in read_state_file(path).items()
    }


@pytest.mark.parametrize("file", ["state.zip.pt", "state.legacy.pth"])
def test_what_torch_writes(file: str) -> None:
    wanted = {name: (d, shape, data.tobytes()) for name, (d, shape, data) in EVERY_DTYPE.items()}
    assert read(GOLDEN / file) == wanted


def test_what_pickle_writes() -> None:
    assert read(GOLDEN / "state.torch.pkl")["half"][2] == np.arange(3, dtype="<f2").tobytes()
    wanted = {
        "a": ("float32", (2, 3), np.arange(6, dtype="<f4").tobytes()),
        "b": ("int64", (2,), np.array([1, -2], "<i8").tobytes()),
    }
    for protocol in (3, 4, 5):
        assert read(GOLDEN / f"state.numpy{protocol}.pkl") == wanted


def save_torch_directory(directory: Path, case: Case, form: str) -> None:
    """Write a model directory with a state file in place of the safetensors file."""
    save_checkpoint(directory, case)
    (directory / "model.safetensors").unlink()
    weights, shapes = make_weights(case), dict(iter_shapes(case))
    names = sorted(weights)
    half = len(names) // 2
    if form == "shards":
        table = {}
        for number, part in enumerate((names[:half], names[half:])):
            root = sf.state_dict({name: weights[name] for name in part}, shapes, case.dtype)
            file = f"pytorch_model-{number + 1:05}-of-00002.bin"
            (directory / file).write_bytes(sf.archive(root, [weights[name] for name in part]))
            table.update(dict.fromkeys(part, file))
        index = directory / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": table}))
        return
    root = sf.state_dict(weights, shapes, case.dtype)
    if form == "legacy":
        size = {"float32": 4, "float16": 2, "bfloat16": 2}[case.dtype]
        rows = {str(n): (len(raw) // size, raw) for n, raw in enumerate(weights.values())}
        (directory / "consolidated.pth").write_bytes(sf.legacy(root, rows))
    else:
        (directory / "pytorch_model.bin").write_bytes(sf.archive(root, list(weights.values())))


@pytest.mark.parametrize(
    ("name", "form"), [("qwen2", "zip"), ("llama3-bfloat16", "shards"), ("llama-float16", "legacy")]
)
def test_a_directory_with_state_files_is_the_same_model(
    name: str, form: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "a", CASES[name])
    save_torch_directory(tmp_path / "b", CASES[name], form)
    models = [build(str(tmp_path / part), 200_000) for part in "ab"]
    assert models[0].model_id == models[1].model_id
    for one, other in zip(*(model.blobs for model in models), strict=True):
        assert b"".join(one.open()) == b"".join(other.open())


def test_several_state_files_are_ambiguous(tmp_path: Path) -> None:
    save_torch_directory(tmp_path, CASES["llama-float16"], "legacy")
    (tmp_path / "other.pt").write_bytes(b"")
    with pytest.raises(InvalidModel, match=r"several of consolidated\.pth, other\.pt"):
        load_huggingface(str(tmp_path))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A sparse file of 3 GB: reading its tensors' places takes neither time nor memory."""
    items = 768 * 1024 * 1024
    root = sf.program({"big": sf.tensor(sf.storage("float32", "0", items), (items // 1024, 1024))})
    path = tmp_path / "big.pth"
    file = sf.legacy(sf.Raw(root[2:-1]), {"0": (items, b"")})
    with path.open("wb") as target:
        target.write(file)
        target.truncate(len(file) + 4 * items)
    tracemalloc.start()
    (source,) = read_state_file(path).values()
    assert sum(len(chunk) for chunk, _ in zip(source.read(), range(8), strict=False)) > 2**24
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


# ---- row A1: nothing is executed, everything is refused by name --------------------------------

CANARY = "splitup_canary"
ONES = (1,) * 16
NO_TENSOR = "no tensor|once too often"  # a legacy file's storages are looked at before


class Evil:
    """Runs a command when an ordinary reader unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (f"open({str(self.path)!r}, 'w').write('executed')",))


def list_attacks(canary: Path) -> Iterator[tuple[str, bytes, str]]:
    """Yield (name, file, what the message says) of malicious pickles, as roots of a state."""
    command = f"touch {canary}"
    for protocol in range(6):
        yield (
            f"exec, protocol {protocol}",
            pickle.dumps({"w": Evil(canary)}, protocol),
            r"\.exec'|opcode b'p'",
        )
    for module, attribute, argument in (
        ("os", "system", command),
        ("posix", "system", command),
        ("subprocess", "check_output", command),
        ("builtins", "eval", f"open({str(canary)!r}, 'w')"),
        ("__builtin__", "eval", f"open({str(canary)!r}, 'w')"),
        ("builtins", "getattr", "os"),
        ("importlib", "import_module", "os"),
        ("torch", "load", str(canary)),
        ("torch.serialization", "load", str(canary)),
        ("torch.hub", "load", str(canary)),
        ("torch._utils", "_import_dotted_name", "os.system"),
        ("numpy", "load", str(canary)),
        ("numpy.testing._private.utils", "runstring", command),
        ("collections", "OrderedDict.fromkeys", command),
        ("collections.OrderedDict", "__init__", command),
        ("functools", "partial", command),
        ("operator", "attrgetter", "system"),
        ("pickle", "loads", command),
        ("_codecs", "encode", command),
        ("copyreg", "_reconstructor", command),
        ("torch._utils", "_rebuild_tensor_v2\x00", command),
    ):
        full = f"{module}.{attribute}".replace("\x00", "")
        yield full, sf.program({"w": sf.call(module, attribute, argument)}), full
    system = sf.name("os", "system")
    shape = (1,)
    hidden = [
        ("in a tensor's storage", sf.tensor(sf.call("os", "system", command), shape)),
        ("in a key", sf.Raw(b"}" + sf.call("os", "system", command).code + b"Ns")),
        ("in an OrderedDict", sf.call("collections", "OrderedDict", [["w", system]])),
        ("in a parameter", sf.call("torch._utils", "_rebuild_parameter", system, False, None)),
        ("in a persistent id", sf.Raw(sf.encode(("storage", system, "0", "cpu", 1)) + b"Q")),
        (
            "under a reduce",
            sf.Raw(sf.call("os", "system", command).code + sf.encode(("x",)) + b"R"),
        ),
        ("stacked", sf.Raw(sf.encode("os") + sf.encode("system") + b"\x93")),
        ("in a dropped value", sf.Raw(sf.call("os", "system", command).code + b"0N")),
        ("in a memo", sf.Raw(system.code + b"q\x00h\x00")),
        ("in a state", sf.Raw(b"}" + system.code + b"b")),
    ]
    for where, value in hidden:
        yield where, sf.program({"w": value}), r"names 'os\.system'"
    plain = sf.call("collections", "OrderedDict")
    refused = [
        ("reduce a reduced", plain.code + b")R", "calls something"),
        ("reduce a string", sf.encode("os.system") + b")R", "calls something"),
        ("reduce a storage type", sf.name("torch", "FloatStorage").code + b")R", "calls something"),
        ("reduce with a list", sf.name("collections", "OrderedDict").code + b"]R", "calls"),
        ("new object", sf.name("collections", "OrderedDict").code + b")\x81", "opcode"),
        ("instance", b"(ios\nsystem\n", "opcode"),
        ("object", b"(" + sf.name("collections", "OrderedDict").code + b"o", "opcode"),
        ("extension", b"\x82\x01", "opcode"),
        ("persistent text", b"Pos.system\n", "opcode"),
        ("next buffer", b"\x97", "opcode"),
        ("stacked numbers", b"K\x01K\x02\x93", "no strings"),
        ("state of a tuple", b")" + sf.encode({"__class__": "os"}) + b"b", "sets the state"),
        ("state of a string", sf.encode("x") + b"}b", "sets the state"),
        (
            "nested file",
            sf.call("torch.storage", "_load_from_bytes", sf.program(0)).code,
            "storage",
        ),
        (
            "evil nested file",
            sf.call("torch.storage", "_load_from_bytes", sf.legacy(system)).code,
            r"os\.system",
        ),
        ("file in a file in a file", nest(3).code, "storage"),
        ("deep key", b"}" + b")" + b"\x85" * 100_000 + b"Ns", "key"),
        ("deep value", b")" + b"\x85" * 100_000, NO_TENSOR),
        ("no mark", b"t", "mark"),
        ("a mark as value", b"(\x85", "mark"),
        ("empty stack", b"0", "more values"),
        ("no memo", b"h\x07", "recalls"),
        ("a far memo", b"N" + b"r\xff\xff\xff\xff", NO_TENSOR),
        ("protocol 9", b"\x80\x09N", "protocol 9"),
        ("append to a dict", b"}Na", "no list"),
        ("set in a list", b"]NNs", "no dict"),
        ("odd items", b"}(Nu", "without a value"),
        ("not UTF-8", b"X\x01\0\0\0\xff", "UTF-8"),
        ("huge bytes", b"\x8e" + struct.pack("<Q", 2**62) + b"x", "claims"),
        ("huge bytearray", b"\x96" + struct.pack("<Q", 2**40), "claims"),
        ("huge string", b"\x8d" + struct.pack("<Q", 2**62), "string of"),
        ("huge integer", b"\x8b\xff\xff\xff\x7f", "opcode"),
        ("endless name", b"c" + b"a" * 100_000, "length"),
    ]
    for what, code, message in refused:
        yield what, b"\x80\x02" + b"}" + sf.encode("w") + code + b"s.", message
    huge = [
        (
            "huge shape",
            sf.tensor(sf.storage("float32", "0", 4), (2**31 - 1,) * 16, 0, ONES),
            "items",
        ),
        ("rank bomb", sf.tensor(sf.storage("float32", "0", 4), (1,) * 1000), "impossible shape"),
        ("negative size", sf.tensor(sf.storage("float32", "0", 4), (-1,)), "impossible shape"),
        ("past the end", sf.tensor(sf.storage("float32", "0", 4), (4,), 1), "items"),
        ("negative offset", sf.tensor(sf.storage("float32", "0", 4), (1,), -1), "storage"),
        ("strides", sf.tensor(sf.storage("float32", "0", 4), (2, 2), 0, (1, 2)), "contiguous"),
        ("repeated", sf.tensor(sf.storage("float32", "0", 4), (4, 4), 0, (0, 1)), "items"),
        ("huge storage", sf.tensor(sf.storage("float32", "0", 2**62), (1,)), "storage"),
        ("negative storage", sf.tensor(sf.storage("float32", "0", -1), (1,)), "storage"),
        ("view", sf.tensor(sf.storage("float32", "0", 4, ("v", 0, 4)), (1,)), "view"),
    ]
    for what, value, message in huge:
        yield what, sf.program({"w": value}), message


def nest(depth: int) -> sf.Raw:
    """Return a storage in the bytes of a file, in the bytes of a file, …"""
    value = sf.storage("float32", "0", 1)
    for _ in range(depth):
        data = sf.legacy(value, {"0": (1, b"abcd")})
        value = sf.call("torch.storage", "_load_from_bytes", data)
    return value


ATTACKS = [name for name, _, _ in list_attacks(Path("x"))]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a01_malicious_pickles(attack: str, tmp_path: Path) -> None:
    canary, path = tmp_path / CANARY, tmp_path / "model.pkl"
    rows = {name: (data, message) for name, data, message in list_attacks(canary)}
    data, message = rows[attack]
    body = data[2:-1] if data[:1] == b"\x80" else data[:-1]
    files = [
        data,
        sf.archive(sf.Raw(body), [b"\0" * 16]),
        sf.legacy(sf.Raw(body), {"0": (4, b"\0" * 16)}),
    ]
    for file in files:
        path.write_bytes(file)
        started = time.process_time()
        with pytest.raises(InvalidModel, match=message):
            read_state_file(path)
        assert time.process_time() - started < HANG_S
    assert not canary.exists()


def test_a01_the_corpus_is_malicious(tmp_path: Path) -> None:
    """The reader that everybody else uses does run it: so the test above can fail."""
    canary = tmp_path / CANARY
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"w": Evil(canary)}))
    script = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert canary.exists()


def test_a01_a_pickled_task() -> None:
    for protocol in range(6):
        data = pickle.dumps(Evil(Path("/nonexistent/canary")), protocol)
        with pytest.raises(InvalidModel):
            load_graph(data)


def test_a01_a_directory_with_a_malicious_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CASES["llama"])
    (tmp_path / "model.safetensors").unlink()
    canary = tmp_path / CANARY
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Evil(canary)}))
    with pytest.raises(InvalidModel, match=r"pytorch_model\.bin.*exec"):
        load_reference(str(tmp_path))
    assert not canary.exists()


def test_archives_that_torch_never_writes(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    root = {"w": sf.tensor(sf.storage("float32", "0", 4), (4,))}
    good = sf.archive(root, [b"\0" * 16])
    path.write_bytes(good)
    assert list(read(path)) == ["w"]
    bad = {
        "compressed": sf.archive(root, [b"\0" * 16], compression=zipfile.ZIP_DEFLATED),
        "lacks the 4 items": sf.archive(root, [b"\0" * 15]),
        "items of storage": sf.archive(root, []),
        "TorchScript": sf.archive(root, [b"\0" * 16], more={"constants.pkl": b""}),
        "big-endian": sf.archive(root, [b"\0" * 16]).replace(b"little", b"big   "),
        "zip": good[:-10],
        "none that torch": sf.archive(root, [b"\0" * 16]).replace(b"data.pkl", b"data.pkx"),
    }
    for message, data in bad.items():
        path.write_bytes(data)
        with pytest.raises(InvalidModel, match=message):
            read_state_file(path)


def test_a_zip_directory_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    data = bytearray(sf.archive({"w": None}))
    end = data.rindex(b"PK\x05\x06")
    for size in (2**31, 2**32 - 2):
        data[end + 12 : end + 16] = struct.pack("<I", size)
        path.write_bytes(data + b"\0" * 64)
        with pytest.raises(InvalidModel):
            read_state_file(path)


@pytest.mark.parametrize("offset", [2**63, 2**64 - 1, 2**62])
def test_a_zip_entry_outside_of_the_file(offset: int, tmp_path: Path) -> None:
    """Found by mutation: zipfile believes any 64-bit offset."""
    data = bytearray(sf.archive({"w": None}))
    row, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    name_bytes = int.from_bytes(data[row + 28 : row + 30], "little")
    data[end + 12 : end + 16] = struct.pack("<I", end - data.index(b"PK\x01\x02") + 12)
    data[row + 30 : row + 32] = struct.pack("<H", 12)
    data[row + 42 : row + 46] = b"\xff" * 4
    place = row + 46 + name_bytes
    data[place:place] = struct.pack("<HHQ", 1, 8, offset)
    path = tmp_path / "weights.pt"
    path.write_bytes(data)
    with pytest.raises(InvalidModel, match="outside of the file"):
        read_state_file(path)


def test_legacy_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    root = {"w": sf.tensor(sf.storage("float32", "0", 4), (4,))}
    good = sf.legacy(root, {"0": (4, b"\0" * 16)})
    path.write_bytes(good)
    assert list(read(path)) == ["w"]
    bad = {
        "another length": sf.legacy(root, {"0": (3, b"\0" * 12)}),
        "middle of storage": good[:-1],
        "no tensor with data": sf.legacy(root),
        "once too often": sf.legacy(root, {"0": (4, b"\0" * 16), "1": (0, b"")}),
        "big-endian": good.replace(b"little_endian\x88", b"little_endian\x89"),
        "no dict of tensors": sf.legacy([1]),
        "by numbers": sf.legacy({1: 2}),
    }
    for message, data in bad.items():
        path.write_bytes(data)
        with pytest.raises(InvalidModel, match=message):
            read_state_file(path)


def test_an_endless_program_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitup.core.tuning.MAX_PICKLE_OPCODES", 1000)
    path = tmp_path / "weights.pkl"
    path.write_bytes(b"\x80\x02" + b"N0" * 1000 + b"}.")
    with pytest.raises(InvalidModel, match="more than 1000 operations"):
        read_state_file(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a01_damaged_files(data: st.DataObject, tmp_path: Path) -> None:
    """Whatever is changed in a real file: tensors inside the file, or one sentence."""
    original = bytearray(data.draw(st.sampled_from(REAL)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(original) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "delete"])):
            case "set":
                original[place] = data.draw(st.integers(0, 255))
            case "cut":
                del original[max(place, 1) :]
            case "insert":
                original[place:place] = data.draw(st.binary(min_size=1, max_size=9))
            case _:
                del original[place : place + data.draw(st.integers(1, 9))]
        original = original or bytearray(b".")
    path = tmp_path / "damaged.pt"
    path.write_bytes(original)
    try:
        tensors = read_state_file(path)
    except InvalidModel:
        return
    for source in tensors.values():
        assert sum(len(chunk) for chunk in source.read()) == source.spec.nbytes


def test_a_trainer_s_state_is_left_out_and_a_second_set_of_weights_refused(tmp_path: Path) -> None:
    data = np.arange(4, dtype="<f4").tobytes()
    weight = sf.tensor(sf.storage("float32", "0", 4), (4,))
    path = tmp_path / "m.pt"
    trained = {"model": {"w": weight}, "epoch": 3, "optimizer": {"state": {"w": {"mean": weight}}}}
    path.write_bytes(sf.archive(trained, [data]))
    assert read(path) == {"w": ("float32", (4,), data)}
    path.write_bytes(sf.archive({**trained, "ema": {"w": weight}}, [data]))
    with pytest.raises(InvalidModel, match="has weights under 'model' and 'ema': keep one"):
        read(path)


# A pickle remembers values, and names each as often as it likes, with two bytes.
_ORDERED = b"ccollections\nOrderedDict\nq\x01"
_STORAGE = b"ctorch.storage\n_load_from_bytes\nq\x01"
_PAIRS = b"](\x8c\x01kK\x01\x86q\x02" + b"h\x02" * 999 + b"e\x85q\x0300"


def test_s57_a_list_counts_each_time_that_something_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitup.core.tuning.MAX_PICKLE_OPCODES", 10_000)
    file = tmp_path / "state.pkl"
    for times, problem in ((8, "holds no dict"), (20, "more than 10000 operations")):
        file.write_bytes(b"\x80\x04" + _ORDERED + _PAIRS + b"h\x01h\x03R0" * times + b"}.")
        with pytest.raises(InvalidModel, match=problem):
            read_state_file(file)


def test_s57_a_storage_inside_a_pickle_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = b"".join(pickle.dumps(v, 2) for v in (_MAGIC, 1001, {"little_endian": True}))
    identity = b"(\x8c\x07storagectorch\nFloatStorage\n\x8c\x010\x8c\x03cpuK\x00tQ."
    inner += b"\x80\x02" + identity + pickle.dumps(["0"], 2) + bytes(8)
    blob = b"B" + struct.pack("<I", len(inner)) + inner + b"\x85q\x0200"
    file, read = tmp_path / "state.pkl", []
    file.write_bytes(b"\x80\x04" + _STORAGE + blob + b"h\x01h\x02R0" * 100 + b"}.")

    def count(reader: state_files._Reader, blob: PickledBytes) -> Any:
        read.append(blob)
        return read_legacy(reader, blob)

    read_legacy = state_files._Reader.read_legacy
    monkeypatch.setattr(state_files._Reader, "read_legacy", count)
    with pytest.raises(InvalidModel, match="holds no dict"):
        read_state_file(file)
    assert len(read) == 2  # the file, and the storage


def test_s57_a_dict_under_many_names_is_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def look(value: object) -> bool:
        looked.append(id(value))
        return False

    monkeypatch.setattr(state_files, "_holds_tensors", look)
    other = {"no": 1}
    root = {"model": {}} | dict.fromkeys((f"name{number}" for number in range(100)), other)
    file = tmp_path / "state.pkl"
    file.write_bytes(pickle.dumps(root, 3))
    with pytest.raises(InvalidModel, match="holds no dict"):
        read_state_file(file)
    assert len(looked) == 1
