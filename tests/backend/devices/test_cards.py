"""Kernels for cards that are not here, compiled and not run; what the class depends on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tinygrad.helpers import Context

from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices.device_choice import select_device
from splitup.graph.rules import check_graph
from splitup.messages.determinism import describe_unknown
from tests.graph.graphs import make_running_sum

COMPILE = """
import json, sys
from splitup.backend.devices import cuda
cuda.install()
from tinygrad.device import Device
from tinygrad.helpers import Context
from splitup.backend.devices.device_check import make_task
from splitup.backend.compiler.schedule import compile_graph
from splitup.graph.rules import check_graph
graph = check_graph(make_task()[0])
found = {}
for card in sys.argv[1:]:
    with Context(DEV=f"NULL:CUDA:{card}"):
        kernels = compile_graph(graph, "NULL").executables
        assert all(kernel.code.startswith(b"\\x7fELF") for kernel in kernels)
        found[card] = [len(kernels), cuda.describe(Device["NULL"])]
print(json.dumps(found))
"""
ROOT = Path(__file__).parents[3]


def has_nvrtc() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cuda_nvrtc") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: the extra [cuda]")
def test_kernels_become_machine_code_for_cards_and_the_class_names_the_compiler() -> None:
    cards = ("sm_75", "sm_90")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *cards],
        env={**os.environ, "NULL_ALLOW_COPYOUT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for card, (kernels, described) in json.loads(done.stdout).items():
        assert kernels > 3
        assert described.startswith(f"{card}, compiler V12.")
        assert not describe_unknown(f"tinygrad 0.14.0/CUDA:CUDA/{described}")


@pytest.mark.parametrize("setting", [{"NOOPT": 1}, {"BEAM": 2}, {"TRANSCENDENTAL": 2}])
def test_no_setting_of_a_user_changes_the_kernels_of_a_class(setting: dict[str, int]) -> None:
    graph, device = check_graph(make_running_sum(4)), select_device().device
    expected = compile_graph(graph, device, uses_native_code=False)
    with Context(**setting):
        assert compile_graph(graph, device, uses_native_code=False) == expected
