"""The files that a computing process needs, besides those that it is handed open."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.sandbox.landlock import FileRight

# Files of the drivers of a device of tinygrad. Its own drivers, which reach a GPU over PCI without
# the system's, cannot be confined: such a device reads all memory.
_NVIDIA: Final = (
    *("/dev/nvidia*", "/dev/nvidia-caps/*", "/proc/driver/nvidia", "/proc/self", "/proc/devices"),
    *("/sys/module/nvidia*", "/sys/bus/pci/devices", "/sys/devices/pci*", "/dev/shm"),
    *("/proc/sys/vm/mmap_min_addr", "/proc/self/task"),
)
_OWN_THREADS: Final = Path("/proc/self/task")  # CUDA writes their names
_AMD: Final = (
    *("/dev/kfd", "/dev/dri", "/proc/self", "/sys/class/drm", "/sys/class/kfd", "/sys/module/amd*"),
    *("/sys/devices/virtual/kfd", "/sys/bus/pci/devices", "/sys/devices/pci*"),
)
_ANY: Final = (*_NVIDIA, *_AMD)
_DRIVERS: Final = {"AMD": _AMD, "CUDA": _NVIDIA, "NV": _NVIDIA, "CL": _ANY, "WEBGPU": _ANY}
_SYSTEM_LIBRARIES: Final = (
    # OpenCL's and Vulkan's lists of drivers; what pocl, OpenCL on the processor, compiles with
    *("/etc/OpenCL", "/etc/vulkan", "/usr/share/vulkan", "/usr/share/pocl"),
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib"),
    *("/usr/local/cuda*", "/opt/rocm*", "/etc/ld.so.cache", "/etc/alternatives"),
)
_MACHINE: Final = (  # what numerical libraries ask about the processor and its memory
    *("/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu", "/sys/devices/system/node"),
)
_SINKS: Final = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARY_SETTINGS: Final = (
    *("LD_LIBRARY_PATH", "CUDA_PATH", "LLVM_PATH", "NVRTC_PATH", "NVJITLINK_PATH"),
    *("WEBGPU_PATH", "VK_ICD_FILENAMES", "OCL_ICD_VENDORS"),
)


@dataclass(frozen=True, slots=True)
class Device:
    """What a tinygrad device such as "CUDA:1" needs; "" is any that this machine has."""

    drivers: tuple[Path, ...]
    compiler: Path | None
    scratch: Path | None  # where drivers write
    writes_files: bool  # its driver does

    @classmethod
    def find(cls, name: str) -> Device:
        """Return what exists of it on this machine."""
        kind = name.partition(":")[0].upper()
        patterns = _DRIVERS.get(kind, ()) if kind else _ANY
        drivers = tuple(_expand(patterns))
        if not any(path.is_relative_to("/dev") and path != Path("/dev/shm") for path in drivers):
            drivers = ()
        writes_files = bool(drivers) or kind == "CL"
        scratch = os.environ.get("TMPDIR") if writes_files else None
        # on x86-64 tinygrad's own assembler and the shipped objects need no compiler
        is_needed = "CLANG" in name.upper() or platform.machine().lower() not in ("x86_64", "amd64")
        found = shutil.which(os.environ.get("CC", "") or "clang") if is_needed else None
        if kind == "CL" and not drivers:
            found = shutil.which("ld")  # pocl's linker
        return cls(
            drivers,
            None if found is None else Path(found),
            None if scratch is None else Path(scratch),
            writes_files,
        )

    def list_groups(self) -> list[int]:
        """Return the groups that may open the device, such as "render"."""
        own = set(os.getgroups()) | {os.getegid()}
        groups = set()
        for path in self.drivers:
            for node in [path, *path.glob("*")] if path.is_relative_to("/dev") else []:
                status = node.stat()
                if stat.S_ISCHR(status.st_mode) and not status.st_mode & stat.S_IWOTH:
                    groups.add(status.st_gid)
        return sorted((groups & own) if os.geteuid() else groups - {0})


def find_files(device: Device | None) -> dict[Path, FileRight]:
    """Return all that a process may open: libraries, and what its device needs."""
    allowed: dict[Path, FileRight] = dict.fromkeys(find_libraries(), FileRight.READ)
    allowed |= dict.fromkeys(map(Path, _MACHINE), FileRight.READ)
    allowed |= dict.fromkeys(map(Path, _SINKS), FileRight.READ_FILE | FileRight.WRITE_FILE)
    if device is not None:
        for path in device.drivers:
            is_node = path.is_relative_to("/dev")
            allowed[path] = FileRight.DEVICE if is_node else FileRight.READ
            if path == _OWN_THREADS:
                allowed[path] |= FileRight.WRITE_FILE | FileRight.TRUNCATE
        if device.scratch is not None:
            allowed[device.scratch] = FileRight.SCRATCH
        if device.compiler is not None:
            for program in _list_interpreters(device.compiler):
                allowed[program] = FileRight.READ_FILE | FileRight.EXECUTE
    return allowed


def find_libraries() -> list[Path]:
    """Return the folders of Python's library, of its packages and of the system's libraries.

    Neither the current folder nor any other that ``sys.path`` may name: of those, only the packages
    that are imported already.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = [Path(sysconfig.get_path(name)) for name in names]
    found += [Path(one) for one in sys.path if Path(one).name in ("site-packages", "dist-packages")]
    for name, module in list(sys.modules.items()):
        if "." not in name:
            found += map(Path, getattr(module, "__path__", ()))
    for setting in _LIBRARY_SETTINGS:
        found += [Path(one) for one in os.environ.get(setting, "").split(os.pathsep) if one]
    found += _expand(_SYSTEM_LIBRARIES)
    return list(dict.fromkeys(path for path in found if path.is_absolute() and path.exists()))


def are_readable_by_all(folders: Iterable[Path]) -> bool:
    """Return whether every user of the machine may read these folders."""
    for folder in folders:
        path = folder.resolve()
        wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
        if path.stat().st_mode & wanted != wanted:
            return False
        if not all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents):
            return False
    return True


def _expand(patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from Path("/").glob(pattern.removeprefix("/"))


def _list_interpreters(program: Path) -> list[Path]:
    """Return a program, and the loaders that the kernel starts for one with shared libraries."""
    return [program, program.resolve(), *_expand(["/lib*/ld-*.so*", "/lib/*/ld-*.so*"])]
