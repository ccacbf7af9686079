from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitup.chain.abi import CONTRACTS
from splitup.chain.deployment import MarketParameters, Terms, deploy
from splitup.core import limits
from splitup.core.errors import ChainRejected, ConfigurationError
from splitup.devnet.anvil import derive_key
from splitup.messages.network import Deployment
from tests.chain.conftest import MNEMONIC

DEPLOYMENT = Deployment(
    chain_id=31_337,
    genesis_hash="0x" + "ab" * 32,
    **{name: "0x" + f"{index:02x}" * 20 for index, name in enumerate(CONTRACTS, start=1)},
)


def test_deployment_survives_its_file(tmp_path: Path) -> None:
    DEPLOYMENT.save(tmp_path / "deployment.json")
    assert Deployment.load(tmp_path / "deployment.json") == DEPLOYMENT
    assert [path.name for path in tmp_path.iterdir()] == ["deployment.json"]


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    with pytest.raises(ConfigurationError, match=r"cannot be read .*splitup up"):
        Deployment.load(path)
    DEPLOYMENT.save(path)
    fields = json.loads(path.read_text())
    too_deep = {"confirmations": limits.MAX_CONFIRMATIONS + 1}
    for change in ({"market": "0xAB"}, {"chain_id": "1"}, {"extra": 1}, too_deep):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ConfigurationError, match=f"is damaged: {next(iter(change))}"):
            Deployment.load(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigurationError, match="is damaged"):
        Deployment.load(path)


async def test_unsafe_parameters_stop_the_deployment(rpc_url: str) -> None:
    with pytest.raises(ChainRejected, match="deploying market was refused: cheating would be"):
        unsafe = Terms(parameters=MarketParameters(slash_milli=10_000))
        await deploy(rpc_url, derive_key(MNEMONIC, 9), unsafe)
