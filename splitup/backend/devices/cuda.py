"""CUDA and NV: machine code by NVIDIA's own compiler library, whose version is in the class.

Launches on CUDA are encoded once, and a step whose rows came before is one call of the driver.

tinygrad gives CUDA's driver PTX, and the driver's compiler makes machine code of it: then the bytes
of results would depend on the driver. Here the library NVRTC makes the card's machine code, in the
process that compiles tasks, and the driver only loads it.

NVRTC comes from the package ``nvidia-cuda-nvrtc-cu12`` (the extra ``cuda``), from
``$NVRTC_PATH`` or from an installed CUDA toolkit, in this order. What kernels of float16 include
comes with it: from ``nvidia-cuda-runtime-cu12``, ``$CUDA_PATH`` or the toolkit.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tinygrad.device import TinyELF

from splitup.backend.buffers import release_with
from splitup.backend.compiler.launch_sizes import LaunchTerms, compute_sizes
from splitup.backend.compiler.row_sums import is_for_tiles
from splitup.core.errors import Unavailable
from splitup.core.source_tree import compose_package_install

_VERSION: Final = re.compile(rb"Cuda compilation tools, release [0-9.]+, (V[0-9.]+)")
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_INTEGERS: Final = {4: ctypes.c_int32, 8: ctypes.c_int64}  # by bytes
_MAX_GRAPHS: Final = 4  # of a state: for one row, a chunk, and a rest of one


@functools.cache
def install() -> None:
    """Find NVRTC, and have CUDA's kernels compiled to machine code."""
    if not os.environ.get("NVRTC_PATH") and (library := _find("cuda_nvrtc", "lib/libnvrtc.so.*")):
        os.environ["NVRTC_PATH"] = str(library)
        headers = _find("cuda_runtime", "include/cuda_fp16.h")
        if headers is not None and not os.environ.get("CUDA_PATH"):
            os.environ["CUDA_PATH"] = str(headers.parents[1])
    with suppress(AttributeError, OSError):  # without NVRTC there is still PTX
        from tinygrad.runtime.support import compiler_cuda

        original = compiler_cuda.NVRTCCompiler

        class NVRTCCompiler(original):  # type: ignore[misc,valid-type]
            def __init__(self, arch: str, ptx: bool = False, cache_key: str = "cuda") -> None:
                super().__init__(arch, ptx=False, cache_key=cache_key)

        compiler_cuda.NVRTCCompiler = NVRTCCompiler
    with suppress(AttributeError, OSError):  # without the driver there is still NV
        _install_launches()


def _find(package: str, pattern: str) -> Path | None:
    """Return a file of one of NVIDIA's Python packages, None where it is not installed."""
    with suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(f"nvidia.{package}")
        for folder in (found and found.submodule_search_locations) or ():
            for path in sorted(Path(folder).glob(pattern)):
                return path
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
        f"use DEV=CUDA:CUDA with NVRTC: {compose_package_install('cuda')}"
    )


# ---- launches ----------------------------------------------------------------------------------


def _install_launches() -> None:
    """Have CUDA's kernels launched by ``CudaLaunch``."""
    from tinygrad.runtime import ops_cuda

    driver = ctypes.CDLL(ops_cuda.cuda.dll._name)

    class CudaKernel(ops_cuda.CUDAProgram):  # type: ignore[misc]
        is_movable = False  # a wide load needs an address that is as aligned; nothing says how wide

        def make_launch(
            self, terms: LaunchTerms, tiled: tuple[Any, Any] | None = None
        ) -> CudaLaunch:
            """Return a launch; ``tiled`` is a kernel for many rows, and its sizes."""
            return CudaLaunch(driver, self, terms, tiled)

    ops_cuda.CUDAProgram = CudaKernel  # what a device that is opened from now on loads kernels with


class CudaLaunch:
    """One launch of a kernel, with arguments of its own in memory that the driver reads."""

    def __init__(
        self,
        driver: Any,
        kernel: Any,
        terms: LaunchTerms,
        tiled: tuple[Any, Any] | None = None,
    ) -> None:
        """``tiled`` is the kernel for many rows, and its sizes, if there is one."""
        first = 8 * len(terms.regions)  # addresses come first
        numbers = list(TinyELF.iter_sig(kernel.signature[len(terms.regions) :], first))
        end = numbers[-1][0] + numbers[-1][1].itemsize if numbers else first
        self._arguments = arguments = (ctypes.c_char * end)()
        self._length = ctypes.c_size_t(end)
        for index, region in enumerate(terms.regions):
            ctypes.c_uint64.from_buffer(arguments, 8 * index).value = region.value
        self._numbers = [
            _INTEGERS[dtype.itemsize].from_buffer(arguments, at) for at, dtype in numbers
        ]
        # CU_LAUNCH_PARAM_BUFFER_POINTER, its value, CU_LAUNCH_PARAM_BUFFER_SIZE, its value, the end
        words = (1, ctypes.addressof(arguments), 2, ctypes.addressof(self._length), None)
        self.extra = (ctypes.c_void_p * len(words))(*words)
        self.driver, self.kernel = driver, kernel
        self.variables = list(terms.variables.values())
        self._names = list(terms.variables)
        self._few = kernel, (terms.groups, terms.threads)
        self._many = tiled or self._few
        self._values: tuple[int, ...] | None = None
        self._start: Callable[[], int] = lambda: 0
        self.size: tuple[int, ...] = ()

    def __call__(self) -> None:
        """Run it after all that was launched before, in the context that is set."""
        values = tuple([variable.value for variable in self.variables])
        if values != self._values:
            self._bind(values)
        if status := self._start():
            _check(status)

    def _bind(self, values: tuple[int, ...]) -> None:
        """Set what depends on the variables."""
        for number, value in zip(self._numbers, values, strict=True):
            number.value = value
        named = dict(zip(self._names, values, strict=True))
        self.kernel, chosen = self._many if is_for_tiles(values) else self._few
        groups, threads = (compute_sizes(sizes, named) or () for sizes in chosen)
        self.size = (*_fill_up(groups), *_fill_up(threads))
        words = [ctypes.c_uint32(word) for word in (*self.size, self.kernel.smem)]
        function, start = self.kernel.prg, self.driver.cuLaunchKernel
        self._start = functools.partial(start, function, *words, None, None, self.extra)
        self._values = values

    def join(self, launches: Sequence[CudaLaunch]) -> Callable[[], None]:
        """Return what launches all of these, in order."""
        return CudaStep(launches)


class CudaStep:
    """All launches of a step: one by one at first, as one graph once the same rows come again.

    A graph is one call of the driver. It keeps arguments as they are when it is made, so there is
    one for each number of rows.
    """

    def __init__(self, launches: Sequence[CudaLaunch]) -> None:
        self._launches, self._driver = launches, launches[0].driver
        self._context = launches[0].kernel.dev.context
        self._variables = list({id(v): v for one in launches for v in one.variables}.values())
        self._graphs: dict[tuple[int, ...], Any] = {}  # by rows; None where they came once

    def __call__(self) -> None:
        """Launch all."""
        _check(self._driver.cuCtxSetCurrent(self._context))
        rows = tuple([variable.value for variable in self._variables])
        if (graph := self._graphs.get(rows)) is not None:
            _check(self._driver.cuGraphLaunch(graph, None))
            return
        for launch in self._launches:
            launch()
        if rows in self._graphs:
            self._graphs[rows] = self._make_graph()
        elif len(self._graphs) < _MAX_GRAPHS:
            self._graphs[rows] = None

    def _make_graph(self) -> Any:
        from tinygrad.runtime.autogen import cuda

        driver, graph, made = self._driver, ctypes.c_void_p(), ctypes.c_void_p()
        before: Any = None
        _check(driver.cuGraphCreate(ctypes.byref(graph), 0))
        try:
            for launch in self._launches:
                parameters = cuda.CUDA_KERNEL_NODE_PARAMS_v1(
                    launch.kernel.prg, *launch.size, launch.kernel.smem, None, launch.extra
                )
                node, count = ctypes.c_void_p(), ctypes.c_size_t(0 if before is None else 1)
                added = driver.cuGraphAddKernelNode(
                    ctypes.byref(node), graph, before, count, ctypes.byref(parameters)
                )
                _check(added)
                before = ctypes.byref(node)
            made_of = (ctypes.byref(made), graph, None, None, ctypes.c_size_t(0))
            _check(driver.cuGraphInstantiate_v2(*made_of))
        finally:
            driver.cuGraphDestroy(graph)
        release_with(self, driver.cuGraphExecDestroy, made)
        return made


def _fill_up(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, *[1] * (3 - len(sizes)))


def _check(status: int) -> None:
    """Raise RuntimeError with the driver's words."""
    if status:
        from tinygrad.runtime.ops_cuda import check

        check(status)
