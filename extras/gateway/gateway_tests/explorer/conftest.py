"""Contracts on a real chain, as for the tests of ``splitup.chain``; both kinds of databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gateway_tests.serve.test_api_keys import postgres

from tests.chain.conftest import Network, anvil_binary, deploy_market, open_network, rpc_url

__all__ = ["anvil_binary", "postgres", "rpc_url"]


@pytest_asyncio.fixture
async def network(rpc_url: str) -> AsyncIterator[Network]:
    """A market of its own, since the tests share a database, which is emptied for another one."""
    async with open_network(rpc_url, await deploy_market(rpc_url)) as network:
        yield network


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'explorer.sqlite'}"
    return str(request.getfixturevalue("postgres"))
