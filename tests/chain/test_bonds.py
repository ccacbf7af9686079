"""The Bonds contract takes exactly the bonds of those who signed what no honest member signs."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio
from eth_hash.auto import keccak

from splitup.chain.bonds import make_report
from splitup.chain.client import Chain
from splitup.client.market.plan_check import check_choices, report_choice
from splitup.core.errors import ChainRejected
from splitup.crypto import bls
from splitup.crypto.quorum import (
    plan_struct_hash,
    sign_quorum,
    snapshot_struct_hash,
)
from splitup.messages.plans import MemberSignature, Plan, PlanCertificate, request_to_abi
from splitup.messages.snapshots import Snapshot
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN, plan_alpha
from splitup.protocol.committee.peer_messages import Equivocation, PlanVote, SnapshotVote
from splitup.protocol.planning.challenges import Challenge, find_wrong_choice, open_plan, open_task
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.selection import compute_plan
from tests.builders import address, make_chain_manifest, make_request, make_snapshot
from tests.chain.conftest import Network

ECONOMICS = Economics(sampling_bps=800, reward_milli=1_200, slash_milli=100_000)
BOND = 5_000_000_000
SECRET = (99).to_bytes(32)


@dataclass
class Court:
    """A member with a bond, and somebody who reports it."""

    network: Network
    member: Chain
    key: bytes

    @property
    def reporter(self) -> Chain:
        return self.network.client

    def vote(self, plan: Plan) -> dict[str, Any]:
        """The member's vote for a plan, as the contract takes it."""
        executors = len(set(plan.executors()))
        execution_id = plan.request.execution_id
        request_hash = plan.request.hash()
        struct_hash = plan_struct_hash(
            1, execution_id, request_hash, plan.root(), plan.seed, executors
        )
        return {
            "configuration": 1,
            "executionId": execution_id,
            "requestHash": request_hash,
            "planRoot": plan.root(),
            "tail": bytes.fromhex(plan.seed[2:]) + executors.to_bytes(32),
            "signature": sign_quorum(self.key, self.network.domain, struct_hash),
        }

    def snapshot_vote(self, epoch: int, root: str) -> dict[str, Any]:
        struct_hash = snapshot_struct_hash(1, 7, epoch, root)
        return {
            "configuration": 1,
            "sequence": 7,
            "epoch": epoch,
            "root": root,
            "signature": sign_quorum(self.key, self.network.domain, struct_hash),
        }

    async def bond(self) -> int:
        return int(await self.reporter.call("bonds", "bondOf", self.member.address))

    async def report(self, function: str, *args: Any) -> None:
        await self.reporter.send("bonds", function, *args)

    async def challenge(self, plan: Plan, found: Challenge) -> None:
        await self.report(found.function, self.vote(plan), *found.args)

    async def expect_refusal(self, error: str, function: str, *args: Any) -> None:
        with pytest.raises(ChainRejected) as refused:
            await self.report(function, *args)
        assert refused.value.error_name == error
        assert await self.bond() == BOND


@pytest_asyncio.fixture
async def court(network: Network) -> AsyncIterator[Court]:
    identity = network.members[0]
    chain = await Chain.connect(network.url, network.deployment, private_key=identity.private_key)
    async with chain as member:
        await network.owner.send("usdc", "mint", member.address, BOND)
        await member.send("usdc", "approve", network.deployment.bonds, BOND)
        await member.send("bonds", "post", BOND)
        yield Court(network, member, identity.private_key)


def make_market(tasks: int = 3, nodes: int = 9) -> tuple[Plan, Snapshot]:
    """A plan over nodes of different stakes, loads and classes."""
    source = random.Random(5)
    snapshot = make_snapshot(
        nodes,
        tasks,
        stakes={n: 10**9 * source.randint(1, 5) for n in range(1, nodes + 1)},
        rtts={n: source.randint(1, 300) for n in range(1, nodes + 1)},
        classes={n: "CUDA" for n in range(1, 4)},
        resident={n: sorted(source.sample(range(tasks), tasks - 1)) for n in range(4, nodes + 1)},
        figures={n: {"credit_milli": source.randint(-8000, 8000)} for n in range(1, nodes + 1)},
    )
    request = make_request().model_copy(update={"snapshot_root": snapshot.root()})
    seed = "0x" + source.randbytes(32).hex()
    return compute_plan(request, seed, snapshot, make_chain_manifest(tasks)), snapshot


def change_list(plan: Plan, task: int, candidates: tuple[str, ...]) -> Plan:
    tasks = (*plan.tasks[:task], candidates, *plan.tasks[task + 1 :])
    return plan.model_copy(update={"tasks": tasks})


async def test_a_wrong_choice_costs_the_bond_of_whoever_signed_it(court: Court) -> None:
    plan, snapshot = make_market()
    assert find_wrong_choice(plan, snapshot) is None
    first, second, *rest = plan.tasks[1]
    forged = change_list(plan, 1, (second, first, *rest))
    found = find_wrong_choice(forged, snapshot)
    assert found is not None and found.function == "reportSelection"
    before = await court.reporter.call("usdc", "balanceOf", court.reporter.address)
    await court.challenge(forged, found)
    assert await court.bond() == 0
    after = await court.reporter.call("usdc", "balanceOf", court.reporter.address)
    assert after - before == BOND // 5, "a fifth to the reporter, the rest to the treasury"
    with pytest.raises(ChainRejected, match="has no bond"):
        await court.challenge(forged, found)


async def test_whoever_recomputes_a_plan_can_report_it(court: Court) -> None:
    plan, snapshot = make_market()
    first, second, *rest = plan.tasks[1]
    forged = change_list(plan, 1, (second, first, *rest))
    manifest = make_chain_manifest(3)
    request = forged.request.model_copy(update={"model_id": manifest.model_id})
    forged = forged.model_copy(update={"request": request})
    signature = MemberSignature(
        member=court.member.address, signature="0x" + court.vote(forged)["signature"].hex()
    )
    certificate = PlanCertificate(plan=forged, seed_signature="0x", signatures=(signature,))
    checked = check_choices(certificate, snapshot, manifest, ECONOMICS)
    assert await report_choice(court.reporter, checked) == {court.member.address: ""}
    assert await court.bond() == 0
    refused = await report_choice(court.reporter, checked)
    assert "has no bond" in refused[court.member.address]


async def test_a_wrong_fallback_is_as_wrong(court: Court) -> None:
    plan, snapshot = make_market()
    forged = change_list(plan, 2, (*plan.tasks[2][:2], *plan.tasks[2][3:]))
    found = find_wrong_choice(forged, snapshot)
    assert found is not None and found.args[2] == 2
    await court.challenge(forged, found)
    assert await court.bond() == 0


async def test_a_node_that_may_not_run_a_task_is_a_wrong_choice(court: Court) -> None:
    plan, snapshot = make_market()
    holders = {e.node for e in snapshot.entries if plan.terms[0].task_id in e.resident}
    outsider = next(e.node for e in snapshot.entries if e.node not in holders)
    forged = change_list(plan, 0, (outsider, *plan.tasks[0]))
    found = find_wrong_choice(forged, snapshot)
    assert found is not None
    await court.challenge(forged, found)
    assert await court.bond() == 0


@pytest.mark.parametrize("stranger", ["0x" + "00" * 20, "0x" + "ff" * 20, address(5) + "x"])
async def test_a_node_outside_the_snapshot_is_a_wrong_choice(court: Court, stranger: str) -> None:
    plan, snapshot = make_market()
    if stranger.endswith("x"):  # between two entries: remove one from the snapshot
        stranger = stranger[:-1]
        entries = tuple(e for e in snapshot.entries if e.node != stranger)
        snapshot = snapshot.model_copy(update={"entries": entries})
        request = plan.request.model_copy(update={"snapshot_root": snapshot.root()})
        plan = compute_plan(request, plan.seed, snapshot, make_chain_manifest(3))
    forged = change_list(plan, 0, (stranger, *plan.tasks[0]))
    found = find_wrong_choice(forged, snapshot)
    assert found is not None and found.function == "reportStranger"
    await court.challenge(forged, found)
    assert await court.bond() == 0


async def test_a_right_plan_cannot_be_challenged(court: Court) -> None:
    """The evidence against a forged plan, turned against the honest one, and damaged evidence."""
    plan, snapshot = make_market()
    first, second, *rest = plan.tasks[1]
    forged = change_list(plan, 1, (second, first, *rest))
    found = find_wrong_choice(forged, snapshot)
    assert found is not None
    opened, held, place, listed, better = found.args
    right = open_task(plan, 1)
    vote = court.vote(plan)
    report = "reportSelection"
    await court.expect_refusal("ChoiceRight", report, vote, right, held, place, better, listed)
    await court.expect_refusal("OpeningInvalid", report, vote, right, held, place, listed, better)
    await court.expect_refusal("OpeningInvalid", report, vote, opened, held, place, listed, better)
    forged_vote = court.vote(forged)
    await court.expect_refusal(
        "NotACandidate", report, forged_vote, opened, held, 1, better, listed
    )
    await court.expect_refusal("PlaceInvalid", report, forged_vote, opened, held, 9, listed, better)
    richer = {**better, "entry": {**better["entry"], "stakeMicroUsdc": 4 * 10**9 + 1}}
    await court.expect_refusal(
        "OpeningInvalid", report, forged_vote, opened, held, place, listed, richer
    )
    wider = {**held, "ruledClasses": []}
    await court.expect_refusal(
        "OpeningInvalid", report, forged_vote, opened, wider, place, listed, better
    )
    await court.expect_refusal(
        "StrangerUnproven", "reportStranger", vote, right, held["header"], 0, [listed]
    )


async def test_a19_two_roots_for_one_slot_cost_the_bond(court: Court) -> None:
    one, other = "0x" + "01" * 32, "0x" + "02" * 32
    vote = court.snapshot_vote(3, one)
    report = "reportSnapshots"
    await court.expect_refusal("VotesAgree", report, vote, vote)
    await court.expect_refusal("SlotsDiffer", report, vote, court.snapshot_vote(4, other))
    stranger = replace(court, key=court.network.members[1].private_key)
    await court.expect_refusal("VotersDiffer", report, vote, stranger.snapshot_vote(3, other))
    await court.report(report, vote, court.snapshot_vote(3, other))
    assert await court.bond() == 0


async def test_a19_two_plans_for_one_execution_cost_the_bond(court: Court) -> None:
    plan, _ = make_market()
    other = change_list(plan, 0, plan.tasks[0][::-1])
    await court.expect_refusal("VotesAgree", "reportPlans", court.vote(plan), court.vote(plan))
    await court.report("reportPlans", court.vote(plan), court.vote(other))
    assert await court.bond() == 0


async def test_s03_plans_for_two_wordings_of_a_request_cost_nothing(court: Court) -> None:
    plan, snapshot = make_market()
    request = plan.request.model_copy(update={"steps": plan.request.steps + 1})
    other = compute_plan(request, plan.seed, snapshot, make_chain_manifest(3))
    assert other.root() != plan.root() and request.execution_id == plan.request.execution_id
    await court.expect_refusal("SlotsDiffer", "reportPlans", court.vote(plan), court.vote(other))


async def test_a19_what_members_witness_is_what_the_contract_takes(court: Court) -> None:
    plan, _ = make_market()
    other = change_list(plan, 0, plan.tasks[0][::-1])

    def witness(plan: Plan) -> PlanVote:
        return PlanVote(
            configuration=1,
            execution_id=plan.request.execution_id,
            request_hash=plan.request.hash(),
            root=plan.root(),
            seed=plan.seed,
            executors=len(set(plan.executors())),
            member=court.member.address,
            signature="0x" + court.vote(plan)["signature"].hex(),
        )

    function, votes = make_report(Equivocation(first=witness(plan), second=witness(other)))
    await court.report(function, *votes)
    assert await court.bond() == 0
    snapshots = [
        SnapshotVote(
            member=court.member.address,
            **{**vote, "signature": "0x" + vote["signature"].hex()},
        )
        for vote in (court.snapshot_vote(3, "0x" + byte * 32) for byte in ("01", "02"))
    ]
    function, votes = make_report(Equivocation(first=snapshots[0], second=snapshots[1]))
    with pytest.raises(ChainRejected, match="has no bond"):  # proved, but nothing is left to take
        await court.report(function, *votes)


async def test_an_offence_is_punished_once(court: Court) -> None:
    one, other = court.snapshot_vote(3, "0x" + "01" * 32), court.snapshot_vote(3, "0x" + "02" * 32)
    await court.report("reportSnapshots", one, other)
    await court.network.owner.send("usdc", "mint", court.member.address, BOND)
    await court.member.send("usdc", "approve", court.network.deployment.bonds, BOND)
    await court.member.send("bonds", "post", BOND)
    await court.expect_refusal("AlreadyPunished", "reportSnapshots", one, other)
    await court.expect_refusal("AlreadyPunished", "reportSnapshots", other, one)


async def test_a17_a_plan_with_another_seed_than_the_groups_costs_the_bond(court: Court) -> None:
    key = bls.encode_public_key_eip2537(bls.compute_public_key(SECRET))
    for member in court.network.members[:3]:
        network = court.network
        chain = await Chain.connect(network.url, network.deployment, private_key=member.private_key)
        async with chain:
            await chain.send("committee", "confirmGroupKey", keccak(key), key)
    plan, snapshot = make_market()
    request = plan.request
    signature = bls.sign_partial(SECRET, RANDOMNESS_DOMAIN, plan_alpha(request))
    seed = bls.compute_seed(signature)
    right = compute_plan(request, seed, snapshot, make_chain_manifest(3))
    message = (request_to_abi(request),)
    proof = bls.encode_signature_eip2537(signature)
    await court.expect_refusal(
        "VotesAgree", "reportSeed", court.vote(right), open_plan(right), *message, proof
    )
    swapped = (request_to_abi(request.model_copy(update={"steps": request.steps + 1})),)
    await court.expect_refusal(
        "OpeningInvalid", "reportSeed", court.vote(plan), open_plan(plan), *swapped, proof
    )
    await court.report("reportSeed", court.vote(plan), open_plan(plan), *message, proof)
    assert await court.bond() == 0


async def test_a_members_bond_stays(court: Court) -> None:
    with pytest.raises(ChainRejected) as refused:
        await court.member.send("bonds", "requestRelease")
    assert refused.value.error_name == "MemberBonded"
    rows = [(m.address, m.signing_key_hex, "http://127.0.0.1:1") for m in court.network.members[1:]]
    rows.append((court.reporter.address, "0x" + "77" * 32, "http://127.0.0.1:1"))
    await court.network.owner.send("committee", "setMembers", sorted(rows))
    await court.member.send("bonds", "requestRelease")
    with pytest.raises(ChainRejected, match="is locked until"):
        await court.member.send("bonds", "release")
    await court.network.pass_time(14 * 86_400)
    await court.member.send("bonds", "release")
    assert await court.member.call("usdc", "balanceOf", court.member.address) == BOND
