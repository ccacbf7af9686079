"""Contracts on a real chain, as for the tests of ``splitup.chain``; both kinds of databases."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_tests.serve.test_api_keys import postgres

from tests.chain.conftest import anvil_binary, network, rpc_url

__all__ = ["anvil_binary", "network", "postgres", "rpc_url"]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'explorer.sqlite'}"
    return str(request.getfixturevalue("postgres"))
