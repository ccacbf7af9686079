"""What is wrong with a node's settings on this machine, checked before any stake is taken."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from splitup.core.errors import ConfigurationError
from splitup.net.endpoints import is_loopback
from splitup_node.config import NodeConfig
from splitup_node.worker.device_memory import find_memory

_Locate = Callable[[str], str]  # of a setting: where to change it


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
        memory = find_memory(device or os.environ.get("DEV", ""))
        if memory is not None and wanted_bytes > memory.total_bytes:
            raise ConfigurationError(
                f"the node is to fill {wanted_bytes / 1e9:.1f} GB of device {device or 'memory'}, "
                f"and this machine has {memory.total_bytes / 1e9:.1f} GB of it; lower it "
                f"{locate('vram')}"
            )
