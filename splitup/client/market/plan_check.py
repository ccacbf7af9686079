"""Checking a plan: fetch its certificate and snapshot, and compute every choice again.

Anybody can check any execution. The proof of a wrong choice goes to the Bonds contract, which
slashes the bond of every member that signed the plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, TypeVar

from splitup.chain.bonds import make_plan_votes
from splitup.chain.client import Chain
from splitup.chain.market import compute_locks
from splitup.core.errors import (
    ChainRejected,
    InvalidInput,
    InvalidModel,
    PeerFault,
    SplitUpError,
    Unavailable,
)
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import Plan, PlanCertificate
from splitup.messages.snapshots import Snapshot
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView, MemberView, check_certificate
from splitup.protocol.planning.challenges import Challenge, find_wrong_choice
from splitup.protocol.planning.exposure import Economics, add_exposures, compute_exposure
from splitup.protocol.planning.selection import compute_plan
from splitup.protocol.snapshots.liveness import quantise_up

T = TypeVar("T")
_OLD_SNAPSHOTS: Final = 3  # members observe the registry at most so many snapshots late


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A node that was first in a task's order but does not run it: too little stake was free.

    Amounts are in micro-USDC; ``locked`` is the locked part of its stake in the snapshot.
    """

    task: int
    node: str
    needed: int
    stake: int
    locked: int


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A plan whose signatures are valid. ``difference`` says what is wrong, "" when nothing is.

    ``challenge`` is the proof for the chain, None when there is none that the chain can verify.
    """

    certificate: PlanCertificate
    snapshot: Snapshot
    difference: str
    challenge: Challenge | None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def signers(self) -> tuple[str, ...]:
        """Return the members that signed it."""
        return tuple(signature.member for signature in self.certificate.signatures)


async def ask_in_turn(
    members: Sequence[MemberView], what: str, ask: Callable[[MemberView], Awaitable[T]]
) -> T:
    """Return the first answer that ``ask`` accepts; raise Unavailable with the last problem."""
    problem = "the committee has no members"
    for member in members:
        try:
            return await ask(member)
        except SplitUpError as error:
            problem = str(error)
    raise Unavailable(f"no member shows {what}: {problem}")


async def fetch_plan(
    http: SignedClient, committee: CommitteeView, execution_id: str
) -> PlanCertificate:
    """Return an execution's certificate from the first member that has a valid one.

    Raises Unavailable when none has it: members keep only the plans of recent executions.
    """

    async def ask(member: MemberView) -> PlanCertificate:
        value = await http.get_json(api.PLAN.url(member.endpoint, execution_id=execution_id))
        certificate = PlanCertificate.from_value(value)
        if certificate.plan.request.execution_id != execution_id:
            raise PeerFault(f"member {member.account} shows the plan of another execution")
        check_certificate(certificate, committee)
        return certificate

    return await ask_in_turn(committee.members, f"the plan of {execution_id}", ask)


async def fetch_snapshot(http: SignedClient, members: Sequence[MemberView], root: str) -> Snapshot:
    """Return the snapshot with this root from the first member that has it; raise Unavailable."""

    async def ask(member: MemberView) -> Snapshot:
        url = api.SNAPSHOT.url(member.endpoint, root=root)
        value = await http.get_json(url, max_bytes=api.SNAPSHOT.max_reply_bytes)
        snapshot = await asyncio.to_thread(Snapshot.from_value, value)
        if snapshot.root() != root:
            raise PeerFault(f"member {member.account} shows another snapshot than {root}")
        return snapshot

    return await ask_in_turn(members, f"the snapshot {root}", ask)


async def fetch_latest_snapshot(
    chain: Chain, http: SignedClient, members: Sequence[MemberView]
) -> Snapshot | None:
    """Return the latest list of live nodes on chain, None before the first; raise Unavailable."""
    root = str((await chain.call("committee", "latestSnapshot"))["root"])
    if root == ZERO_BYTES32:
        return None
    return await fetch_snapshot(http, members, root)


def check_choices(
    certificate: PlanCertificate, snapshot: Snapshot, manifest: Manifest, economics: Economics
) -> CheckedPlan:
    """Compute the plan again from its seed and compare; the certificate is checked already."""
    plan = certificate.plan
    if manifest.model_id != plan.request.model_id:
        raise InvalidModel(f"the manifest is not of model {plan.request.model_id}")
    expected = compute_plan(plan.request, plan.seed, snapshot, manifest)
    difference = ""
    if plan.terms != expected.terms:
        difference = "its task figures differ from the model's"
    else:
        pairs = enumerate(zip(plan.tasks, expected.tasks, strict=True))
        for task, (listed, right) in pairs:
            if listed != right:
                difference = f"task {task} is given to {listed[0]}, but {right[0]} comes first"
                if listed[0] == right[0]:
                    difference = f"the fallbacks of task {task} are not the nodes that come next"
                break
    try:
        expected = add_exposures(expected, manifest, snapshot, economics)
    except InvalidInput as error:
        difference = difference or f"there should be no plan, because {error}"
    difference = difference or _compare_stakes(plan, expected)
    challenge = find_wrong_choice(plan, snapshot)
    passed_over = _list_passed_over(expected, manifest, snapshot, economics)
    return CheckedPlan(certificate, snapshot, difference, challenge, passed_over)


def _compare_stakes(plan: Plan, expected: Plan) -> str:
    """Return the first difference in executors, exposed stakes or the node list, "" when equal."""
    for task, (runs, right) in enumerate(zip(plan.executors(), expected.executors(), strict=True)):
        if runs != right:
            return f"task {task} is run by {runs}, but {right} is the first with stake for it"
    if plan.exposures() != expected.exposures():
        return "its exposures differ from those of its tasks"
    if plan.nodes != expected.nodes or plan.unverifiable != expected.unverifiable:
        return "its node list differs from the snapshot's"
    return ""


def _list_passed_over(
    plan: Plan, manifest: Manifest, snapshot: Snapshot, economics: Economics
) -> tuple[PassedOver, ...]:
    entries = {entry.node: entry for entry in snapshot.entries}
    return tuple(
        PassedOver(
            task=task,
            node=node,
            needed=compute_exposure((task,), manifest, plan.request.steps, economics),
            stake=entries[node].stake_micro_usdc,
            locked=entries[node].locked_micro_usdc,
        )
        for task, place in enumerate(plan.places)
        for node in plan.tasks[task][:place]
    )


def find_unexplained(
    passed_over: Sequence[PassedOver], locked: Mapping[str, int], waiting: Set[str]
) -> tuple[PassedOver, ...]:
    """Return the nodes for which the snapshot states a higher lock than the chain's events show.

    ``locked`` is the most that the chain had locked of a node at the time of the snapshot. Members
    also count what planned executions without commitments (``waiting``) expose; while there is
    one, the events alone do not tell, and nothing is returned.
    """
    if waiting:
        return ()
    return tuple(
        passed for passed in passed_over if passed.locked > quantise_up(locked.get(passed.node, 0))
    )


async def fetch_unexplained(chain: Chain, checked: CheckedPlan) -> tuple[PassedOver, ...]:
    """Return the nodes that the plan passed over for a lock that no event on chain explains."""
    if not checked.passed_over:
        return ()
    accepted = {
        event.args["sequence"]: event.block_number
        for event in await chain.fetch_events("committee")
        if event.name == "SnapshotAccepted"
    }
    sequence = checked.snapshot.sequence
    start, end = accepted.get(sequence - _OLD_SNAPSHOTS, 0), accepted[sequence]
    locked, waiting = compute_locks(await chain.fetch_events("market"), start, end)
    return find_unexplained(checked.passed_over, locked, waiting)


async def report_choice(chain: Chain, checked: CheckedPlan) -> dict[str, str]:
    """Send the proof against every signer to the chain; return its answers by member.

    "" means that the bond was slashed.
    """
    if checked.challenge is None:
        return {}
    answers = {}
    execution_id = checked.certificate.plan.request.execution_id
    opened = await chain.call("market", "executionOf", execution_id)
    configuration = opened["configuration"] or await chain.call("committee", "configuration")
    for member, vote in make_plan_votes(checked.certificate, configuration).items():
        try:
            await chain.send("bonds", checked.challenge.function, vote, *checked.challenge.args)
            answers[member] = ""
        except ChainRejected as error:
            answers[member] = str(error)
    return answers
