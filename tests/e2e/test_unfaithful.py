"""Dishonest operators among real processes: each ends as specified, and nobody else pays for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from splitup.client.connection import SplitUp
from splitup.client.market.receipts import Receipt
from splitup.client.outcome import Result
from splitup.core.errors import ExecutionFailed
from splitup.devnet.processes import find_program
from splitup.messages.verification import TaskVerdict
from tests.builders import HANG_S
from tests.e2e.conftest import MODEL, Network
from tests.e2e.test_network import compute_reference, make_inputs

LYING_NODE = Path(__file__).with_name("lying_node.py")
STEPS = 2
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"

# In small: test_restart.py has one liar in a whole network, and tests/protocol/settlement what
# members decide about others: test_verdicts.py (false accusations, outputs that nobody finds,
# results withheld or copied), test_commitments.py (nothing done), test_deliveries.py (S07).
pytestmark = pytest.mark.long


class Settled(NamedTuple):
    """An execution that was closed on the chain."""

    result: Result
    receipt: Receipt
    verdicts: tuple[TaskVerdict, ...]  # none if it was refunded
    silent: set[str]  # the executors that did not commit, by address


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the uncut model gives."""
    return compute_reference(tmp_path_factory.mktemp("uncut"), make_inputs(STEPS)).tobytes()


@pytest.fixture(scope="module", autouse=True)
def honest_again(network: Network) -> Iterator[None]:
    """Leave a network behind in which all nodes serve."""
    yield
    network.wait_for(lambda: all(map(network.is_replaced, network.replacements)))
    network.wait_for_all()


@contextmanager
def replace_nodes(network: Network, **behaviours: str) -> Iterator[dict[str, str]]:
    """Run dishonest programs with the keys of some nodes; yield all nodes' names by address."""
    names = {place.replace("_", "-"): how for place, how in behaviours.items()}
    for name, how in names.items():
        network.replace(name, sys.executable, LYING_NODE, *how.split())
    try:
        network.wait_for(lambda: all(map(network.is_replaced, names)))
        network.wait_for(lambda: is_live_or_made_whole(network, list(names)))
        network.wait_for_all()
        health = network.fetch_health()
        yield {node.address: network.name_of(node.address) for node in health.nodes}
    finally:
        for name in names:
            network.replacements[name].terminate()
            network.replacements[name].wait(HANG_S)
        for name in names:
            asyncio.run(network.top_up(name))  # who was slashed may not serve
            network.replace(name, find_program("splitup-node"), "run")


def is_live_or_made_whole(network: Network, names: list[str]) -> bool:
    """Return whether all nodes are live; else top up those that may have been slashed.

    They lie about executions of earlier tests, too, if these are still verified.
    """
    if network.fetch_health().live_nodes == network.nodes:
        return True
    for name in names:
        asyncio.run(network.top_up(name))
    return False


async def fetch_stakes(net: SplitUp, nodes: dict[str, str]) -> dict[str, int]:
    views = await asyncio.gather(*(net.chain.call("nodes", "nodeOf", node) for node in nodes))
    return {name: view["stake"] for name, view in zip(nodes.values(), views, strict=True)}


async def settle(net: SplitUp) -> Settled:
    """Execute and wait for the money.

    Right after a slash an executor may not commit: the latest snapshot still offers a node that
    the storage gateways grant nothing any more. It is not paid, and what reads its outputs cannot
    be verified; without most of the price the execution is refunded.
    """
    result = await net.execute(MODEL, make_inputs(STEPS))
    receipt = await result.receipt
    if receipt.status == "settled":
        evidence = await net.evidence(receipt)
        silent = set(result.nodes) - dict(evidence.draw.commitments).keys()
        assert not silent & {p.account for p in receipt.payments if not p.from_slash}
        return Settled(result, receipt, evidence.verdicts, silent)
    row = await net.chain.call("market", "executionOf", result.execution_id)
    assert receipt.refunded_micro_usdc == row["maxPrice"] - row["reservation"] > 0
    assert not receipt.payments and not receipt.slashes
    return Settled(result, receipt, (), set())


def list_complete(done: list[Settled]) -> list[Settled]:
    """Return those in which all executors committed, of which there has to be one."""
    complete = [entry for entry in done if entry.verdicts and not entry.silent]
    assert complete
    return complete


def get_losses(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: stake - after[name] for name, stake in before.items() if stake != after[name]}


@dataclass(frozen=True)
class Played:
    """Executions with some dishonest nodes, until each of these was caught."""

    done: list[Settled]
    lost: dict[str, int]  # stake, by name
    nodes: dict[str, str]  # names, by address
    client: str


async def play(
    network: Network, nodes: dict[str, str], caught: set[str], *, most: int, more: int = 0
) -> Played:
    """Execute until all of ``caught`` were slashed or silent, and ``more`` times."""
    done: list[Settled] = []
    found: set[str] = set()
    async with SplitUp.connect(network.config) as net:
        before = await fetch_stakes(net, nodes)
        while found != caught and len(done) < most:
            done.append(await settle(net))
            found |= {nodes[account] for account, _ in done[-1].receipt.slashes}
            found |= {nodes[node] for verdict in done[-1].verdicts for node in verdict.silent}
        for _ in range(more):
            done.append(await settle(net))
        lost = get_losses(before, await fetch_stakes(net, nodes))
        return Played(done, lost, nodes, net.address)


@pytest.fixture(scope="module")
def lies(network: Network) -> Played:
    """Every task is drawn, so that a lie is found in the execution that it is told in.

    A node has three tasks of an execution in the mean, and lies in its third and its sixth, or to
    the client when it has the last: that thirty are too few for that does not happen. One after the
    other, since who was caught is too poor to serve on.
    """
    behaviours = {"node_0": "every 10 3", "node_1": "every 100 6", "node_2": "deceive"}
    with replace_nodes(network, **behaviours) as nodes:
        caught = {name.replace("_", "-") for name in behaviours}
        # all may be caught at once: one more is right
        return asyncio.run(play(network, nodes, caught, most=30, more=1))


def test_a21_who_lies_once_in_ten_or_in_a_hundred_tasks_is_found_and_only_he(
    lies: Played, expected: bytes
) -> None:
    assert lies.lost.keys() == {"node-0", "node-1", "node-2"}, "no honest stake is touched"
    slashed = sum(s[1] for entry in lies.done for s in entry.receipt.slashes)
    # more than that only by executions of earlier tests, which these nodes verify, and lie about
    assert 0 < slashed <= sum(lies.lost.values())
    wrong = 0
    for result, receipt, verdicts, _ in list_complete(lies.done):
        outcomes = {verdict.outcome for verdict in verdicts}
        assert outcomes <= {"honest", "lied"}
        back = [p for p in receipt.payments if p.from_slash and p.account == lies.client]
        if "lied" in outcomes:  # the whole price is back; else every byte is right
            wrong += 1
            earned = [task.pay_micro_usdc(STEPS) for task in result.manifest.tasks]
            assert [p.amount_micro_usdc for p in back] == [sum(earned)]
        else:
            assert result.outputs["logits"].tobytes() == expected and not back
    assert wrong < len(lies.done)


def test_s07_who_sends_the_client_other_outputs_than_it_commits_to_is_slashed(
    lies: Played, expected: bytes
) -> None:
    """Its commitment is right, its log is right, and its frames to the client are signed."""
    found = 0
    for result, receipt, verdicts, silent in lies.done:
        (port,) = result.manifest.outputs
        if lies.nodes[result.nodes[port.task]] != "node-2":
            continue
        assert result.outputs["logits"].tobytes() != expected
        own = [verdict for verdict in verdicts if verdict.task == port.task]
        if not own or (silent and own[0].outcome == "unresolved"):
            continue  # refunded, or computed from what a silent node sent
        found += 1
        (verdict,) = own
        assert verdict.outcome == "lied" and verdict.liars == (result.nodes[port.task],)
        assert verdict.validators, "who recomputed what it committed to found it right, and is paid"
        assert result.nodes[port.task] in dict(receipt.slashes)
    assert found


@contextmanager
def keep_members_slow(network: Network) -> Iterator[None]:
    """Let four members and three busy loops share one processor: a member gets a quarter at most.

    What a member starts for its recomputations inherits the processor.
    """
    (first, *_) = sorted(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(3)]
    members = [network.pid_of(f"member-{n}") for n in range(network.members)]
    own = os.sched_getaffinity(members[0])
    try:
        for process in [loop.pid for loop in loops] + list_descendants(members):
            set_processors(process, {first})
        assert all(os.sched_getaffinity(member) == {first} for member in members)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        for process in list_descendants(members):
            set_processors(process, own)


def list_descendants(roots: list[int]) -> list[int]:
    """Return processes and all that they started."""
    found = list(roots)
    for process in found:  # grows
        with suppress(FileNotFoundError):
            tasks = Path(f"/proc/{process}/task")
            for task in tasks.iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def set_processors(process: int, processors: set[int]) -> None:
    """Confine all threads of a process; one that ended is skipped."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), processors)


def test_a_liar_and_honest_nodes_are_told_apart_by_members_with_little_cpu(
    network: Network, expected: bytes
) -> None:
    """Whose judges are slow neither keeps stake for a lie nor loses stake without one."""
    with replace_nodes(network, node_0="every 10 3") as nodes, keep_members_slow(network):
        lies = asyncio.run(play(network, nodes, {"node-0"}, most=20, more=1))
    assert lies.lost.keys() == {"node-0"}, "no honest stake is touched"
    for result, _, verdicts, _ in list_complete(lies.done):
        outcomes = {verdict.outcome for verdict in verdicts}
        assert outcomes <= {"honest", "lied"}
        assert "lied" in outcomes or result.outputs["logits"].tobytes() == expected


def test_a21_who_guesses_or_stores_nothing_is_penalised_and_nobody_around_it(
    network: Network, expected: bytes
) -> None:
    """One validator makes its answers up; one executor commits to outputs that it never stored."""

    async def play(nodes: dict[str, str]) -> tuple[list[Settled], dict[str, int]]:
        done: list[Settled] = []
        caught: set[str] = set()
        async with SplitUp.connect(network.config) as net:
            before = await fetch_stakes(net, nodes)
            while caught != {"node-2", "node-4"} and len(done) < 20:
                done.append(await settle(net))
                caught |= {nodes[account] for account, _ in done[-1].receipt.slashes}
            return done, get_losses(before, await fetch_stakes(net, nodes))

    with replace_nodes(network, node_2="guess", node_4="hide") as nodes:
        done, lost = asyncio.run(play(nodes))
    assert lost.keys() == {"node-2", "node-4"}
    for result, receipt, verdicts, _ in list_complete(done):
        assert result.outputs["logits"].tobytes() == expected
        outcomes = {verdict.task: verdict.outcome for verdict in verdicts}
        withheld = {task for task, outcome in outcomes.items() if outcome == "withheld"}
        assert {nodes[result.nodes[task]] for task in withheld} <= {"node-4"}
        unread = {task for source, task in result.manifest.edges() if source in withheld}
        for task, outcome in outcomes.items():
            if task not in withheld:
                assert outcome == ("unresolved" if task in unread else "honest")
        paid = {p.account for p in receipt.payments if not p.from_slash}
        assert {n for task, n in enumerate(result.nodes) if task not in withheld} <= paid


def test_a21_who_copies_is_not_paid_and_who_withholds_pays_the_client_back(
    network: Network, expected: bytes
) -> None:
    """One validator repeats what it overhears; one executor commits and keeps its salt.

    All that the copier comes by is salted commitments of others: it repeats one, has nothing that
    opens it, and the next validator is paid for the work.
    """
    with replace_nodes(network, node_1="copy", node_3="withhold") as nodes:
        silences = asyncio.run(play(network, nodes, {"node-1", "node-3"}, most=20))
    assert silences.lost.keys() == {"node-3"}, "a copier cannot be told from who is slow"
    for settled in list_complete(silences.done):
        assert settled.result.outputs["logits"].tobytes() == expected
        check_copier(settled, silences.nodes)
        check_withholders(settled, silences.nodes)


def check_copier(settled: Settled, nodes: dict[str, str]) -> None:
    """It earns nothing, and somebody else answers."""
    _, receipt, verdicts, _ = settled
    assert {nodes[node] for entry in verdicts for node in entry.silent} <= {"node-1"}
    assert "node-1" not in {nodes[node] for node, _ in receipt.slashes}
    for entry in verdicts:
        assert entry.validators and "node-1" not in {nodes[node] for node in entry.validators}


def check_withholders(settled: Settled, nodes: dict[str, str]) -> None:
    """Their tasks are not paid for, and what their silence costs pays who answered."""
    result, receipt, verdicts, _ = settled
    silent = {"node-3"}
    own = {task for task, node in enumerate(result.nodes) if nodes[node] in silent}
    outcomes = {verdict.task: verdict.outcome for verdict in verdicts}
    assert {task for task, outcome in outcomes.items() if outcome == "withheld"} == own
    assert set(outcomes.values()) <= {"withheld", "honest"}
    assert bool(silent & {nodes[node] for node, _ in receipt.slashes}) == bool(own)
    # what its silence costs pays the validators first
    rewards = sum(p.amount_micro_usdc for p in receipt.payments if p.from_slash)
    assert rewards <= sum(amount for _, amount in receipt.slashes) * 80 // 100
    assert rewards > 0 or not own
    price = sum(task.pay_micro_usdc(STEPS) for task in result.manifest.tasks)
    unpaid = sum(result.manifest.tasks[task].pay_micro_usdc(STEPS) for task in own)
    paid = sum(p.amount_micro_usdc for p in receipt.payments if not p.from_slash)
    assert paid <= 2 * (price - unpaid), "what was withheld costs the client nothing"


def test_who_takes_a_task_and_does_nothing_costs_nobody_anything(
    network: Network, expected: bytes
) -> None:
    """Another node goes on in its place, or the price comes back but for the reserved stake."""

    async def play(nodes: dict[str, str]) -> dict[str, int]:
        async with SplitUp.connect(network.config) as net:
            before = await fetch_stakes(net, nodes)
            for _ in range(10):
                try:
                    result = await net.execute(MODEL, make_inputs(STEPS), deadline_s=8)
                except ExecutionFailed as error:
                    locked = await net.chain.call("market", "executionOf", error.execution_id)
                    assert error.refunded_micro_usdc == locked["maxPrice"] - locked["reservation"]
                    break
                assert result.outputs["logits"].tobytes() == expected
            return get_losses(before, await fetch_stakes(net, nodes))

    with replace_nodes(network, node_4="mute") as nodes:
        lost = asyncio.run(play(nodes))
    assert not lost
