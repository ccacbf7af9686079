"""A node that was told to leave keeps no network from starting, on a real chain."""

from __future__ import annotations

from pathlib import Path

from splitup.chain.client import Chain
from splitup.devnet import funding
from splitup.devnet.state import OBJECTS, DevnetState
from splitup.devnet.status import fetch_health
from splitup.net.http import SignedClient
from tests.builders import find_free_port
from tests.local_chain import start_anvil


async def test_a_node_that_leaves_is_neither_started_nor_waited_for(tmp_path: Path) -> None:
    state = DevnetState.create(nodes=2, members=4, vram_bytes=10**9)
    mnemonic = funding.load_mnemonic(tmp_path)
    parties = funding.load_parties(tmp_path, mnemonic, state)
    accounts = funding.count_accounts(state)
    (tmp_path / OBJECTS).mkdir()
    (tmp_path / OBJECTS / "ports.json").write_text(f'{{"s3.port": {find_free_port()}}}')
    async with start_anvil(find_free_port(), mnemonic=mnemonic, accounts=accounts) as anvil:
        deployment = await funding.load_deployment(
            tmp_path, anvil.url, parties.deployer, funding.DEVNET_PARAMETERS
        )
        assert await funding.set_up_chain(anvil.url, deployment, parties, state) == []
        leaver = parties.nodes[1].identity
        async with (
            await Chain.connect(anvil.url, deployment, private_key=leaver.private_key) as chain,
            SignedClient() as http,
        ):
            assert (await fetch_health(chain, http, state, tmp_path)).wanted_nodes == 2
            await chain.send("nodes", "requestUnstake")
            assert await funding.set_up_chain(anvil.url, deployment, parties, state) == ["node-1"]
            assert (await fetch_health(chain, http, state, tmp_path)).wanted_nodes == 1
            await chain.send("nodes", "cancelUnstake")
            assert await funding.set_up_chain(anvil.url, deployment, parties, state) == []
