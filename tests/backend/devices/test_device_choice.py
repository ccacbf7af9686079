"""The device is chosen per process, so every case runs in a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitup.backend.devices import device_choice
from splitup.backend.devices.device_choice import get_common_class
from splitup.cpu import host_programs
from splitup.cpu.native_kernels import MATMULS_VERSION, is_supported

REPORT = """
import json
from splitup.core.errors import SplitUpError
from splitup.backend.runtime import TaskProgram, describe_device
from tests.graph.graphs import make_counter
try:
    report = describe_device().to_dict()
    b = make_counter()
    y = len(b.nodes) - 1
    program = TaskProgram(b.graph({"y": y}, [y]).to_bytes(), b.safetensors())
    report["result"] = program.run(program.new_state(), [bytes(12) + b"\\0\\0\\x80\\x3f"])[0].hex()
except SplitUpError as error:
    report = {"error": str(error), "type": type(error).__name__}
print(json.dumps(report))
"""
RESULT = (bytes(12) + b"\0\0\x80\x40").hex()  # 1 x 4, the rest zeros
PLAIN_CLASS = f"tinygrad {importlib.metadata.version('tinygrad')}/CPU:X86/x86_64"
X86 = platform.machine().lower() in ("x86_64", "amd64")


def run(tmp_path: Path, *, script: str = REPORT, **environment: str) -> dict[str, str]:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={"CACHEDB": str(tmp_path / "cache.db"), "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result


@pytest.mark.skipif(not X86, reason="needs tinygrad's x86-64 assembler")
def test_no_compiler_is_needed_on_x86_64(tmp_path: Path) -> None:
    report = run(tmp_path, PATH="/nonexistent", CC="/nonexistent/cc")
    assert (report["device"], report["renderer"], report["compiler"]) == ("CPU", "X86", "")
    assert "no compiler" in report["reason"]
    vectors = f"/products {MATMULS_VERSION}" if is_supported() else ""
    assert report["determinism_class"] == PLAIN_CLASS + vectors
    assert get_common_class().startswith(report["determinism_class"])
    assert report["result"] == RESULT


@pytest.mark.skipif(not shutil.which("clang"), reason="needs clang")
def test_clang_is_used_when_asked_for(tmp_path: Path) -> None:
    path = str(Path(shutil.which("clang") or "").parent)
    report = run(tmp_path, PATH=path, DEV="CPU:CLANG")
    assert report["renderer"] == "CLANG" and report["compiler"].endswith("clang")
    assert "clang" in report["determinism_class"]
    assert report["result"] == RESULT


@pytest.mark.long  # in small: cli/test_app.py names one
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    for device in ("CPU:CLANG", "CPU:NOTHING"):
        report = run(tmp_path, PATH="/nonexistent", CC="/nonexistent/cc", DEV=device)
        assert report["type"] == "ConfigurationError" and f"DEV={device}" in report["error"]


WITHOUT_VECTORS = """
from splitup.cpu import native_kernels
native_kernels._FEATURES |= {"one that no CPU has"}
from splitup.backend.devices.device_choice import select_device
from splitup.backend.compiler.schedule import compile_graph
from splitup.graph.rules import check_graph
from tests.cpu.test_matmul_match import make_layer
device = select_device().device
launches = compile_graph(check_graph(make_layer(2, 128, 128)[1]), device).launches
assert {launch.kind for launch in launches} == {"executable"}, launches
"""


@pytest.mark.long  # in small: cpu/test_vector_match.py
@pytest.mark.skipif(not X86, reason="needs tinygrad's x86-64 assembler")
def test_a_cpu_without_the_vectors_works_and_is_a_class_of_its_own(tmp_path: Path) -> None:
    report = run(tmp_path, script=WITHOUT_VECTORS + REPORT, PATH="/nonexistent")
    assert report["determinism_class"] == PLAIN_CLASS
    assert report["result"] == RESULT


def test_other_machines_have_no_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, system in (("aarch64", "Linux"), ("arm64", "Darwin"), ("x86_64", "Darwin")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(platform, "system", lambda system=system: system)
        assert not is_supported.__wrapped__()


@pytest.mark.parametrize("is_there", [False, True])
def test_no_driver_is_loaded_for_a_gpu_that_is_not_there(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_choice, "_lacks_card", lambda *card: not is_there)
    monkeypatch.setattr(device_choice, "Device", dict.fromkeys(device_choice.GPU_DEVICES, "opened"))
    opened = [name for name in device_choice.GPU_DEVICES if device_choice._opens(name)]
    assert opened == ["METAL", *(["AMD", "NV", "CUDA"] if is_there else [])]


@pytest.mark.skipif(not X86 or sys.platform != "linux", reason="looked for on PCI only there")
def test_a_gpu_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_nvidia() -> bool:
        return device_choice._lacks_card("0x10de", str(tmp_path / "dxg"))

    monkeypatch.setattr(device_choice, "_PCI_DEVICES", tmp_path)
    for slot, vendor in (("0000:00:1f.0", "0x8086"), ("0000:01:00.0", "0x1002")):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(vendor + "\n")
    assert lacks_nvidia() and not device_choice._lacks_card("0x1002")
    (tmp_path / "dxg").touch()  # a driver without a PCI device
    assert not lacks_nvidia()
    (tmp_path / "dxg").unlink()
    (tmp_path / "0000:02:00.0").mkdir()
    (tmp_path / "0000:02:00.0" / "vendor").mkdir()  # cannot be read
    assert not lacks_nvidia()
    (tmp_path / "0000:02:00.0" / "vendor").rmdir()
    (tmp_path / "0000:02:00.0" / "vendor").write_text("0x10de\n")  # a card without a driver
    assert not lacks_nvidia()


PROGRAMS = """
import json
from unittest.mock import MagicMock
from tinygrad.device import Device
from tinygrad.helpers import Context
from tinygrad.runtime import ops_cpu
keys = []
ops_cpu.do_to_program = lambda ast, renderer: keys.append(ast.key.hex()) or MagicMock()
ops_cpu.CPUProgram = MagicMock()
with Context(DEV="CPU:X86"):
    Device["CPU"]
print(json.dumps(keys))
"""


@pytest.mark.skipif(not X86, reason="the shipped objects are for x86-64")
def test_the_shipped_objects_are_for_this_tinygrad(tmp_path: Path) -> None:
    """Fails when tinygrad is updated: run python -m splitup.cpu.host_programs then."""
    keys = run(tmp_path, script=PROGRAMS, PATH="/nonexistent")
    file = json.loads((Path(host_programs.__file__).parent / "x86_64.json").read_text())
    assert len(keys) == 4 and set(keys) == set(file["objects"])
    assert file["tinygrad"] == importlib.metadata.version("tinygrad")
