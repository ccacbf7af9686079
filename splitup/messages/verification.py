"""The draw of tasks to verify, the statements of validators and members, and the evidence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
    """The randomness that decides which tasks are verified, and by whom.

    It did not exist when executors committed to their outputs. ``executors`` are those responsible
    for each task, by task; empty when they are the plan's. ``steps`` is the client's number of
    steps, as 2f+1 members saw it signed: so many steps are verified and paid.
    """

    execution_id: Bytes32Field
    block_hash: Bytes32Field  # of the block with the agreed root, or with the last commitment
    # (node, root), sorted by node
    commitments: tuple[tuple[AddressField, Bytes32Field], ...] = Field(
        max_length=limits.MAX_PLAN_NODES
    )
    executors: tuple[AddressField, ...] = Field(default=(), max_length=limits.MAX_TASKS)
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]
    signature: HexField  # threshold BLS signature over the above
    seed: Bytes32Field


class VerificationOrder(Message):
    """Tells a node that it was drawn to recompute a task; it contains all proofs of that.

    ``snapshot`` shows the entries of the executor and the validator only, and just the executor's
    when a member recomputes the task.
    """

    certificate: PlanCertificate
    draw: Draw
    snapshot: OpenedSnapshot
    task: TaskField

    @property
    def steps(self) -> int:
        """Return how many steps to recompute."""
        return self.draw.steps

    @property
    def executors(self) -> tuple[str, ...]:
        """Return the node responsible for each task, whose logs are read."""
        return self.draw.executors or self.certificate.plan.executors()


class ValidatorCommitment(Message):
    """A validator's commitment to its result, sent before anything is revealed."""

    execution_id: Bytes32Field
    task: TaskField
    validator: AddressField
    root: Bytes32Field  # of the VerificationResult that it will reveal


class VerificationResult(Message):
    """The digests of what a validator fetched and recomputed for one task."""

    execution_id: Bytes32Field
    task: TaskField
    validator: AddressField
    inputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    outputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    state: DigestField
    salt: Bytes32Field
    error: str = Field(max_length=500)  # "" when the recomputation succeeded

    def root(self) -> str:
        """Return the hash that its commitment has to name; computed once."""
        return self.once(_digest_result)


def _digest_result(result: VerificationResult) -> str:
    return result.digest("splitup/verification/v1")


class Held(Message):
    """A validator's commitment that a member holds; it is fixed once 2f+1 members hold it."""

    task: TaskField
    validator: AddressField
    root: Bytes32Field


class Silence(Message):
    """A node that committed and did not reveal in time: its completion, or a task's result."""

    node: AddressField
    task: TaskField | None  # None: the completion is missing


class Ruling(Message):
    """What a member got when it recomputed a disputed task itself, or why it could not (``error``).

    ``missing`` are the tasks whose logged outputs it needed and did not find in the store as their
    executor committed to them; then the digests are empty. A member of another determinism class
    compares numbers instead (``compared``): ``outputs`` are then the claimed digests, or () when
    the claimed numbers differ from its own by more than the task's tolerance, and ``state`` is the
    claimed one. The claim is the executor's, or that of a ``validator`` that contradicts it. A
    member of the executor's class adds whether the claimed outputs are within the tolerance of its
    own (``close``); without a tolerance they are not. A member that took too long, or whose machine
    lacked something, only says that it will try again (``slow``).
    """

    task: TaskField
    inputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    outputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    state: DigestField
    error: str = Field(max_length=200)
    missing: tuple[TaskField, ...] = Field(default=(), max_length=limits.MAX_PORTS)
    compared: bool = False
    close: bool = False
    slow: bool = False
    validator: AddressField | None = None

    @property
    def claim(self) -> tuple[int, str]:
        """Return what the ruling is about: a task, and whose claim; "" is the executor's."""
        return self.task, self.validator or ""


class Attestation(Message):
    """What one member knows of an execution's verification; 2f+1 equal statements decide.

    ``due`` says that it is time to reveal: every drawn task has a validator whose commitment is
    fixed, or no validator that could commit. ``steps`` is the number that the draw is over.
    """

    execution_id: Bytes32Field
    member: AddressField
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]
    due: bool
    held: tuple[Held, ...] = Field(max_length=limits.MAX_STATEMENTS)
    silent: tuple[Silence, ...] = Field(max_length=limits.MAX_STATEMENTS)
    rulings: tuple[Ruling, ...] = Field(max_length=limits.MAX_STATEMENTS)


class SignedAttestation(Message):
    """An attestation with its member's Ed25519 signature, which proves it to third parties."""

    attestation: Attestation
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]


class DueNotice(Message):
    """What a node asks of a member's attestation before it reveals: ``due``, ``steps``, its own.

    ``held`` are of the validator and the tasks that it named in the question. So an answer is
    short, and how long an honest one is the node knows.
    """

    execution_id: Bytes32Field
    member: AddressField
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]
    due: bool
    held: tuple[Held, ...] = Field(max_length=limits.MAX_TASKS)


class SignedDueNotice(Message):
    """A notice with its member's Ed25519 signature; a node may reach members through anybody."""

    notice: DueNotice
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]


class TaskVerdict(Message):
    """The outcome of the verification of one drawn task."""

    task: TaskField
    outcome: Literal[
        "honest", "lied", "withheld", "contradicted", "outvoted", "undecided", "unresolved"
    ]
    validators: tuple[AddressField, ...] = Field(max_length=limits.MAX_ASKED)
    liars: tuple[AddressField, ...] = Field(max_length=limits.MAX_ASKED + 1)  # and the executor
    silent: tuple[AddressField, ...] = Field(max_length=limits.MAX_ASKED)
    close: bool = False  # the outputs are wrong, but within the task's tolerance


class Evidence(Message):
    """The draw and the verdicts behind a settlement; the root on chain proves them."""

    draw: Draw
    verdicts: tuple[TaskVerdict, ...] = Field(max_length=limits.MAX_TASKS)
