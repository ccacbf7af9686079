"""The draw of tasks to verify, what validators and members say about them, and the evidence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
)

from splitup.core import limits
from splitup.messages.base import (
    AddressField,
    Bytes32Field,
    DigestField,
    HexField,
    Message,
    TaskField,
)
from splitup.messages.plans import PlanCertificate
from splitup.messages.snapshots import OpenedSnapshot


class Draw(Message):
    """Randomness that did not exist when outputs were committed: what is verified, by whom.

    ``executors`` answer for the tasks, by task; empty when they are the plan's.
    """

    execution_id: Bytes32Field
    block_hash: Bytes32Field  # of the block with the agreed root, or with the last commitment
    commitments: tuple[tuple[AddressField, Bytes32Field], ...]  # (node, root), sorted by node
    executors: tuple[AddressField, ...] = Field(default=(), max_length=limits.MAX_TASKS)
    signature: HexField  # threshold BLS signature over the above
    seed: Bytes32Field


class VerificationOrder(Message):
    """Tells a node that it was drawn to recompute a task; checkable from draw and plan alone.

    Of the snapshot it shows the executor and the validator, however many nodes there are; a member
    that recomputes the task shows the executor only.
    """

    certificate: PlanCertificate
    draw: Draw
    snapshot: OpenedSnapshot
    task: TaskField
    steps: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]

    @property
    def executors(self) -> tuple[str, ...]:
        """Return who answers for every task: their logs are read."""
        return self.draw.executors or self.certificate.plan.executors()


class ValidatorCommitment(Message):
    """A validator's salted promise of its result, given before anybody reveals anything (JWS)."""

    execution_id: Bytes32Field
    task: TaskField
    validator: AddressField
    root: Bytes32Field  # of the VerificationResult to come


class VerificationResult(Message):
    """What a validator fetched and recomputed for one task, signed by it (JWS)."""

    execution_id: Bytes32Field
    task: TaskField
    validator: AddressField
    inputs: tuple[DigestField, ...]
    outputs: tuple[DigestField, ...]
    state: DigestField
    salt: Bytes32Field
    error: str = Field(max_length=500)  # "" when the recomputation succeeded

    def root(self) -> str:
        """Return what its commitment names; computed once, members compare it at every step."""
        return self.once(_digest_result)


def _digest_result(result: VerificationResult) -> str:
    return result.digest("splitup/verification/v1")


class Held(Message):
    """A member holds this commitment of a validator; 2f+1 members make it fixed."""

    task: TaskField
    validator: AddressField
    root: Bytes32Field


class Silence(Message):
    """A node that committed did not reveal in time: its completion, or its result for a task."""

    node: AddressField
    task: TaskField | None  # None: its completion


class Ruling(Message):
    """What a member got when it recomputed a disputed task itself; ``error`` if it could not.

    ``missing`` are the tasks whose logged outputs it needed and that are not in the store, or not
    as their executor has to store them; then there is nothing else. A member of another determinism
    class has ``compared`` its numbers with the claimed ones: ``outputs`` are those, or () when they
    are further from its own than the task's tolerance; ``state`` is the claimed one.
    """

    task: TaskField
    inputs: tuple[DigestField, ...]
    outputs: tuple[DigestField, ...]
    state: DigestField
    error: str = Field(max_length=200)
    missing: tuple[TaskField, ...] = Field(default=(), max_length=limits.MAX_PORTS)
    compared: bool = False


class Attestation(Message):
    """What one member knows of an execution's verification. What 2f+1 members say is so.

    ``due``: the time to reveal has come, since every drawn task has a validator whose commitment
    is fixed, or nobody who could have one.
    """

    execution_id: Bytes32Field
    member: AddressField
    due: bool
    held: tuple[Held, ...] = Field(max_length=limits.MAX_STATEMENTS)
    silent: tuple[Silence, ...] = Field(max_length=limits.MAX_STATEMENTS)
    rulings: tuple[Ruling, ...] = Field(max_length=limits.MAX_TASKS)


class SignedAttestation(Message):
    """An attestation with its member's Ed25519 signature: anybody may pass it on."""

    attestation: Attestation
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]


class TaskVerdict(Message):
    """How the verification of one drawn task ended."""

    task: TaskField
    outcome: Literal["honest", "lied", "withheld", "contradicted", "outvoted", "unresolved"]
    validators: tuple[AddressField, ...] = Field(max_length=limits.MAX_FALLBACKS)
    liars: tuple[AddressField, ...] = Field(max_length=limits.MAX_FALLBACKS)
    silent: tuple[AddressField, ...] = Field(max_length=limits.MAX_NODES)


class Evidence(Message):
    """What a settlement rests on; its root is on chain, so that any member's copy will do."""

    draw: Draw
    verdicts: tuple[TaskVerdict, ...] = Field(max_length=limits.MAX_TASKS)
