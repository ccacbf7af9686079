from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from splitup.chain.client import Chain
from splitup.chain.deployment import deploy
from splitup.chain.rpc import Rpc, RpcError
from splitup.core.errors import ConfigurationError
from splitup.core.source_tree import find_source_tree
from splitup.devnet import anvil
from tests.builders import find_free_port
from tests.chain.conftest import MNEMONIC
from tests.local_chain import mine, start_anvil


async def test_chain_with_a_state_file_is_the_same_one_the_next_time(
    tmp_path: Path, anvil_binary: Path
) -> None:
    key = anvil.derive_key(MNEMONIC, 0)
    options: dict[str, Any] = {"mnemonic": MNEMONIC, "accounts": 1, "binary": anvil_binary}
    state = tmp_path / "state.json"
    async with start_anvil(find_free_port(), state_file=state, **options) as first:
        deployment = await deploy(first.url, key)
        async with await Chain.connect(first.url, deployment, private_key=key) as chain:
            await chain.send("usdc", "mint", chain.address, 7)
            height = (await chain.fetch_head()).number
    async with start_anvil(find_free_port(), state_file=state, **options) as second:
        async with await Chain.connect(second.url, deployment, private_key=key) as chain:
            assert await chain.call("usdc", "balanceOf", chain.address) == 7
            assert (await chain.fetch_head()).number == height
            events = await chain.fetch_events("market")
            assert [event.name for event in events][-1] == "ParametersSet"
            await chain.send("usdc", "mint", chain.address, 1)


async def test_old_states_are_dropped_not_written_to_the_users_home(
    tmp_path: Path, anvil_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They once were: a megabyte a block, and a chain that was killed left them there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    async with start_anvil(
        find_free_port(), mnemonic=MNEMONIC, accounts=1, binary=anvil_binary
    ) as chain:
        async with Rpc(chain.url) as rpc:
            await mine(rpc, 3 * anvil.KEPT_STATES)
            address = "0x" + "11" * 20
            recent = hex(2 * anvil.KEPT_STATES + 1)
            assert await rpc.request("eth_getBalance", address, recent) == "0x0"
            with pytest.raises(RpcError, match="BlockOutOfRange"):
                await rpc.request("eth_getBalance", address, "0x1")
        assert os.listdir(tmp_path) == []


async def test_busy_port_is_refused(anvil_binary: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} is busy"):
            async with start_anvil(port, mnemonic=MNEMONIC, binary=anvil_binary):
                pass


@pytest.mark.parametrize("is_clone", [True, False])
def test_missing_binary_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_clone: bool
) -> None:
    monkeypatch.setattr(anvil, "find_source_tree", lambda: tmp_path if is_clone else None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("ANVIL_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    clone = re.escape(f"(cd {tmp_path}/contracts && npm ci --ignore-scripts)")
    package = "npm install --global @foundry-rs/anvil"
    with pytest.raises(ConfigurationError, match=clone if is_clone else package):
        anvil.find_anvil()
    monkeypatch.setenv("ANVIL_BIN", str(tmp_path / "anvil"))
    with pytest.raises(ConfigurationError, match=r"ANVIL_BIN names .* cannot be run"):
        anvil.find_anvil()


def test_the_installed_anvil_is_the_one_of_the_contracts() -> None:
    """Outside of a clone the message names the package, whose version is written down twice."""
    tree = find_source_tree()
    assert tree is not None
    package = json.loads((tree / "contracts" / "package.json").read_text())
    name, _, version = anvil._NPM_PACKAGE.rpartition("@")
    assert package["optionalDependencies"][name] == version


def test_keys_are_those_of_bip44() -> None:
    key = anvil.derive_key(MNEMONIC, 0)
    assert key.hex() == "ac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80"
