"""Two gateways, real processes: one dies in the middle of an execution, and nobody notices."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from splitup.client.execution.session import Session
from splitup.config import NetworkConfig
from splitup.core.errors import Refused
from splitup.devnet.processes import find_program
from splitup.devnet.state import read_runtime
from splitup.messages.base import CLIENT
from splitup.messages.storage import LogWrite
from splitup.storage.gateway_client import GatewayClient
from tests.e2e.conftest import Network, wait_for
from tests.e2e.test_failover import generate
from tests.texts import Text

pytestmark = pytest.mark.long  # in small: tests/oracle/gateway


@pytest.fixture(scope="module")
def undisturbed(network: Network) -> Text:
    return asyncio.run(generate(network))


@pytest.fixture(scope="module")
def session(undisturbed: Text) -> Session:
    return undisturbed.session


def test_a_gateway_killed_in_mid_execution_costs_nothing(
    network: Network, undisturbed: Text
) -> None:
    name = "gateway-0"  # each party begins with the one that its key says: about half of them
    expected = undisturbed.tokens

    def disturb(session: Session, count: int) -> None:
        if count == len(expected) // 4:
            network.kill(name)

    try:  # it is settled, and every task was verified: from logs that the other gateway let through
        done = asyncio.run(generate(network, disturb))
    finally:
        network.replace(name, find_program("splitup-oracle"), "gateway")
        network.wait_for(lambda: len(network.fetch_health().gateways) == 2)
    assert done.tokens == expected and done.session.takeovers == 0


def test_nothing_is_granted_after_the_settlement(network: Network, session: Session) -> None:
    config = NetworkConfig.load(network.config)
    write = LogWrite(task=CLIENT, port=0, number=0, apart=False, length_bytes=9, sha256="0" * 64)
    last = [""]

    def is_refused(url: str) -> bool:
        async def ask() -> None:
            async with GatewayClient((url,), config.load_user()) as gateway:
                await gateway.log_grants(session.certificate, [write], [])

        try:
            asyncio.run(ask())
        except Refused as error:
            last[0] = str(error)
            return "is settled" in str(error)
        return False

    assert len(config.gateway_urls) == 2
    for url in config.gateway_urls:  # a gateway's view of the chain is some seconds old
        wait_for(partial(is_refused, url), lambda: last[0])


def test_a12_no_url_and_no_secret_in_any_log_or_argument(
    network: Network, session: Session
) -> None:
    directory = network.directory
    [credentials] = directory.rglob("*credentials*.json")
    secret = json.loads(credentials.read_text())["secret_key"].encode()
    logs = [path for path in directory.rglob("*.log*") if path.is_file()]
    audits = list(directory.rglob("audit.jsonl*"))
    assert len(audits) == 2 and len(logs) > 10
    for path in logs + audits:
        data = path.read_bytes()
        assert b"X-Amz-Signature" not in data and secret not in data, path
    granted = [json.loads(line) for path in audits for line in path.read_text().splitlines()]
    assert any(line.get("subject") == session.execution_id for line in granted)
    for process in read_runtime(directory).processes:
        command = Path(f"/proc/{process.pid}/cmdline")
        if command.exists():
            data = command.read_bytes()
            assert b"X-Amz-Signature" not in data and secret not in data, process.name
