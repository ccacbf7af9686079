"""Checking a plan: fetch its certificate and snapshot, and compute every choice again.

Anybody can check any execution. The proof of a wrong choice goes to the Bonds contract, which
slashes the bond of every member that signed the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from splitup.chain.bonds import make_plan_votes
from splitup.chain.client import Chain
from splitup.chain.market import compute_locks
from splitup.core.errors import (
    ChainRejected,
    InvalidInput,
    InvalidModel,
)
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Plan, PlanCertificate
from splitup.messages.snapshots import Snapshot
from splitup.protocol.planning.challenges import Challenge, find_wrong_choice
from splitup.protocol.planning.exposure import Economics, add_exposures, compute_exposure
from splitup.protocol.planning.selection import compute_plan
from splitup.protocol.snapshots.liveness import quantise_up

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
