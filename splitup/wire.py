"""What crosses a wire: validated messages and their canonical bytes.

JSON objects are pydantic models (strict, frozen, unknown fields refused); ``canonical_bytes`` is
what gets hashed and signed. Tensors travel in ``splitup.frames``.

Nothing here does I/O; nothing here trusts the sender.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_serializer,
    model_validator,
)

from splitup import limits, packing, roots
from splitup.codec import decode_canonical, encode_canonical
from splitup.errors import InvalidInput, PeerFault
from splitup.packing import EMPTY_DIGEST as EMPTY_DIGEST

AddressField = Annotated[str, Field(pattern=r"^0x[0-9a-f]{40}$")]
Bytes32Field = Annotated[str, Field(pattern=r"^0x[0-9a-f]{64}$")]
DigestField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
HexField = Annotated[str, Field(pattern=r"^0x([0-9a-f]{2})*$", max_length=2 * limits.MIB)]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Credit = Annotated[int, Field(ge=-limits.MAX_CREDIT_MILLI, le=limits.MAX_CREDIT_MILLI)]
EndpointField = Annotated[
    str, Field(pattern=r"^https?://[^/?#@\s]+$", max_length=limits.MAX_ENDPOINT_CHARS)
]
NodeEndpointField = Annotated[  # where a node is reached: itself, or a relay (splitup.net.relay)
    str,
    Field(
        pattern=r"^https?://[^/?#@\s]+(/v1/relay/0x[0-9a-f]{40})?$",
        max_length=limits.MAX_ENDPOINT_CHARS,
    ),
]

Speed = Annotated[int, Field(ge=0, le=limits.MAX_SPEED_MFLOPS)]
Bandwidth = Annotated[int, Field(ge=0, le=limits.MAX_BANDWIDTH_KBPS)]

T = TypeVar("T")

ZERO_BYTES32 = "0x" + "00" * 32
TaskField = Annotated[int, Field(ge=0, lt=limits.MAX_TASKS)]

CLIENT = 0xFFFF  # the "task" that produces an execution's graph inputs


class Message(BaseModel):
    """Base of every JSON message: strict types, immutable, no unknown fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    def canonical_bytes(self) -> bytes:
        """Return the bytes that are hashed and signed (``splitup.codec``)."""
        return encode_canonical(self.model_dump(mode="json"))

    def digest(self, domain: str) -> str:
        """Return SHA-256(domain ‖ 0x00 ‖ canonical bytes) as a bytes32 string."""
        return "0x" + hashlib.sha256(domain.encode() + b"\0" + self.canonical_bytes()).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; what was computed of the original does not go with it."""
        copied = super().model_copy(update=update, deep=deep)
        for name in set(copied.__dict__) - set(type(self).model_fields):
            del copied.__dict__[name]
        return copied

    def once(self, compute: Callable[[Self], T]) -> T:
        """Return what a pure function makes of us; large messages are hashed and indexed once."""
        name = f"{compute.__module__}.{compute.__qualname__}"
        if name not in self.__dict__:
            self.__dict__[name] = compute(self)
        value: T = self.__dict__[name]
        return value

    @classmethod
    def parse(cls, data: bytes, *, max_bytes: int = limits.MAX_MESSAGE_BYTES) -> Self:
        """Parse canonical bytes from a peer; raise PeerFault when they are not a valid message."""
        try:
            return cls.from_value(decode_canonical(data, max_bytes=max_bytes))
        except InvalidInput as error:
            raise PeerFault(f"{cls.__name__} is malformed: {error}") from None

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Validate an already decoded JSON value; raise PeerFault naming the offending field."""
        try:
            # JSON mode, so that arrays may become tuples although types are strict
            return cls.model_validate_json(encode_canonical(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "(root)"
            raise PeerFault(f"{cls.__name__}.{where} is invalid: {first['msg']}") from None


# ---- liveness and snapshots --------------------------------------------------------------------


class Heartbeat(Message):
    """A node's signed sign of life, sent to every committee member once per period."""

    node: AddressField
    boot_id: DigestField  # new at every start: a restart is visible
    sequence: Count
    sent_at_ms: Count
    block_hash: Bytes32Field  # the head that the receiving member named last
    queue_ms: Count  # estimated work waiting
    resident: tuple[DigestField, ...] = Field(max_length=limits.MAX_RESIDENT_TASKS)
    vram_free_bytes: Count
    determinism: str = Field(max_length=200)
    speed_mflops: Speed = 0  # measured over its runs; 0 means not yet
    bandwidth_kbps: Bandwidth = 0  # measured over its downloads; 0 means not yet


class NodeView(Message):
    """One node as one committee member sees it, quantised so that views can be compared."""

    node: AddressField
    rtt_ms: Count
    queue_ms: Count
    resident: tuple[DigestField, ...] = Field(max_length=limits.MAX_RESIDENT_TASKS)
    determinism: str = Field(max_length=200)
    speed_mflops: Speed = 0
    bandwidth_kbps: Bandwidth = 0
    vram_free_bytes: Count = 0
    assigned_micro_usdc: Count = 0  # the price of the work it got since the snapshot before
    locked_micro_usdc: Count = 0  # of its stake, by executions under way


class Observation(Message):
    """Everything one member sees alive in an epoch, sorted by node."""

    configuration: Count
    epoch: Count
    sequence: Count  # of the snapshot it is for: it says nothing about a later one
    member: AddressField
    views: tuple[NodeView, ...]


class SnapshotEntry(Message):
    """A node that 2f+1 members agree is alive, with what selection needs to know about it."""

    node: AddressField
    signing_key: Bytes32Field
    endpoint: NodeEndpointField
    stake_micro_usdc: Count
    rtt_ms: Count
    queue_ms: Count
    resident: tuple[DigestField, ...] = Field(max_length=limits.MAX_RESIDENT_TASKS)
    determinism: str = Field(max_length=200)
    operator: AddressField | Literal[""] = ""  # who runs the node; "" means its own account
    speed_mflops: Count = 0  # measured, in 10^6 operations a second; 0 means unmeasured
    bandwidth_kbps: Count = 0  # measured, in 10^3 bytes a second; 0 means unmeasured
    vram_free_bytes: Count = 0
    credit_milli: Credit = 0  # work it is owed (``splitup.protocol.fairness``)
    locked_micro_usdc: Count = 0  # of the stake, by executions under way; rounded up

    @property
    def free_micro_usdc(self) -> int:
        """What of the stake another execution can lock."""
        return max(0, self.stake_micro_usdc - self.locked_micro_usdc)


class Snapshot(Message):
    """The agreed set of live nodes; its root is on chain before any randomness that uses it."""

    configuration: Count
    sequence: Count
    epoch: Count
    entries: tuple[SnapshotEntry, ...]

    def root(self) -> str:
        """Return the Merkle root that members sign (``splitup.roots``); computed once."""
        return "0x" + self.once(roots.compute_snapshot_root).hex()


class OpenedEntry(Message):
    """One entry of a snapshot, its place in it, and the proof that it is there."""

    entry: SnapshotEntry
    row: Annotated[int, Field(ge=0, lt=limits.MAX_NODES)]
    proof: tuple[Bytes32Field, ...] = Field(max_length=limits.MAX_NODES_DEPTH)


class OpenedSnapshot(Message):
    """A snapshot's header and a few entries, which its root binds (``roots.check_opened``)."""

    header: tuple[Bytes32Field, ...] = Field(
        min_length=roots.HEADER_WORDS, max_length=roots.HEADER_WORDS
    )
    entries: tuple[OpenedEntry, ...] = Field(max_length=limits.OPENED_ENTRIES)

    def find(self, node: str) -> SnapshotEntry | None:
        """Return the entry of a node, None when it is not shown."""
        return next((e.entry for e in self.entries if e.entry.node == node), None)


# ---- executions and plans ----------------------------------------------------------------------


class Request(Message):
    """An execution as the chain states it (event RequestNodeSelections)."""

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
    inputs_digest: Bytes32Field = ZERO_BYTES32  # of inputs that travel off chain
    nonce: Annotated[int, Field(ge=0, lt=2**64)] = 0


class SignedRequest(Message):
    """A request that its client signed (EIP-712, domain of the Market) and the chain lacks so far.

    Its block hash is 0: no block holds it.
    """

    request: Request
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{130}$")]


class PlanNode(Message):
    """How to reach a node of a plan, and the key its frames are signed with."""

    node: AddressField
    signing_key: Bytes32Field
    endpoint: NodeEndpointField
    exposure_micro_usdc: Count = 0  # what lies in all its tasks would cost


class TaskTerms(Message):
    """What the manifest says of a task, as far as it decides who runs it."""

    task_id: DigestField
    flops: Count  # of one step
    weights_bytes: Count
    input_bytes: Count  # of one step
    ready_ms: Count  # when its first inputs exist if reference nodes run everything before it


class Plan(Message):
    """For every task an ordered list of nodes: executor first, then fallbacks.

    ``places`` are the executors' in their lists, () when all are first: a node whose free stake
    does not cover what it would stand to lose is passed over, and stays in the list.
    A pure function of (request, seed, snapshot, manifest); ``root`` is what the chain stores.
    Storage keys are a function of the plan (``splitup.protocol.keys``).
    """

    request: Request
    seed: Bytes32Field
    tasks: tuple[tuple[AddressField, ...], ...] = Field(max_length=limits.MAX_TASKS)
    nodes: tuple[PlanNode, ...]  # sorted by node, exactly those named in ``tasks``
    terms: tuple[TaskTerms, ...] = Field(default=(), max_length=limits.MAX_TASKS)  # of every task
    unverifiable: tuple[int, ...] = Field(default=(), max_length=limits.MAX_TASKS)  # too few hold
    places: tuple[Count, ...] = Field(default=(), max_length=limits.MAX_TASKS)

    def root(self) -> str:
        """Return the Merkle root that members sign (``splitup.roots``); computed once."""
        return "0x" + self.once(roots.compute_plan_root).hex()

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
        """Return (executor, micro-USDC) sorted by executor, as the plan has them."""
        executors = set(self.executors())
        return tuple(
            (entry.node, entry.exposure_micro_usdc)
            for entry in self.nodes
            if entry.node in executors
        )

    def node_of(self, address: str) -> PlanNode:
        """Return the directory entry of ``address``; raise PeerFault when the plan lacks it."""
        for entry in self.nodes:
            if entry.node == address:
                return entry
        raise PeerFault(f"node {address} is not in the plan of {self.request.execution_id}")


class MemberSignature(Message):
    """A committee member's 65-byte ECDSA signature (r ‖ s ‖ v)."""

    member: AddressField
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{130}$")]


class PlanCertificate(Message):
    """A plan that 2f+1 members attest: whoever holds it can check it against the chain alone."""

    plan: Plan
    seed_signature: HexField  # threshold BLS signature; the seed is its hash
    signatures: tuple[MemberSignature, ...] = Field(max_length=limits.MAX_COMMITTEE)


# ---- completion and verification ---------------------------------------------------------------


class TaskCommitment(Message):
    """What an executor says it consumed and produced for one task over all steps.

    Digests are SHA-256 over the SHA-256 of the port's tensors of all steps, in order; ``state`` is
    that of the state tensors after the last step, concatenated: EMPTY_DIGEST without state.
    """

    task: TaskField
    inputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    outputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    state: DigestField


class Takeover(Message):
    """The client's word that a task's next candidate runs it from now on.

    ``candidate`` is an index into the plan's list for the task, 1 or more: the list's first node
    needs nobody's word. ``first_step`` is the first step whose outputs the client still lacks.
    """

    execution_id: Bytes32Field
    task: Annotated[int, Field(ge=0, lt=limits.MAX_TASKS)]
    candidate: Annotated[int, Field(ge=1, lt=limits.MAX_FALLBACKS)]
    first_step: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]


class SignedTakeover(Message):
    """A takeover with the client's Ed25519 signature: whoever holds it can show it around."""

    takeover: Takeover
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]


class End(Message):
    """The client's word that no step follows, and what it sent.

    ``inputs`` are digests of every graph input's tensors of all steps, as in a TaskCommitment; ()
    when the client does not vouch for what it sent.
    """

    execution_id: Bytes32Field
    steps: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    inputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)


class SignedEnd(Message):
    """An end with the client's Ed25519 signature: executors show it with their completions."""

    end: End
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]


class Completion(Message):
    """A node's work in one execution; its salted root goes on chain before any draw.

    ``takeovers`` made this node the executor of tasks that the plan gives to another; ``end`` is
    what the client told it. Except for ``end`` it travels and is kept packed (``splitup.packing``),
    in base64.
    """

    execution_id: Bytes32Field
    node: AddressField
    steps: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    tasks: tuple[TaskCommitment, ...] = Field(max_length=limits.MAX_TASKS)
    takeovers: tuple[SignedTakeover, ...] = Field(default=(), max_length=limits.MAX_TASKS)
    salt: Bytes32Field
    end: SignedEnd | None = None

    @model_validator(mode="before")
    @classmethod
    def _unpack(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() - {"end"} != {"execution_id", "node", "packed"}:
            return value
        execution_id, node, packed = value["execution_id"], value["node"], value["packed"]
        if not isinstance(packed, str):
            raise ValueError("a packed completion is a string")
        fields = packing.unpack_completion(execution_id, base64.b64decode(packed, validate=True))
        end = SignedEnd.from_value(value["end"]) if "end" in value else None
        return {"execution_id": execution_id, "node": node, "end": end, **fields}

    @model_serializer
    def _pack(self) -> dict[str, Any]:
        packed = base64.b64encode(packing.pack_completion(self)).decode()
        value = {"execution_id": self.execution_id, "node": self.node, "packed": packed}
        return value if self.end is None else {**value, "end": self.end.model_dump(mode="json")}

    def root(self) -> str:
        """Return what its node commits to on chain; computed once."""
        return self.once(_digest_completion)


def _digest_completion(completion: Completion) -> str:
    owner = bytes.fromhex(completion.execution_id[2:] + completion.node[2:])
    end = b"" if completion.end is None else completion.end.canonical_bytes()
    owner += hashlib.sha256(end).digest()  # all members must see the same
    data = b"splitup/completion/v3\0" + owner + packing.pack_completion(completion)
    return "0x" + hashlib.sha256(data).hexdigest()


class ReachRequest(Message):
    """A node asks a member whether its endpoint can be connected to (JWS)."""

    node: AddressField
    endpoint: EndpointField


class Pledge(Message):
    """What a node commits to in one execution, told to the members at its end (JWS)."""

    execution_id: Bytes32Field
    node: AddressField
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]
    root: Bytes32Field  # of its Completion
    takeovers: tuple[SignedTakeover, ...] = Field(default=(), max_length=limits.MAX_TASKS)


class Takeovers(Message):
    """What made ``node`` the executor of tasks that the plan gives to another, for the members.

    They have to know it before the draw, when completions are still secret.
    """

    execution_id: Bytes32Field
    node: AddressField
    takeovers: tuple[SignedTakeover, ...] = Field(min_length=1, max_length=limits.MAX_TASKS)


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


class VerificationCommitment(Message):
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


class Span(Message):
    """One task at one step on its node's clock, nanoseconds since the epoch.

    ``received`` is when the last input was complete, ``started``/``ended`` bound the compute,
    ``sent`` is when the outputs were handed to the network.
    """

    task: TaskField
    step: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    received_ns: str = Field(pattern=r"^[0-9]{1,20}$")
    started_ns: str = Field(pattern=r"^[0-9]{1,20}$")
    ended_ns: str = Field(pattern=r"^[0-9]{1,20}$")
    sent_ns: str = Field(pattern=r"^[0-9]{1,20}$")


class Trace(Message):
    """A node's spans of one execution, sent to the client after its end."""

    execution_id: Bytes32Field
    node: AddressField
    spans: tuple[Span, ...]


class TaskFailure(Message):
    """Why a task did not produce its output; sent to the client in an ERROR frame."""

    task: TaskField
    step: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    node: AddressField
    reason: str = Field(max_length=500)


class TaskProgress(Message):
    """How far one task came: steps that have run, and whether the next has all its inputs."""

    task: Annotated[int, Field(ge=0, lt=limits.MAX_TASKS)]
    steps: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    ready: bool


class Progress(Message):
    """A node's answer to the client's PROBE: every task of the execution that it runs now."""

    execution_id: Bytes32Field
    node: AddressField
    tasks: tuple[TaskProgress, ...] = Field(max_length=limits.MAX_TASKS)


# ---- logs --------------------------------------------------------------------------------------


class SegmentHeader(Message):
    """What a log segment holds: consecutive steps of one port, as one producer made them.

    ``lengths`` has an entry per step, in bytes. A tensor too large for a frame is an object of its
    own: ``apart`` lists (place in ``lengths``, SHA-256), and its bytes are not in the segment;
    neither are those of the places in ``zeros``.
    ``previous`` is the SHA-256 of the segment before, of 64 zeros for the first.
    """

    execution_id: Bytes32Field
    task: Annotated[int, Field(ge=0, le=CLIENT)]
    port: Annotated[int, Field(ge=0, lt=limits.MAX_PORTS)]
    node: AddressField
    index: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    first_step: Annotated[int, Field(ge=0, lt=limits.MAX_STEPS)]
    lengths: tuple[Count, ...] = Field(min_length=1, max_length=limits.SEGMENT_STEPS)
    apart: tuple[tuple[Count, DigestField], ...] = Field(max_length=limits.SEGMENT_STEPS)
    zeros: tuple[Count, ...] = Field(max_length=limits.SEGMENT_STEPS)
    previous: DigestField


# ---- storage grants ----------------------------------------------------------------------------


class Grant(Message):
    """A presigned URL for exactly one key and method. The URL is a bearer secret: never log it."""

    method: Literal["GET", "PUT"]
    key: str = Field(max_length=512)
    url: str = Field(max_length=4096, repr=False)
    headers: dict[str, str]  # must be sent as they are; they are part of the signature
    length_bytes: Count | None  # size of the object, when known
    expires_at_s: Count  # seconds since the epoch


class Grants(Message):
    """What one party may read and write, as far as it was known or asked for."""

    grants: tuple[Grant, ...]

    def get(self, method: str, key: str) -> Grant | None:
        """Return the grant for ``method`` and ``key``, None when it is missing."""
        return next((g for g in self.grants if g.method == method and g.key == key), None)

    def find(self, method: str, key: str) -> Grant:
        """Return the grant for ``method`` and ``key``; raise PeerFault when it is missing."""
        if (grant := self.get(method, key)) is not None:
            return grant
        raise PeerFault(f"the storage gateway issued no {method} grant for {key}")
