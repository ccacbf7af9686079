"""How much memory a device has, and how much of it no program uses, as its driver says.

    CUDA, NV      NVIDIA's management library (NVML), which comes with the driver
    AMD           files of Linux's amdgpu driver
    CPU, METAL    the machine's memory; what is free of it is not asked
    CL, WEBGPU    neither: their interfaces do not say it

Devices are numbered as tinygrad numbers them: CUDA's by their place on the PCI bus
(``splitup.sandbox.child`` sets CUDA_DEVICE_ORDER) among CUDA_VISIBLE_DEVICES, NV's by that place
alone, AMD's by their place in the kernel's topology.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from splitup.core import tuning
from splitup_node.worker.supervisor import parse_device

_NVML: Final = "libnvidia-ml.so.1"
_SYSFS: Final = Path("/sys")
_AMD_TOPOLOGY: Final = "devices/virtual/kfd/kfd/topology/nodes"


class DeviceMemory(NamedTuple):
    """Bytes of one device; ``free_bytes`` is None where nobody says what other programs use."""

    total_bytes: int
    free_bytes: int | None


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def find_memory(device: str) -> DeviceMemory | None:
    """Return the memory of a tinygrad device, "" for the largest here; None if it is unknown."""
    name, index = parse_device(device)
    match name.partition(":")[0].upper():
        case "CUDA":
            return _find_cuda(index)
        case "NV":
            return _find_nvidia(index)
        case "AMD":
            return (_list_amd()[index:] or [None])[0]
        case "CPU" | "METAL":  # METAL's memory is the machine's
            return _find_host()
        case "":
            cards = [_find_nvidia(number) for number in range(tuning.MAX_DEVICES)] + _list_amd()
            found = [_find_host(), *(card for card in cards if card is not None)]
            return max(found, key=lambda memory: memory.total_bytes)
        case _:
            return None


def _find_host() -> DeviceMemory:
    return DeviceMemory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None)


def _find_cuda(index: int) -> DeviceMemory | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _find_nvidia(index)
    names = [name.strip() for name in visible.split(",")]
    if index >= len(names):
        return None
    return _find_nvidia(int(names[index]) if names[index].isdigit() else names[index])


def _find_nvidia(card: int | str) -> DeviceMemory | None:
    """Return the memory of a card by its place on the bus, or by its UUID."""
    if (library := _load_nvml(_NVML)) is None:
        return None
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if isinstance(card, int):
        status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(card), ctypes.byref(handle))
    else:
        status = library.nvmlDeviceGetHandleByUUID(card.encode(), ctypes.byref(handle))
    if status or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    return DeviceMemory(memory.total, memory.free)


@functools.cache
def _load_nvml(name: str) -> Any:
    """Return the open library, None where there is no driver of NVIDIA's."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(name)
        if not library.nvmlInit_v2():
            return library
    return None


def _list_amd() -> list[DeviceMemory | None]:
    found: list[DeviceMemory | None] = []
    with suppress(OSError, ValueError):
        nodes = sorted((_SYSFS / _AMD_TOPOLOGY).iterdir(), key=lambda node: int(node.name))
        for node in nodes:
            if int((node / "gpu_id").read_text()):  # 0 of a processor
                found.append(_read_amd(node))
    return found


def _read_amd(node: Path) -> DeviceMemory | None:
    with suppress(OSError, ValueError, KeyError):
        lines = (node / "properties").read_text().splitlines()
        minor = dict(line.split() for line in lines)["drm_render_minor"]
        folder = _SYSFS / f"class/drm/renderD{int(minor)}/device"
        total, used = (int((folder / f"mem_info_vram_{w}").read_text()) for w in ("total", "used"))
        return DeviceMemory(total, max(0, total - used))
    return None
