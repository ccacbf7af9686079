"""How nodes are reached: real relays, real engines, a registry in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytest_asyncio
from splitup_node.committee.reachability import Reachability

from splitup.chain.client import Chain
from splitup.core import tuning
from splitup.crypto.keys import generate_identity
from splitup.crypto.quorum import Domain
from splitup.net.http import SignedClient
from splitup.net.links import LinkAcceptor
from splitup.net.tunnel import Tunnel
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from tests.builders import HANG_S, anybody
from tests.net.relays import RelayServer
from tests.node.network import (
    Store,
    TestClient,
    TestNode,
    compute_reference,
    make_certificate,
    make_manifest,
)

COMMITTEE = "0x" + "cc" * 20
DIRECT = "http://127.0.0.1:7700"


class Registry:
    """The registry's endpoint of the node."""

    def __init__(self) -> None:
        self.listed: asyncio.Queue[str] = asyncio.Queue()

    async def send(self, contract: str, function: str, endpoint: str) -> None:
        assert (contract, function) == ("nodes", "setEndpoint")
        self.listed.put_nowait(endpoint)

    async def take(self) -> str:
        async with asyncio.timeout(HANG_S):
            return await self.listed.get()


class Place:
    """A node and its reachability among four members."""

    def __init__(
        self, members: list[RelayServer], mode: str = "auto", listed: str = DIRECT
    ) -> None:
        self.identity = generate_identity()
        self.registry = Registry()
        self.http = SignedClient(self.identity)
        acceptor = LinkAcceptor(self.identity.address, lambda link, data: None, may_open=anybody)
        for member in members:
            member.keys[self.identity.address] = self.identity.signing_key_hex
        view = make_view(members)
        self.reachability = Reachability(
            self.identity.address,
            Tunnel(self.identity, acceptor, DIRECT),
            self.http,
            cast(Chain, self.registry),
            lambda: view,
            mode=mode,
            direct=DIRECT,
            listed=listed.replace("NODE", self.identity.address),
        )

    def endpoint_at(self, member: RelayServer) -> str:
        return f"{member.url}/v1/relay/{self.identity.address}"

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Reachability]:
        await self.reachability.choose()
        await self.reachability.list_endpoint()
        loops = [
            asyncio.create_task(c) for c in (self.reachability.run(), self.reachability.follow())
        ]
        try:
            yield self.reachability
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self.reachability.close()
            await self.http.close()


def make_view(members: list[RelayServer]) -> CommitteeView:
    return CommitteeView(
        configuration=1,
        members=tuple(
            MemberView(f"0x{n:040x}", f"0x{n:064x}", member.url) for n, member in enumerate(members)
        ),
        quorum=3,
        group_key="",
        domain=Domain(1, COMMITTEE),
    )


@pytest_asyncio.fixture
async def members() -> AsyncIterator[list[RelayServer]]:
    members = [RelayServer(audience=COMMITTEE) for _ in range(4)]
    for member in members:
        await member.start()
    yield members
    for member in members:
        await member.stop()


@pytest.mark.parametrize(
    ("problems", "mode", "is_direct"),
    [
        (["", "", "no", "no"], "auto", True),  # f + 1 reach it
        (["", "no", "no", "no"], "auto", False),
        ([None, None, None, ""], "auto", True),  # all who can say do
        ([None, None, None, None], "auto", True),  # nobody can say: as configured
        ([None, None, "no", ""], "auto", False),
        (["no", "no", "no", "no"], "off", True),
    ],
)
async def test_members_report_whether_they_reach_a_node(
    members: list[RelayServer], problems: list[str | None], mode: str, is_direct: bool
) -> None:
    for member, problem in zip(members, problems, strict=True):
        member.problem = problem
    place = Place(members, mode)
    async with place.http:
        await place.reachability.choose()
    assert place.reachability.endpoint == (DIRECT if is_direct else "")
    assert place.reachability.problem == ("" if is_direct else "members say: no")
    for member in members:
        assert [r.endpoint for r in member.asked] == ([DIRECT] if mode == "auto" else [])


async def test_f11_a_node_moves_from_a_relay_that_died_to_another(
    members: list[RelayServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RELAY_PATIENCE_S", 0.05)
    for member in members:
        member.problem = "no route"
    place = Place(members)
    async with place.run() as reach:
        first = await place.registry.take()
        dead = next(m for m in members if place.endpoint_at(m) == first)
        await dead.stop()
        second = await place.registry.take()
        alive = next(m for m in members if place.endpoint_at(m) == second)
        assert alive is not dead
        assert (reach.relay, reach.endpoint, reach.problem) == (
            alive.url,
            second,
            "members say: no route",
        )
        assert alive.nodes == [place.identity.address]
        await dead.start()  # for the fixture's end


async def test_the_listed_relay_is_tried_first_and_needs_no_transaction(
    members: list[RelayServer],
) -> None:
    for member in members:
        member.problem = "no route"
    for member in members:
        place = Place(members, listed=f"{member.url}/v1/relay/NODE")
        async with place.run() as reach, asyncio.timeout(HANG_S):
            await member.registering.wait()
            while not reach.relay:  # noqa: ASYNC110 - it listens to nobody else
                await asyncio.sleep(0)
            assert reach.relay == member.url and place.registry.listed.empty()


async def test_a_configured_relay_is_the_only_one(members: list[RelayServer]) -> None:
    place = Place(members, mode=members[2].url)
    async with place.run():
        assert await place.registry.take() == place.endpoint_at(members[2])
    assert not any(member.asked for member in members)


# ---- engines behind relays ---------------------------------------------------------------------


async def join(node: TestNode, relay: RelayServer) -> tuple[asyncio.Task[None], Any]:
    """Register a node at a relay; return what serves it there."""
    assert node.server is not None
    relay.keys[node.identity.address] = node.identity.signing_key_hex
    tunnel = Tunnel(node.identity, node.engine.acceptor, node.server.url)
    up = asyncio.Event()

    async def on_up() -> None:
        up.set()

    serving = asyncio.create_task(tunnel.serve(relay.url, on_up))
    async with asyncio.timeout(HANG_S):
        await up.wait()
    return serving, tunnel


async def test_f11_an_execution_between_relayed_nodes_survives_the_relays_death(
    tmp_path: Path,
) -> None:
    """The outputs are the same although the relay dies half way."""
    manifest, graphs = make_manifest(4, tasks=4)
    xs = [np.random.default_rng(step).random(4, np.float32) for step in range(8)]
    store, client = Store(), TestClient()
    relays = [RelayServer(), RelayServer()]
    nodes = [TestNode(tmp_path / name, store) for name in ("one", "two")]
    async with contextlib.AsyncExitStack() as stack:
        for relay in relays:
            await relay.start()
        stack.push_async_callback(relays[1].stop)
        for node in nodes:
            node.directory.mkdir()
            await node.start(graphs)
            stack.push_async_callback(node.close)
        for node in nodes:
            _, tunnel = await join(node, relays[0])
            stack.push_async_callback(tunnel.close)
        entries = [
            node.entry.model_copy(
                update={"endpoint": f"{relays[0].url}/v1/relay/{node.identity.address}"}
            )
            for node in nodes
        ]
        plan = make_certificate(
            manifest, entries * 2, client.identity.signing_key_hex, steps=len(xs)
        )
        for node in nodes:
            node.engine.start(plan, manifest)
        await client.connect(plan)
        stack.push_async_callback(client.pool.close, flush_s=0)
        first = await run_steps(client, plan, xs, range(4))

        await relays[0].stop()
        for node in nodes:
            _, tunnel = await join(node, relays[1])
            stack.push_async_callback(tunnel.close)
        for node in nodes:  # a later plan would tell everybody where the others are now
            endpoint = f"{relays[1].url}/v1/relay/{node.identity.address}"
            client.pool.open(node.identity.address, endpoint, plan.plan.request.execution_id)
            for other in nodes:
                if other is not node:
                    other.engine.pool.open(node.identity.address, endpoint)
        rest = await run_steps(client, plan, xs, range(4, 8))
        results = {**first, **rest}
        for step, expected in enumerate(compute_reference(xs, 4)):
            assert np.array_equal(results[step], expected)


async def run_steps(
    client: TestClient, plan: Any, xs: list[np.ndarray], steps: range
) -> dict[int, np.ndarray]:
    executors = plan.plan.executors()
    results = {}
    for step in steps:
        client.send(plan, step, xs[step], {executors[0], executors[-1]})
        async with asyncio.timeout(HANG_S):
            while step not in results:
                frame = await client.outputs.get()
                results[frame.step] = np.frombuffer(frame.payload, np.float32)
    return results
