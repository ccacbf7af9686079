"""A node that may not connect to the network's nodes says so before it serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from splitup_node.committee import outgoing
from splitup_node.committee.outgoing import _accepts, check_outgoing, find_refused
from splitup_node.config import NodeConfig

from splitup.core.errors import ConfigurationError
from splitup.net.http_server import make_app, serve_app
from tests.builders import address
from tests.node.cli.test_config import write

NODE = address(1)
PUBLIC, LOCAL = "http://8.8.8.8:7700", "http://127.0.0.1:7700"


@dataclasses.dataclass
class Party:
    endpoint: str
    node: str = address(2)


@dataclasses.dataclass
class Network:
    """A chain, a snapshot and a committee in one."""

    peers: list[str]
    member_endpoints: list[str]

    @property
    def members(self) -> list[Party]:
        return [Party(endpoint) for endpoint in self.member_endpoints]

    @property
    def entries(self) -> list[Party]:
        return [Party(LOCAL, NODE), *(Party(endpoint) for endpoint in self.peers)]


async def check(
    directory: Path, monkeypatch: pytest.MonkeyPatch, network: Network, *, allow: bool = False
) -> None:
    async def fetch_latest_snapshot(*_: Any) -> Network | None:
        return network if network.peers else None

    async def accept(endpoint: str) -> bool:  # no test connects to a public address
        return endpoint == PUBLIC or await _accepts(endpoint)

    monkeypatch.setattr(outgoing, "_accepts", accept)
    monkeypatch.setattr(outgoing, "fetch_latest_snapshot", fetch_latest_snapshot)
    config = NodeConfig.load(write(directory, allow_loopback=allow))
    await check_outgoing(config, NODE, network, None, network)  # type: ignore[arg-type]


async def test_a_network_of_loopback_nodes_needs_allow_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Network([LOCAL, "http://10.0.0.7:80"], [LOCAL])
    with pytest.raises(ConfigurationError, match=r"2 other nodes.*allow_loopback = true in .*toml"):
        await check(tmp_path, monkeypatch, local)
    await check(tmp_path, monkeypatch, local, allow=True)
    await check(tmp_path, monkeypatch, Network([LOCAL, PUBLIC], [LOCAL]))


async def test_without_other_nodes_the_members_say_where_the_network_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="runs on this machine"):
        await check(tmp_path, monkeypatch, Network([], [LOCAL, "http://localhost:7"]))
    await check(tmp_path, monkeypatch, Network([], [LOCAL, PUBLIC]))


async def test_names_that_do_not_resolve_are_not_refused() -> None:
    endpoints = [LOCAL, PUBLIC, "http://[::1]:1", "http://no-such-host.invalid:1"]
    assert await find_refused(endpoints) == [LOCAL, "http://[::1]:1"]


async def test_no_node_that_accepts_a_connection_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = "http://127.0.0.1:1"
    server = await serve_app(make_app(), "127.0.0.1", 0)
    try:
        await check(tmp_path, monkeypatch, Network([closed, server.url], []), allow=True)
        assert not caplog.records
        await check(tmp_path, monkeypatch, Network([closed], []), allow=True)
    finally:
        await server.close()
    assert "none of 1 other nodes accepts a connection" in caplog.text
