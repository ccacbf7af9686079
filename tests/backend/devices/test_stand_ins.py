"""Tasks on devices that behave like GPUs and need none: WebGPU on SwiftShader, OpenCL on pocl.

Each device has a process of its own, because tinygrad opens one device per process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
FILES = (
    "backend/on_device.py",
    "backend/test_batching.py",
    "backend/compiler/test_lowering.py",
    "backend/test_runtime.py",
    "deploy/frontends/on_device_models.py",
)
# kernels take long to compile; run all with DEV=CL pytest deploy/frontends/on_device_models.py
MORE = {"CL": "not recurrent and not windows and not experts", "WEBGPU": "not windows"}
FEW = f"{MORE['CL']} and not pictures and not quantised and not gates"


def has_opencl() -> bool:
    """Return whether there is a loader with at least one driver."""
    try:
        loader = ctypes.CDLL("libOpenCL.so.1")
    except OSError:
        return False
    count = ctypes.c_uint32()
    return loader.clGetPlatformIDs(0, None, ctypes.byref(count)) == 0 and count.value > 0


@pytest.mark.parametrize(
    ("device", "files", "chosen"),
    [
        *((device, (FILES[0], FILES[-1]), FEW) for device in MORE),
        *(pytest.param(one, FILES, chosen, marks=pytest.mark.long) for one, chosen in MORE.items()),
    ],
    ids=lambda value: value if value in MORE else "",
)
def test_tasks_run(device: str, files: tuple[str, ...], chosen: str) -> None:
    if device == "CL" and not has_opencl():
        pytest.skip("no OpenCL here: apt install pocl-opencl-icd ocl-icd-libopencl1")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("-k", chosen, *(str(TESTS / file) for file in files)),
        ],
        env={**os.environ, "DEV": device},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
