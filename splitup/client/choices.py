"""Was a plan right? Certificate and snapshot from the members, every choice computed anew.

Who asks needs no part in the execution. What is wrong is shown to the Bonds contract, which takes
the bond of every member that signed it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from splitup import limits
from splitup.chain.bonds import make_plan_votes
from splitup.chain.client import Chain
from splitup.errors import ChainRejected, InvalidModel, PeerFault, SplitUpError, Unavailable
from splitup.graph.manifest import Manifest
from splitup.net.http import SignedClient
from splitup.protocol.certificates import CommitteeView, check_certificate
from splitup.protocol.challenges import Challenge, find_wrong_choice
from splitup.protocol.selection import compute_plan
from splitup.wire import PlanCertificate, Snapshot


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A plan whose signatures hold. ``difference`` says what is wrong, "" when nothing is.

    ``challenge`` is the evidence that the chain takes, None also for what it cannot judge.
    """

    certificate: PlanCertificate
    snapshot: Snapshot
    difference: str
    challenge: Challenge | None

    @property
    def signers(self) -> tuple[str, ...]:
        """Return the members that signed it."""
        return tuple(signature.member for signature in self.certificate.signatures)


async def fetch_plan(
    http: SignedClient, committee: CommitteeView, execution_id: str
) -> PlanCertificate:
    """Return an execution's certificate from the first member that has a valid one.

    Raises Unavailable when none has: members keep the plans of executions closed lately.
    """
    problem = "the committee has no members"
    for member in committee.members:
        try:
            value = await http.get_json(f"{member.endpoint}/v1/plan/{execution_id}?wait_s=0")
            certificate = PlanCertificate.from_value(value)
            if certificate.plan.request.execution_id != execution_id:
                raise PeerFault(f"member {member.account} shows the plan of another execution")
            check_certificate(certificate, committee)
        except SplitUpError as error:
            problem = str(error)
            continue
        return certificate
    raise Unavailable(f"no member shows the plan of {execution_id}: {problem}")


async def fetch_snapshot(http: SignedClient, committee: CommitteeView, root: str) -> Snapshot:
    """Return the snapshot with this root from the first member that has it; raise Unavailable."""
    problem = "the committee has no members"
    for member in committee.members:
        try:
            value = await http.get_json(
                f"{member.endpoint}/v1/snapshot/{root}", max_bytes=limits.MAX_SNAPSHOT_BYTES
            )
            snapshot = await asyncio.to_thread(Snapshot.from_value, value)
            if snapshot.root() != root:
                raise PeerFault(f"member {member.account} shows another snapshot than {root}")
        except SplitUpError as error:
            problem = str(error)
            continue
        return snapshot
    raise Unavailable(f"no member shows the snapshot {root}: {problem}")


def check_choices(
    certificate: PlanCertificate, snapshot: Snapshot, manifest: Manifest
) -> CheckedPlan:
    """Compute the plan anew from its seed and compare; the certificate is checked already."""
    plan = certificate.plan
    if manifest.model_id != plan.request.model_id:
        raise InvalidModel(f"the manifest is not of model {plan.request.model_id}")
    expected = compute_plan(plan.request, plan.seed, snapshot, manifest)
    difference = ""
    if plan.terms != expected.terms:
        difference = "it states other figures of its tasks than the model has"
    else:
        pairs = enumerate(zip(plan.tasks, expected.tasks, strict=True))
        for task, (listed, right) in pairs:
            if listed != right:
                difference = f"task {task} goes to {listed[0]}, where {right[0]} comes first"
                if listed[0] == right[0]:
                    difference = f"the fallbacks of task {task} are not those that come next"
                break
    return CheckedPlan(certificate, snapshot, difference, find_wrong_choice(plan, snapshot))


async def report_choice(chain: Chain, checked: CheckedPlan) -> dict[str, str]:
    """Show the evidence against every signer; return what the chain said, by member.

    "" means that the bond was taken.
    """
    if checked.challenge is None:
        return {}
    answers = {}
    for member, vote in make_plan_votes(checked.certificate).items():
        try:
            await chain.send("bonds", checked.challenge.function, vote, *checked.challenge.args)
            answers[member] = ""
        except ChainRejected as error:
            answers[member] = str(error)
    return answers
