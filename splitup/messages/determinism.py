"""The determinism classes that a network knows: what a node may say about how it computes.

A class is named by everything that its output bytes may depend on
(``splitup.backend.devices.device_choice``):

    tinygrad VERSION/DEVICE:RENDERER/MACHINE…

Nodes of one class check each other, so a class that only one party has would be checked by nobody
else. All parties agree on versions, devices and renderers. The rest (architecture, compiler) cannot
be listed; members mark a class in the snapshot when they do not compute in it themselves.
"""

from __future__ import annotations

import re
from typing import Final

from splitup.core import limits
from splitup.core.errors import ConfigurationError

VERSIONS: Final = frozenset({"0.14.0"})
# What computes, on hardware that is sold; tinygrad's interpreter (PYTHON), its devices that compute
# nothing (NULL, DISK, NPY) and its experimental ones are none of them.
DEVICES: Final = frozenset(
    {
        "CPU:X86",
        "CPU:CLANG",
        "CPU:LLVM",
        "METAL:METAL",
        "AMD:HIP",
        "AMD:HIPCC",
        "AMD:LLVM",
        "CUDA:CUDA",
        "CUDA:NVCC",
        "CUDA:PTX",
        "NV:CUDA",
        "NV:NAK",
        "NV:NVCC",
        "NV:PTX",
        "CL:OPENCL",
        "WEBGPU:WGSL",
    }
)
_NAME: Final = re.compile(
    r"tinygrad (?P<version>[^/]+)/(?P<device>[A-Z0-9]+:[A-Z0-9]+)/[\x20-\x7e]+"
)


def find_device(determinism: str) -> str:
    """Return the DEVICE:RENDERER of a known class, "" for a class that is not on the list."""
    match = _NAME.fullmatch(determinism)
    if match is None or len(determinism) >= limits.MAX_DETERMINISM_CHARS:  # a mark may precede it
        return ""
    if match["version"] not in VERSIONS or match["device"] not in DEVICES:
        return ""
    return match["device"]


def check_own(determinism: str) -> None:
    """Raise ConfigurationError when no member would take work of this machine."""
    if unknown := describe_unknown(determinism):
        raise ConfigurationError(f"this machine cannot serve: {unknown}")


def describe_unknown(determinism: str) -> str:
    """Return why a class is refused, "" for a known one."""
    if find_device(determinism):
        return ""
    return (
        f"the determinism class '{determinism[:80]}' is none that the network knows: tinygrad "
        f"{', '.join(sorted(VERSIONS))} on {', '.join(sorted(DEVICES))}; update SplitUp, or "
        "compute on one of these (DEV)"
    )
