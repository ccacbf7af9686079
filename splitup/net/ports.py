"""Ports for servers on this machine, chosen once and kept."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from splitup.errors import ConfigurationError

_FIRST: Final = 10_000  # below are the ports that well-known programs listen on
_EPHEMERAL: Final = 32_768  # where Linux begins to hand out ports to outgoing connections
_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_next: dict[int, int] = {}  # by process


def find_free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports of the loopback that nobody listens on right now.

    Never one that the system hands out to outgoing connections: such a port is free now and taken
    by anybody's connection a second later. And never one that this process was given before, until
    it has been given all: those may be meant for servers that start later. Raises
    ConfigurationError when there are too few.
    """
    found: list[int] = []
    for port in _iter_ports():
        if len(found) == count:
            break
        if is_port_free(port):
            found.append(port)
    if len(found) < count:
        raise ConfigurationError(
            f"only {len(found)} of {count} ports are free on 127.0.0.1; stop some servers"
        )
    return found


def _iter_ports() -> Iterator[int]:
    """Yield every port once, from where this process has come to.

    Each process begins at random: stretches of two that choose at the same time seldom meet, and
    far less often than as many ports strewn over all would.
    """
    last = _get_ephemeral_start()
    here = os.getpid()
    if here not in _next:  # a fork goes its own way
        _next.clear()
        _next[here] = random.randrange(_FIRST, last)
    for _ in range(_FIRST, last):
        port = _next[here]
        _next[here] = port + 1 if port + 1 < last else _FIRST
        yield port


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
    # a system that hands out nearly everything leaves nothing better than the usual range
    return start if start > 2 * _FIRST else _EPHEMERAL
