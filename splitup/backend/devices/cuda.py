"""CUDA and NV: machine code by NVIDIA's own compiler library, whose version is in the class.

tinygrad gives CUDA's driver PTX, and the driver's compiler makes machine code of it: then the bytes
of results would depend on the driver. Here the library NVRTC makes the card's machine code, in the
process that compiles tasks, and the driver only loads it.

NVRTC comes from the package ``nvidia-cuda-nvrtc-cu12`` (``pip install 'splitup[cuda]'``), from
``$NVRTC_PATH`` or from an installed CUDA toolkit, in this order.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from splitup.core.errors import Unavailable

_VERSION: Final = re.compile(rb"Cuda compilation tools, release [0-9.]+, (V[0-9.]+)")
_DRIVER: Final = Path("/proc/driver/nvidia/version")


@functools.cache
def install() -> None:
    """Find NVRTC, and have CUDA's kernels compiled to machine code."""
    if not os.environ.get("NVRTC_PATH") and (library := _find_package()) is not None:
        os.environ["NVRTC_PATH"] = str(library)
    with suppress(AttributeError, OSError):  # without NVRTC there is still PTX
        from tinygrad.runtime.support import compiler_cuda

        original = compiler_cuda.NVRTCCompiler

        class NVRTCCompiler(original):  # type: ignore[misc,valid-type]
            def __init__(self, arch: str, ptx: bool = False, cache_key: str = "cuda") -> None:
                super().__init__(arch, ptx=False, cache_key=cache_key)

        compiler_cuda.NVRTCCompiler = NVRTCCompiler


def _find_package() -> Path | None:
    with suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.cuda_nvrtc")
        for folder in (found and found.submodule_search_locations) or ():
            for library in sorted(Path(folder).glob("lib/libnvrtc.so.*")):
                return library
    return None


def describe(device: Any) -> str:
    """Return a card's architecture and the version of what compiles for it.

    Where that is the driver, as of PTX on CUDA, it is the driver's. Raises Unavailable when neither
    says its version.
    """
    from tinygrad.runtime.autogen import nvjitlink, nvrtc

    renderer = device.renderer
    library = {"NVRTCCompiler": nvrtc, "NVPTXCompiler": nvjitlink}.get(
        type(renderer.compiler).__name__
    )
    version = _read_driver_version() if library is None else _read_version(library.dll._name)
    return f"{renderer.target.arch}, {version}"


def _read_version(library: str) -> str:
    """Return the version that one of NVIDIA's compilers has in its text."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if (found := _VERSION.search(data)) is None:
            raise Unavailable(f"{library} does not say its version; install another NVRTC")
        return f"compiler {found[1].decode()}"


def _read_driver_version() -> str:
    with suppress(OSError):
        return f"driver {_DRIVER.read_text().splitlines()[0].strip()}"
    raise Unavailable(
        "the NVIDIA driver compiles the kernels and does not say its version; "
        "use DEV=CUDA:CUDA with NVRTC: pip install 'splitup[cuda]'"
    )
