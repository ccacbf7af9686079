"""What is wrong with a node's settings on this machine, checked before any stake is taken."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from splitup.core.errors import ConfigurationError
from splitup.net.endpoints import is_loopback
from splitup_node.config import NodeConfig
from splitup_node.worker.supervisor import parse_device

_QUERY_TIMEOUT_S: Final = 10.0
_Locate = Callable[[str], str]  # of a setting: where to change it
_AMD_MEMORY: Final = "card*/device/mem_info_vram_total"  # bytes, in files of Linux's amdgpu driver


def check_settings(config: NodeConfig, *, from_flags: bool = False) -> None:
    """Raise ConfigurationError for a port, an endpoint or a memory size that cannot work here.

    ``from_flags`` says that the settings are flags of ``splitup-node init``: there is no file yet.
    """

    def locate(setting: str) -> str:
        return f"with --{setting}" if from_flags else f"in {config.path}"

    _check_port(config, locate)
    _check_endpoint(config, locate)
    _check_memory(config, locate)


def _check_port(config: NodeConfig, locate: _Locate) -> None:
    """Raise unless a server could listen on the configured address now."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            raise ConfigurationError(
                f'nothing can listen on listen = "{config.listen}" ({error.strerror or error}); '
                f"stop what uses the port, or choose another one {locate('listen')}"
            ) from None


def _check_endpoint(config: NodeConfig, locate: _Locate) -> None:
    """Raise when the announced endpoint is another machine's to reach, but only this one can.

    An https endpoint is a proxy's, since a node speaks no TLS: the proxy may be on this machine.
    """
    endpoint = urlsplit(config.endpoint)
    if endpoint.scheme != "http" or config.relay not in ("auto", "off"):
        return
    if is_loopback(config.host) and not is_loopback(endpoint.hostname or ""):
        raise ConfigurationError(
            f'endpoint = "{config.endpoint}" is announced to other machines, but '
            f'listen = "{config.listen}" accepts connections of this machine only; '
            f'set listen to "0.0.0.0:{config.port}" {locate("listen")}'
        )


def _check_memory(config: NodeConfig, locate: _Locate) -> None:
    """Raise when a device is to fill more memory than it has."""
    for device, wanted_bytes in config.device_shares:
        has_bytes = find_memory_bytes(device)
        if has_bytes is not None and wanted_bytes > has_bytes:
            raise ConfigurationError(
                f"the node is to fill {wanted_bytes / 1e9:.1f} GB of device "
                f"{device or 'memory'}, and this machine has {has_bytes / 1e9:.1f} GB of it; "
                f"lower it {locate('vram')}"
            )


def find_memory_bytes(device: str) -> int | None:
    """Return the memory of a tinygrad device, "" for the largest here; None if it is unknown."""
    name, index = parse_device(device or os.environ.get("DEV", ""))
    match name.split(":")[0].upper():
        case "CUDA" | "NV":
            return _get(_list_nvidia_bytes(), index)
        case "AMD" | "HIP":
            return _get(_list_amd_bytes(), index)
        case "CPU" | "LLVM" | "METAL":  # METAL's memory is the host's
            return _get_host_bytes()
        case "":
            return max([_get_host_bytes(), *_list_nvidia_bytes(), *_list_amd_bytes()])
        case _:
            return None


def _get(sizes: list[int], index: int) -> int | None:
    return sizes[index] if index < len(sizes) else None


def _get_host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _list_nvidia_bytes() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        ).stdout
        return [int(line) * 2**20 for line in output.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _list_amd_bytes() -> list[int]:
    try:
        files = sorted(Path("/sys/class/drm").glob(_AMD_MEMORY))
        return [int(file.read_text()) for file in files]
    except (OSError, ValueError):
        return []
