"""One member's machines without the others: small executions to move through them by hand."""

from __future__ import annotations

from functools import cache

from splitup.core import limits
from splitup.messages.completions import (
    EMPTY_DIGEST,
    Completion,
    End,
    ExecutorCommitment,
    SignedEnd,
    TaskCommitment,
)
from splitup.messages.plans import MemberSignature, PlanCertificate
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.events import ExecutionCommitted
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.selection import compute_plan
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.chain_commitments import (
    AgreedCommitments,
    compute_commitments_root,
)
from splitup.protocol.settlement.settlement_state import SettlementState
from splitup.protocol.settlement.settlement_transitions import (
    add_contents,
    certify_plan,
    complete_commitments,
)
from splitup.protocol.settlement.verification_state import PlanContext
from tests.builders import make_chain_manifest, make_request, make_snapshot
from tests.protocol.cheap_scheme import CheapScheme, make_cheap_keys
from tests.protocol.committees import make_committee, make_identity

VERIFY_ALL = Economics(sampling_bps=10_000, reward_milli=1_200, slash_milli=100_000)
VERIFY_NONE = Economics(sampling_bps=0, reward_milli=1_200, slash_milli=100_000)
TASKS, STEPS = 2, 4
BLOCK = "0x" + "0b" * 32
CHEAP = CheapScheme()
CLIENT = make_identity(77)


def make_context(place: int = 0, size: int = 4) -> MemberContext:
    """A member of a committee whose key generation is over, with cheap signatures."""
    identities, view = make_committee(size)
    context = MemberContext(identities[place], view, scheme=CHEAP)
    group, shares = make_cheap_keys(size)
    context.set_key(group, shares[place])
    return context


@cache
def make_plan_context(verify_bps: int = 0) -> PlanContext:
    manifest = make_chain_manifest(TASKS)
    snapshot = make_snapshot(6, TASKS)
    request = make_request(STEPS).model_copy(
        update={
            "model_id": manifest.model_id,
            "snapshot_root": snapshot.root(),
            "client_key": CLIENT.signing_key_hex,
            "verify_bps": verify_bps,
        }
    )
    plan = compute_plan(request, "0x" + "07" * 32, snapshot, manifest)
    signatures = tuple(
        MemberSignature(member=member.account, signature="0x" + "00" * 65)
        for member in make_context().view.members
    )
    certificate = PlanCertificate(plan=plan, seed_signature="0x" + "00" * 48, signatures=signatures)
    return PlanContext(certificate, snapshot, manifest)


EXECUTION = make_plan_context().plan.request.execution_id
EXECUTORS = tuple(sorted(set(make_plan_context().plan.executors())))


def make_state(economics: Economics = VERIFY_NONE) -> SettlementState:
    """An execution that was requested."""
    request = make_plan_context(economics.sampling_bps).plan.request
    return SettlementState(request, Attestations(quorum=3), economics)


def make_committing(economics: Economics = VERIFY_NONE) -> SettlementState:
    """An execution whose plan and contents are known."""
    state = make_state(economics)
    certify_plan(state, make_plan_context(economics.sampling_bps).certificate)
    add_contents(state, make_plan_context(economics.sampling_bps))
    return state


def make_drawing(economics: Economics = VERIFY_NONE) -> SettlementState:
    """An execution whose executors committed on chain."""
    state = make_committing(economics)
    commit_on_chain(state)
    basis = state.find_basis()
    assert basis is not None
    complete_commitments(state, basis)
    return state


def commit_on_chain(state: SettlementState) -> None:
    """Let the chain have a root over all commitments, and show the client's end."""
    state.add_end(make_end(STEPS))
    commitments = tuple((node, make_completion(node).root()) for node in EXECUTORS)
    agreement = AgreedCommitments(commitments, (), STEPS)
    root = compute_commitments_root(EXECUTION, agreement)
    exposures = tuple((node, limits.EXPOSURE_FLOOR_MICRO_USDC) for node in EXECUTORS)
    state.chain.agreed = ExecutionCommitted(EXECUTION, root, BLOCK, exposures)
    assert state.chain.bind(agreement)


def make_commitment(node: str) -> ExecutorCommitment:
    return ExecutorCommitment(
        execution_id=EXECUTION, node=node, root=make_completion(node).root(), end=make_end(STEPS)
    )


@cache
def make_end(steps: int) -> SignedEnd:
    """Return what the client signs at the end."""
    return sign_end(CLIENT, End(execution_id=EXECUTION, steps=steps, inputs=()))


@cache
def make_completion(node: str) -> Completion:
    plan = make_plan_context().plan
    return Completion(
        execution_id=EXECUTION,
        node=node,
        tasks=tuple(
            TaskCommitment(
                task=task,
                inputs=(digit(task) * 64,),
                outputs=(digit(task + 1) * 64,),
                state=EMPTY_DIGEST,
            )
            for task, executor in enumerate(plan.executors())
            if executor == node
        ),
        salt="0x" + "05" * 32,
        end=make_end(STEPS),
    )


def digit(number: int) -> str:
    return f"{number + 1:x}"
