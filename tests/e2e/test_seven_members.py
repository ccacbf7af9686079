"""Seven members, of whom two die: the other five plan, verify and settle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from splitup.client.execution.session import Session
from tests.e2e.conftest import Network
from tests.e2e.test_failover import generate


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    network = Network(tmp_path_factory.mktemp("seven") / "net", nodes=2, members=7)
    try:
        network.start()
        network.register("12GB")  # one task: this is about the committee
        yield network
    finally:
        if network.process is not None and network.process.poll() is None:
            network.stop()


@pytest.mark.long  # in small: tests/protocol/committee/test_histories.py has up to 31 members
def test_f06_two_of_seven_members_killed(seven: Network) -> None:
    health = seven.fetch_health()
    assert health.is_ready() and len(health.members) == 7, health.describe()
    seven.kill("member-3")  # one before the request, one in the middle of the execution

    def disturb(session: Session, count: int) -> None:
        if count == 5:
            seven.kill("member-5")

    asyncio.run(generate(seven, disturb, max_tokens=20))  # verified and settled
    health = seven.fetch_health()
    assert "5/7 committee members" in health.describe() and not health.is_ready()
