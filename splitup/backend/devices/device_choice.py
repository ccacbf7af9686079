"""Choose the device and code generator that tinygrad uses on this machine.

tinygrad 0.14's CPU device always compiles four small host programs with clang, even when the
kernels themselves need no compiler (``DEV=CPU:X86``). ``install_host_programs`` gives it the four
objects that this package ships, so that an x86-64 machine needs nothing but Python. See
``docs/adr/0002-tinygrad-as-it-is-used.md``.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tinygrad.device import Device, TinyELF
from tinygrad.helpers import CACHELEVEL, DEV, NUM_CPU_THREADS, PARALLEL, Target
from tinygrad.runtime import ops_cpu

from splitup.backend.compiler import row_sums
from splitup.core.errors import ConfigurationError, Unavailable
from splitup.cpu import native_kernels

OTHER_DEVICE: Final = "; unset DEV, or set DEV=CPU:X86 on x86-64"  # ends an error about DEV
GPU_DEVICES: Final = ("METAL", "AMD", "NV", "CUDA")  # in the order tinygrad itself tries them
_DRIVERS: Final = {
    "CL": "splitup.backend.devices.opencl",
    "CUDA": "splitup.backend.devices.cuda",
    "NV": "splitup.backend.devices.cuda",
    "WEBGPU": "splitup.backend.devices.webgpu",
}
_DRIVER_CHARS: Final = 120  # of the 200 that the name of a class may have
_X86: Final = frozenset({"x86_64", "amd64"})
_NVIDIA: Final = ("0x10de", "/dev/nvidiactl", "/dev/dxg")  # PCI vendor; the driver's file, WSL's
_CARDS: Final = {"NV": _NVIDIA, "CUDA": _NVIDIA, "AMD": ("0x1002", "/dev/kfd")}
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What runs the kernels on this machine. Equal ``determinism_class``, equal output bytes."""

    device: str
    renderer: str
    compiler: str  # path, or "" when kernels are generated without one
    reason: str
    determinism_class: str

    def to_dict(self) -> dict[str, str]:
        """Return the fields for a JSON report."""
        return asdict(self)


def find_clang() -> str:
    """Return the path of the C compiler tinygrad would call ($CC, else clang), or ""."""
    return shutil.which(os.environ.get("CC", "") or "clang") or ""


class _HostProgram(NamedTuple):
    """One of tinygrad's host programs, compiled; stands for what tinygrad would compile."""

    name: str
    lib: bytes
    target: Target

    def to_elf(self) -> TinyELF:
        return TinyELF(self.lib, self.name, self.target, ())


def install_host_programs() -> None:
    """Give tinygrad's CPU device its four host programs, which this package ships compiled.

    Generating them anew whenever the device is opened takes half a second of CPU time. Where those
    for this machine are not shipped they need clang.
    """
    original = ops_cpu.do_to_program
    if getattr(original, "splitup", False):
        return

    def find_program(ast: Any, renderer: Any) -> Any:
        objects = _load_host_programs(renderer.target.arch.partition(",")[0])
        if (found := objects.get(ast.key.hex())) is not None:
            return _HostProgram(ast.arg.name, found, renderer.target)
        if find_clang():
            return original(ast, renderer)
        raise Unavailable(
            "tinygrad asks for a C compiler and none is here: use DEV=CPU:X86 on x86-64, "
            "or install one with 'apt install clang'"
        )

    find_program.splitup = True  # type: ignore[attr-defined]
    ops_cpu.do_to_program = find_program


@functools.cache
def _load_host_programs(arch: str) -> dict[str, bytes]:
    file = importlib.resources.files("splitup.cpu") / "host_programs" / f"{arch}.json"
    if not file.is_file():
        return {}
    table = json.loads(file.read_text())
    return {digest: base64.b64decode(text) for digest, text in table["objects"].items()}


@functools.cache
def select_device(index: int = 0) -> DeviceReport:
    """Choose the device once per process, open it, and tell tinygrad.

    ``index`` is its number where a machine has several of a kind; all CPUs are one device.
    ``DEV`` in the environment decides; otherwise a GPU that opens, else the CPU: there with
    tinygrad's own assembler on x86-64 and with clang elsewhere. Raises Unavailable when nothing
    works and ConfigurationError when ``DEV`` names something that does not.
    """
    install_host_programs()
    # One process computes one task at a time, and several processes share a machine: no threads.
    # tinygrad's kernels depend on the number of threads, so it is the same on every machine.
    NUM_CPU_THREADS.value = 1
    PARALLEL.value = 0
    CACHELEVEL.value = 0  # its cache on disk is a shared file that everybody unpickles
    asked = os.environ.get("DEV", "")
    device, renderer = str(DEV.device), str(DEV.renderer)
    reason = f"DEV={asked} is set"
    if not device:
        device = next((name for name in GPU_DEVICES if _opens(name)), "CPU")
        reason = "a GPU was found" if device != "CPU" else "no GPU was found"
    if device == "CPU" and not renderer:
        renderer, why = _select_cpu_renderer()
        reason += f"; {why}"
    if not asked or device == "CPU":
        DEV.value = f"{device}:{renderer}" if renderer else device
    if device == "CPU" and renderer == "CLANG" and not find_clang():
        raise ConfigurationError(
            f"DEV={asked} asks for clang and none is here: 'apt install clang', or set CC to its "
            f"path{OTHER_DEVICE}"
        )
    try:
        if (driver := _find_driver(device)) is not None:
            driver.install()
        if index and device != "CPU":
            device = f"{device}:{index}"
        opened = Device[device]
        name = opened._renderer_name(type(opened.renderer))
        clang = find_clang() if device == "CPU" and name == "CLANG" else ""
        determinism = _get_class(device, name, clang)
    except Exception as error:
        raise ConfigurationError(
            f"tinygrad cannot use DEV={asked or device}: {error or type(error).__name__}"
            f"{OTHER_DEVICE}"
        ) from error
    return DeviceReport(device, name, clang, reason, determinism)


def _find_driver(device: str) -> Any:
    """Return the module that completes tinygrad's runtime for a device, None if nothing lacks."""
    kind = device.partition(":")[0]
    return importlib.import_module(_DRIVERS[kind]) if kind in _DRIVERS else None


def _opens(device: str) -> bool:
    if device in _CARDS and _lacks_card(*_CARDS[device]):
        return False
    with suppress(Exception):  # every missing driver raises another error
        return Device[device] is not None
    return False


def _lacks_card(vendor: str, *files: str) -> bool:
    """Return whether no such GPU can be here: loading the drivers takes most of a second."""
    if sys.platform != "linux" or platform.machine().lower() not in _X86:
        return False  # where a GPU may be no PCI device
    if any(Path(file).exists() for file in files):
        return False
    with suppress(OSError):
        vendors = [path.read_text().strip() for path in _PCI_DEVICES.glob("*/vendor")]
        return vendor not in vendors
    return False


def _select_cpu_renderer() -> tuple[str, str]:
    """Choose tinygrad's assembler where there is one.

    About as fast as clang 19, more than twice as fast as clang 14 on float16, and its kernels do
    not depend on which clang is installed: docs/adr/0002-tinygrad-as-it-is-used.md.
    """
    clang = find_clang()
    if platform.machine().lower() in _X86:
        note = f" (DEV=CPU:CLANG would use {clang})" if clang else ""
        return "X86", f"kernels for x86-64 need no compiler{note}"
    if clang:
        return "CLANG", f"{clang} compiles kernels for the CPU"
    raise Unavailable(
        "tinygrad needs a compiler on this machine and found none: 'apt install clang'"
    )


def get_common_class() -> str:
    """Return the class of x86-64 machines with AVX2, without a GPU or a compiler."""
    version = importlib.metadata.version("tinygrad")
    return f"tinygrad {version}/CPU:X86/x86_64/{native_kernels.CLASS_PART}"


def _get_class(device: str, renderer: str, clang: str) -> str:
    """Return a name made of everything that output bytes may depend on."""
    version = importlib.metadata.version("tinygrad")
    parts = [f"tinygrad {version}", f"{device.partition(':')[0]}:{renderer}"]  # whatever its number
    if (driver := _find_driver(device)) is not None:
        parts.append(_shorten(driver.describe(Device[device])))
    elif device != "CPU":
        parts.append(str(getattr(Device[device], "arch", "")))
    elif renderer == "X86":
        parts.append("x86_64")  # the assembler needs no optional feature of the CPU (ADR 2)
    else:
        parts.append(_get_cpu_features())
    if renderer == "LLVM":
        parts.append(_get_llvm_version())
    if row_sums.applies_to(Device[device].renderer):
        parts.append(row_sums.CLASS_PART)
    if native_kernels.computes_for(device):
        parts.append(native_kernels.CLASS_PART)
    if clang:
        banner = subprocess.run([clang, "--version"], capture_output=True, text=True, check=False)
        parts.append((banner.stdout.splitlines() or ["unknown clang"])[0])
    return "/".join(parts)


def _shorten(text: str) -> str:
    """Return a driver's description of itself as a class may hold it; other texts stay others."""
    plain = "".join(char if " " <= char <= "~" and char != "/" else "_" for char in text)
    if plain == text and len(text) <= _DRIVER_CHARS:
        return text
    return f"{plain[:_DRIVER_CHARS]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _get_cpu_features() -> str:
    """Return a digest of the CPU's instruction sets, which compilers generate kernels for."""
    text = ""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                text += " ".join(sorted(line.partition(":")[2].split()))
                break
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _get_llvm_version() -> str:
    """Return the version of the library that generates the kernels."""
    from tinygrad.runtime.autogen import llvm  # the import loads the library

    numbers = [ctypes.c_uint32() for _ in range(3)]
    llvm.LLVMGetVersion(*numbers)
    return "LLVM " + ".".join(str(number.value) for number in numbers)
