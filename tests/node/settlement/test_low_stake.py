"""A node below its least stake gets no work: its daemon says so, and what mends it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_node.node import NodeDaemon
from splitup_node.settlement.account import find_low_stake

from splitup.protocol.planning.exposure import compute_spare

LEAST = 1_100_000_000
FULL = {"stake": LEAST, "active": True, "unbondingAt": 0, "vramGb": 1}
SHORT = FULL | {"stake": LEAST - 32, "active": False}
COMMAND = "splitup-node stake --config n.toml"


class FakeChain:
    def __init__(self, entry: dict[str, Any]) -> None:
        self._answers = {"nodeOf": entry, "minStake": LEAST}

    async def call(self, contract: str, function: str, *_: object) -> Any:
        assert contract == "nodes"
        return self._answers[function]


def test_a_trifle_is_covered_by_what_is_put_down_above_the_least() -> None:
    assert compute_spare(LEAST) == 11_000_000 > 32
    assert compute_spare(LEAST, 0) == 0
    assert compute_spare(1) == 1, "rounded up"


async def test_a_stake_below_the_least_is_named_with_the_command_that_fills_it_up() -> None:
    config: Any = SimpleNamespace(path=Path("n.toml"))
    for entry in (FULL, SHORT | {"unbondingAt": 5}):
        chain: Any = FakeChain(entry)
        assert await find_low_stake(chain, entry, config) == ""
    chain = FakeChain(SHORT)
    found = await find_low_stake(chain, SHORT, config)
    assert "1,099.999968 USDC is 0.000032 USDC below the least" in found and COMMAND in found


async def test_the_daemon_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    released: list[Any] = []

    async def release(entry: Any) -> None:
        released.append(entry)

    node: Any = SimpleNamespace(
        _chain=FakeChain(SHORT),
        _identity=SimpleNamespace(address="0x" + "11" * 20),
        _config=SimpleNamespace(path=Path("n.toml")),
        _reporter=SimpleNamespace(release_stake=release),
    )
    with caplog.at_level(logging.WARNING):
        await NodeDaemon._look_at_stake(node)
    [record] = caplog.records
    assert "this node gets no work" in record.getMessage() and COMMAND in record.getMessage()
    assert released == [SHORT]
