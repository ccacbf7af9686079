"""What a hostile process could reach: files, servers and memory of this one, its daemon."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from splitup.backend.compiler.kernel_cache import KernelCache
from splitup.crypto.keystore import create_identity, create_passphrase
from tests.sandbox.attempts import Target


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    """Make everything that ``tests.sandbox.attempts`` tries to reach."""
    keystore, passphrase = tmp_path / "key.json", tmp_path / "passphrase"
    create_passphrase(passphrase)
    create_identity(keystore, passphrase, work_factor=2**10)
    KernelCache(tmp_path / "kernels").store("task", "class", "CPU", b"code")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "other-task.json").write_bytes(b"{}")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    secret = secrets.token_hex(16)
    memory = ctypes.create_string_buffer(secret.encode())
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        for address in (name := f"\0{secret}", path := str(tmp_path / "socket")):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        yield {
            "secrets": [str(file) for file in files],
            "folders": [str(tmp_path), str(tmp_path / "kernels"), str(tmp_path / "cache")],
            "pid": os.getpid(),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "abstract": name[1:],
            "unix": path,
            "secret": secret,
            "address": ctypes.addressof(memory),
        }


def check_reached(reached: dict[str, str], lacks: str) -> None:
    """Fail when anything was reached; on a system that cannot confine say what it lacks."""
    if lacks:
        pytest.xfail(f"this system cannot confine: {lacks}; reached: {sorted(reached)}")
    assert reached == {}
