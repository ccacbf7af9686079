"""Requests, plans and their certificates, and the root of a plan that the chain stores.

    plan root = H(tag, request hash, seed, root of the tree of tasks, in the manifest's order)

The hash and its tags are those of snapshots (``splitup.messages.snapshots``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final

from eth_hash.auto import keccak
from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.crypto import merkle
from splitup.crypto.quorum import request_struct_hash
from splitup.messages.base import (
    ZERO_BYTES32,
    AddressField,
    Bytes32Field,
    Count,
    DigestField,
    HexField,
    Message,
    NodeEndpointField,
)
from splitup.messages.word_hashes import ADDRESS_PAD, hash_words

_PLAN: Final = keccak(b"splitup/plan/v2")
_TASK: Final = keccak(b"splitup/plan-task/v3")


class Request(Message):
    """A request for an execution, as the chain's event RequestNodeSelections states it."""

    chain_id: Count
    market: AddressField
    execution_id: Bytes32Field
    model_id: Bytes32Field
    client: AddressField
    client_key: Bytes32Field  # Ed25519 key that signs the client's frames
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]
    max_price_micro_usdc: Count
    deadline: Count  # seconds since the epoch, block time
    snapshot_sequence: Count
    snapshot_root: Bytes32Field
    block_hash: Bytes32Field  # of the block that holds the request
    verify_bps: Annotated[int, Field(ge=0, le=10_000)]  # share of tasks to verify, in 1/10,000
    inputs_digest: Bytes32Field = ZERO_BYTES32  # of inputs that are not on chain
    nonce: Annotated[int, Field(ge=0, lt=2**64)] = 0

    def hash(self) -> str:
        """Return the Market's request hash, which binds every word but the block; computed once.

        Chain, market, client and nonce determine the execution's id. Requests of one id with other
        words have other hashes, and the chain opens one of them.
        """
        return "0x" + self.once(hash_request).hex()


class SignedRequest(Message):
    """A request that is not on chain yet, signed by its client (EIP-712, domain of the Market).

    Its block hash is 0, since no block holds it.
    """

    request: Request
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{130}$")]


class PlanNode(Message):
    """How to reach a node of a plan, and the key its frames are signed with."""

    node: AddressField
    signing_key: Bytes32Field
    endpoint: NodeEndpointField
    exposure_micro_usdc: Count = 0  # slashed if it lied in all its tasks


class TaskTerms(Message):
    """The facts of the manifest about a task that the choice of its nodes depends on."""

    task_id: DigestField
    flops: Count  # of one step
    weights_bytes: Count
    input_bytes: Count  # of one step
    ready_ms: Count  # when its first inputs exist, if reference nodes run the tasks before it
    crosses_classes: bool  # every output has a tolerance, so that any class can run it


class Plan(Message):
    """For every task an ordered list of candidate nodes: its executor and the fallbacks.

    ``places`` are the executors' indices in these lists, () when every first candidate is the
    executor: a node whose free stake does not cover what it could be slashed is skipped and stays
    a fallback. The plan is a pure function of (request, seed, snapshot, manifest). The chain stores
    its ``root``. Storage keys follow from it (``splitup.messages.storage``).
    """

    request: Request
    seed: Bytes32Field
    tasks: tuple[tuple[AddressField, ...], ...] = Field(max_length=limits.MAX_TASKS)
    nodes: tuple[PlanNode, ...]  # sorted by node; exactly those in ``tasks``
    terms: tuple[TaskTerms, ...] = Field(default=(), max_length=limits.MAX_TASKS)  # of every task
    unverifiable: tuple[int, ...] = Field(default=(), max_length=limits.MAX_TASKS)  # too few nodes
    places: tuple[Count, ...] = Field(default=(), max_length=limits.MAX_TASKS)

    def root(self) -> str:
        """Return the Merkle root that members sign; computed once."""
        return "0x" + self.once(compute_plan_root).hex()

    def executors(self) -> tuple[str, ...]:
        """Return the executor of every task, by task index."""
        pairs = zip(self.tasks, self.places or (0,) * len(self.tasks), strict=True)
        return tuple(candidates[place] for candidates, place in pairs)

    def has_candidates(self, executors: Sequence[str]) -> bool:
        """Return whether ``executors`` is empty or names a candidate for every task."""
        if not executors:
            return True
        return len(executors) == len(self.tasks) and all(
            node in candidates for node, candidates in zip(executors, self.tasks, strict=True)
        )

    def exposures(self) -> tuple[tuple[str, int], ...]:
        """Return (executor, exposure in micro-USDC), sorted by executor."""
        executors = set(self.executors())
        return tuple(
            (entry.node, entry.exposure_micro_usdc)
            for entry in self.nodes
            if entry.node in executors
        )

    def node_of(self, address: str) -> PlanNode:
        """Return a node's entry; raise PeerFault when the plan does not list it."""
        for entry in self.nodes:
            if entry.node == address:
                return entry
        raise PeerFault(f"node {address} is not in the plan of {self.request.execution_id}")


class MemberSignature(Message):
    """A committee member's 65-byte ECDSA signature (r ‖ s ‖ v)."""

    member: AddressField
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{130}$")]


class PlanCertificate(Message):
    """A plan signed by 2f+1 members, which anybody can check against the chain alone."""

    plan: Plan
    seed_signature: HexField  # threshold BLS signature; the seed is its hash
    signatures: tuple[MemberSignature, ...] = Field(max_length=limits.MAX_COMMITTEE)


def hash_request(request: Request) -> bytes:
    """Return hashStruct of a request, which a client signs in the domain of the Market."""
    return request_struct_hash(*request_to_abi(request))


def request_to_abi(request: Request) -> tuple[Any, ...]:
    """Return a request as the Market contract takes it, and as it is signed."""
    return (
        request.client,
        request.model_id,
        request.steps,
        request.inputs_digest,
        request.client_key,
        request.max_price_micro_usdc,
        request.deadline,
        request.nonce,
        request.snapshot_sequence,
        request.snapshot_root,
        request.verify_bps,
    )


def compute_plan_root(plan: Plan) -> bytes:
    """Return the root of a plan, 32 bytes."""
    return hash_words(_PLAN, *make_plan_header(plan))


def make_plan_header(plan: Plan) -> tuple[bytes, ...]:
    """Return the header's words: the request, the seed, the directory, the tree's size and root."""
    request = plan.request
    return (
        bytes.fromhex(request.hash()[2:]),
        bytes.fromhex(request.execution_id[2:]),
        bytes.fromhex(request.model_id[2:]),
        bytes.fromhex(request.snapshot_root[2:]),
        bytes.fromhex(plan.seed[2:]),
        _hash_directory(plan),
        len(plan.tasks).to_bytes(32),
        merkle.compute_root(make_plan_leaves(plan)),
    )


def make_plan_leaves(plan: Plan) -> list[bytes]:
    """Return the leaves of the tree of tasks, in the manifest's order."""
    unverifiable = set(plan.unverifiable)
    leaves = []
    for index, candidates in enumerate(plan.tasks):
        words: tuple[bytes, ...]
        if plan.terms:
            terms = plan.terms[index]
            figures = (
                *(terms.flops, terms.weights_bytes, terms.input_bytes, terms.ready_ms),
                terms.crosses_classes,
            )
            words = (bytes.fromhex(terms.task_id), *(figure.to_bytes(32) for figure in figures))
        else:
            words = (merkle.EMPTY,) * 6
        leaves.append(
            hash_words(
                _TASK,
                index.to_bytes(32),
                *words,
                (index not in unverifiable).to_bytes(32),
                hash_candidates(candidates),
            )
        )
    return leaves


def hash_candidates(candidates: Iterable[str]) -> bytes:
    """Return the hash of a task's list of nodes."""
    return hash_words(*(ADDRESS_PAD + bytes.fromhex(node[2:]) for node in candidates))


def _hash_directory(plan: Plan) -> bytes:
    """Hash the nodes' keys, endpoints and exposures, and ``places``; the chain only compares it."""
    return hash_words(
        *(
            hash_words(
                ADDRESS_PAD + bytes.fromhex(entry.node[2:]),
                bytes.fromhex(entry.signing_key[2:]),
                sha256(entry.endpoint.encode()).digest(),
                entry.exposure_micro_usdc.to_bytes(32),
            )
            for entry in plan.nodes
        ),
        *(place.to_bytes(32) for place in plan.places),
    )
