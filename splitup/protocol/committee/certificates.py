"""Checks of what the committee signs: plan certificates, draws, and their randomness.

Every check needs only one ``CommitteeView``, read from the chain, so a certificate may come from
anybody. Cheap checks come first, the pairing comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from eth_hash.auto import keccak

from splitup.core.codec import encode_canonical
from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto.quorum import (
    Domain,
    check_quorum,
    pack_signatures,
    plan_struct_hash,
)
from splitup.crypto.signature_scheme import REAL, Scheme
from splitup.messages.plans import MemberSignature, Plan, PlanCertificate, Request
from splitup.messages.verification import Draw

RANDOMNESS_DOMAIN: Final = b"splitup/randomness/v1"  # of every threshold-BLS signature
_PLAN_TAG: Final = keccak(b"splitup/plan-seed/v1")
_DRAW_TAG: Final = b"splitup/draw-seed/v2"


@dataclass(frozen=True, slots=True)
class MemberView:
    account: str
    signing_key: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class CommitteeView:
    """The committee as the chain states it. ``group_key`` is "" before key generation has ended."""

    configuration: int
    members: tuple[MemberView, ...]  # sorted by account
    quorum: int
    group_key: str
    domain: Domain

    def member_of(self, account: str) -> MemberView:
        """Return the member with this account; raise PeerFault when there is none."""
        for member in self.members:
            if member.account == account:
                return member
        raise PeerFault(
            f"{account} is no committee member of configuration {self.configuration}", peer=account
        )

    def member_with_key(self, signing_key: str) -> MemberView | None:
        """Return the member that signs its messages with this key, or None."""
        return next((m for m in self.members if m.signing_key == signing_key), None)


def plan_alpha(request: Request) -> bytes:
    """Return what the committee signs to make the seed of a plan, encoded as by the Market.

    abi.encode(tag, executionId, requestHash): every word of the request decides the seed, so no
    seed of one wording serves another.
    """
    words = (request.execution_id, request.hash())
    return _PLAN_TAG + b"".join(bytes.fromhex(word[2:]) for word in words)


def draw_alpha(
    execution_id: str,
    block_hash: str,
    commitments: Sequence[tuple[str, str]],
    executors: Sequence[str],
    steps: int,
) -> bytes:
    """Return what the committee signs to draw verifications.

    ``commitments`` are (node, root) sorted by node; ``block_hash`` is of the block with the last
    one. ``executors`` answer for the tasks; empty when they are the plan's. ``steps`` is the
    client's number of steps: the signature is what proves it to validators.
    """
    return _DRAW_TAG + encode_canonical(
        {
            "block_hash": block_hash,
            "commitments": [list(entry) for entry in commitments],
            "execution_id": execution_id,
            "executors": list(executors),
            "steps": steps,
        }
    )


def compute_plan_hash(plan: Plan, configuration: int) -> bytes:
    """Return the EIP-712 struct hash of a plan that members sign and the contract checks."""
    request, executors = plan.request, len(set(plan.executors()))
    return plan_struct_hash(
        configuration, request.execution_id, request.hash(), plan.root(), plan.seed, executors
    )


def check_certificate(
    certificate: PlanCertificate, committee: CommitteeView, scheme: Scheme = REAL
) -> None:
    """Check that 2f+1 members attest the plan and that its seed is the committee's.

    Raises PeerFault for a malformed plan, BadSignature for a wrong signature, seed or quorum. That
    the plan follows from seed and snapshot is not checked: the members' signatures attest it.
    """
    plan = certificate.plan
    if plan.request.chain_id != committee.domain.chain_id:
        raise PeerFault(
            f"plan of {plan.request.execution_id} is for chain {plan.request.chain_id}, "
            f"not {committee.domain.chain_id}"
        )
    check_plan(plan)
    plan_hash = compute_plan_hash(plan, committee.configuration)
    _check_quorum(plan_hash, certificate.signatures, committee, scheme)
    _check_seed(plan_alpha(plan.request), certificate.seed_signature, plan.seed, committee, scheme)


def check_draw(draw: Draw, committee: CommitteeView, scheme: Scheme = REAL) -> None:
    """Check that a draw's randomness is the committee's, over exactly its commitments.

    Raises PeerFault when they are not sorted by distinct node, BadSignature for a wrong signature.
    """
    nodes = [node for node, _ in draw.commitments]
    if not nodes or any(a >= b for a, b in pairwise(nodes)):
        raise PeerFault(f"draw of {draw.execution_id} does not list its commitments sorted by node")
    if draw.executors and not set(nodes).issubset(draw.executors):
        raise PeerFault(f"draw of {draw.execution_id} is over commitments of others")
    alpha = draw_alpha(
        draw.execution_id, draw.block_hash, draw.commitments, draw.executors, draw.steps
    )
    _check_seed(alpha, draw.signature, draw.seed, committee, scheme)


def check_plan(plan: Plan) -> None:
    """Raise PeerFault unless a plan's lists fit each other; only then it can be asked or hashed."""
    where = f"plan of {plan.request.execution_id}"
    if not plan.tasks:
        raise PeerFault(f"{where} assigns no task")
    for index, candidates in enumerate(plan.tasks):
        if not candidates or len(set(candidates)) != len(candidates):
            raise PeerFault(f"{where} names no node, or one twice, for task {index}")
    if plan.terms and len(plan.terms) != len(plan.tasks):
        raise PeerFault(f"{where} does not state the terms of every task")
    if plan.places and (
        len(plan.places) != len(plan.tasks)
        or any(place >= len(nodes) for place, nodes in zip(plan.places, plan.tasks, strict=True))
    ):
        raise PeerFault(f"{where} has an executor that is not in its task's list")
    directory = [entry.node for entry in plan.nodes]
    if directory != sorted({node for candidates in plan.tasks for node in candidates}):
        raise PeerFault(f"{where} does not list exactly its nodes, sorted")


def _check_quorum(
    struct_hash: bytes,
    signatures: Sequence[MemberSignature],
    committee: CommitteeView,
    scheme: Scheme,
) -> None:
    packed = pack_signatures((s.member, bytes.fromhex(s.signature[2:])) for s in signatures)
    accounts = {member.account for member in committee.members}
    signers = check_quorum(committee.domain, struct_hash, packed, accounts, scheme.recover_signer)
    if list(signers) != sorted(entry.member for entry in signatures):
        raise BadSignature(
            "a signature of a certificate was not made by the member it is listed under"
        )


def _check_seed(
    alpha: bytes, signature: str, seed: str, committee: CommitteeView, scheme: Scheme
) -> None:
    if not committee.group_key:
        raise BadSignature("the committee has no group key yet, so no seed of it can exist")
    if scheme.compute_seed(signature) != seed:
        raise BadSignature("the seed is not the hash of its signature")
    scheme.verify_threshold(committee.group_key, RANDOMNESS_DOMAIN, alpha, signature)
