"""What is said before a stake is taken."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from splitup_node.config import NodeConfig
from splitup_node.preflight import check_settings
from splitup_node.worker.device_memory import find_memory

from splitup.core.errors import ConfigurationError
from tests.node.cli.test_config import write


def load(directory: Path, **changes: str | bool) -> NodeConfig:
    return NodeConfig.load(write(directory, **{"listen": "127.0.0.1:0", "vram": "4MB", **changes}))


def test_usable_settings_pass(tmp_path: Path) -> None:
    check_settings(load(tmp_path))


def test_a_port_that_is_taken_is_named_with_the_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = load(tmp_path, listen=f"127.0.0.1:{port}")
        with pytest.raises(
            ConfigurationError, match=rf"127.0.0.1:{port}.*choose another one in .*toml"
        ):
            check_settings(config)
        with pytest.raises(ConfigurationError, match=r"choose another one with --listen"):
            check_settings(config, from_flags=True)  # init has written no file yet


@pytest.mark.parametrize(
    ("endpoint", "is_wrong"),
    [
        ("http://203.0.113.5:7700", True),
        ("http://node.example:7700", True),
        ("http://127.0.0.1:7700", False),
        ("https://node.example", False),  # a proxy on this machine speaks TLS
        ("", False),
    ],
)
def test_a_public_endpoint_needs_more_than_a_loopback_listener(
    tmp_path: Path, endpoint: str, is_wrong: bool
) -> None:
    config = load(tmp_path, endpoint=endpoint)
    if not is_wrong:
        check_settings(config)
        return
    with pytest.raises(ConfigurationError, match=r'set listen to "0\.0\.0\.0:'):
        check_settings(config)
    check_settings(load(tmp_path, endpoint=endpoint, listen="0.0.0.0:0"))


def test_more_memory_than_the_machine_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEV", "CPU")
    memory = find_memory("CPU")
    assert memory is not None
    too_much = f"{memory.total_bytes // 10**9 + 1}GB"
    with pytest.raises(ConfigurationError, match=r"GB of device memory, .*has [0-9.]+ GB.*lower"):
        check_settings(load(tmp_path, vram=too_much))
    check_settings(load(tmp_path, vram=f"{memory.total_bytes // 10**9}GB"))
    monkeypatch.setenv("DEV", "WEBGPU")
    check_settings(load(tmp_path, vram=too_much))  # nobody knows what it has
