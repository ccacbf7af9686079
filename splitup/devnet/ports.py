"""Ports for the servers of a devnet, chosen at its first start and kept."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path
from typing import Final

from splitup.core.errors import ConfigurationError

_FIRST: Final = 10_000  # well-known programs listen on lower ports
_EPHEMERAL: Final = 32_768  # where Linux begins to hand out ports to outgoing connections
_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: dict[int, int] = {}  # port -> the socket that marks it until the process ends


def find_free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports of the loopback that nobody listens on right now.

    No ephemeral ports, which an outgoing connection may take a second later; and no ports that were
    returned to a process that still runs, as its server may be starting or restarting. Raises
    ConfigurationError when there are too few.
    """
    candidates = list(range(_FIRST, _get_ephemeral_start()))
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if is_port_free(port) and hold_port(port):
            found.append(port)
    if len(found) < count:
        raise ConfigurationError(
            f"only {len(found)} of {count} ports are free on 127.0.0.1; stop some servers"
        )
    return found


def hold_port(port: int) -> bool:
    """Mark a port as taken while this process runs; return False when another one marked it.

    On Linux the mark is an abstract socket address, which ends with its process.
    """
    if port in _held:
        return False
    descriptor = -1
    if sys.platform == "linux":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
            try:
                mark.bind(b"\0splitup/port/%d" % port)
            except OSError:
                return False
            descriptor = mark.detach()
    _held[port] = descriptor
    return True


def is_port_free(port: int) -> bool:
    """Return whether a server could listen on ``port`` of the loopback now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _get_ephemeral_start() -> int:
    try:
        start = int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL
    # when nearly all ports are ephemeral, the usual range is the best choice
    return start if start > 2 * _FIRST else _EPHEMERAL
