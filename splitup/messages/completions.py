"""What executors and the client state about an execution, and the packed form of a completion.

    completion  salt 32 | tasks u16 | tasks | takeovers
    task        index u16 | inputs u16 | outputs u16, top bit: has a state | SHA-256 of every
                input, every output, and of the state if it has one
    takeover    task u16 | candidate u16 | first step u32 | signature 64

Integers are big-endian. Execution, node and the client's end message are not packed: they stand
beside the packed bytes and are hashed with them (``Completion``). A task of up to five ports takes
at most 198 bytes, and the rest of a completion 34, however many steps there were. A completion has
exactly one encoding.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import Annotated, Any, Final

from pydantic import Field, model_serializer, model_validator

from splitup.core import limits
from splitup.messages.base import AddressField, Bytes32Field, DigestField, Message, TaskField
from splitup.messages.frames import FRAME_HEADER_BYTES

EMPTY_DIGEST: Final = hashlib.sha256().hexdigest()  # of the state of a task that keeps none
UNSTATED: Final = "00" * 32  # instead of a state's digest, where a node has gone on since
_HEAD: Final = struct.Struct(">32sH")
_TASK: Final = struct.Struct(">HHH")
_TAKEOVER: Final = struct.Struct(">HHI64s")
_DIGEST_BYTES: Final = 32
_HAS_STATE: Final = 1 << 15
DeliveryField = Annotated[str, Field(pattern=f"^([0-9a-f]{{{2 * FRAME_HEADER_BYTES}}})?$")]
OrderField = Annotated[
    str, Field(pattern="^([0-9a-f]{2})*$", max_length=2 * limits.BUNDLE_FRAMES * FRAME_HEADER_BYTES)
]


class TaskCommitment(Message):
    """What an executor consumed and produced for one task over all steps.

    A port's digest is the SHA-256 over the SHA-256 of its tensors of all steps, in order.
    ``state`` is the SHA-256 of the concatenated state tensors after the last step, and
    EMPTY_DIGEST for a task without state. With an interim end, or an executor's own count of steps,
    it is UNSTATED for a task with state.
    """

    task: TaskField
    inputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    outputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    state: DigestField


class Takeover(Message):
    """The client's decision that another candidate of a task runs it from now on.

    ``candidate`` is an index into the plan's list for the task, 1 or more: candidate 0 needs no
    takeover. ``first_step`` is the first step whose outputs the client still lacks.
    """

    execution_id: Bytes32Field
    task: Annotated[int, Field(ge=0, lt=limits.MAX_TASKS)]
    candidate: Annotated[int, Field(ge=1, lt=limits.MAX_FALLBACKS)]
    first_step: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]


class SignedTakeover(Message):
    """A takeover with the client's Ed25519 signature, which proves it to third parties."""

    takeover: Takeover
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]


class End(Message):
    """The client's statement of how many steps were delivered, and of what it sent.

    A ``final`` end says that no step follows. An interim one stands for the case that the client
    never says more: it is signed after every ``limits.INTERIM_STEPS`` steps (ADR 21).

    ``inputs`` are digests of every graph input's tensors of all steps, as in a TaskCommitment, or
    () when the client does not state what it sent. ``outputs`` show what it received: of every
    graph output the delivery (``splitup.messages.frames``) of the last step, or "".
    """

    execution_id: Bytes32Field
    steps: Annotated[int, Field(ge=0, le=limits.MAX_STEPS)]
    inputs: tuple[DigestField, ...] = Field(max_length=limits.MAX_PORTS)
    outputs: tuple[DeliveryField, ...] = Field(default=(), max_length=limits.MAX_PORTS)
    final: bool = True


class SignedEnd(Message):
    """An end with the client's Ed25519 signature; executors pass it on in their completions.

    Without a signature it is an executor's own count of the steps that it computed, for a client
    that ordered them and does not end them (ADR 21). It states nothing but the number.
    """

    end: End
    signature: Annotated[str, Field(pattern=r"^(0x[0-9a-f]{128})?$")]

    @property
    def is_count(self) -> bool:
        """Return whether this is an executor's own count."""
        return not self.signature


class Completion(Message):
    """A node's work in one execution; its salted root goes on chain before tasks are drawn.

    ``takeovers`` made this node the executor of tasks that the plan gives to another node, or
    another node the executor of a task of this one. ``end`` is what the client sent it, or the
    node's own count. In JSON all but ``end`` is packed, in base64.
    """

    execution_id: Bytes32Field
    node: AddressField
    tasks: tuple[TaskCommitment, ...] = Field(max_length=limits.MAX_TASKS)
    takeovers: tuple[SignedTakeover, ...] = Field(default=(), max_length=limits.MAX_TASKS)
    salt: Bytes32Field
    end: SignedEnd

    @property
    def steps(self) -> int:
        """Return the number of steps that it is about."""
        return self.end.end.steps

    @model_validator(mode="before")
    @classmethod
    def _unpack(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() != {"execution_id", "node", "packed", "end"}:
            return value
        execution_id, node, packed = value["execution_id"], value["node"], value["packed"]
        if not isinstance(packed, str):
            raise ValueError("a packed completion is a string")
        fields = unpack_completion(execution_id, base64.b64decode(packed, validate=True))
        end = SignedEnd.from_value(value["end"])
        return {"execution_id": execution_id, "node": node, "end": end, **fields}

    @model_serializer
    def _pack(self) -> dict[str, Any]:
        packed = base64.b64encode(pack_completion(self)).decode()
        return {
            "execution_id": self.execution_id,
            "node": self.node,
            "packed": packed,
            "end": self.end.model_dump(mode="json"),
        }

    def root(self) -> str:
        """Return the hash that its node commits to on chain; computed once."""
        return self.once(_digest_completion)


def _digest_completion(completion: Completion) -> str:
    owner = bytes.fromhex(completion.execution_id[2:] + completion.node[2:])
    # so that every member gets the same end
    owner += hashlib.sha256(completion.end.canonical_bytes()).digest()
    data = b"splitup/completion/v4\0" + owner + pack_completion(completion)
    return "0x" + hashlib.sha256(data).hexdigest()


class ExecutorCommitment(Message):
    """An executor's commitment to its completion, sent to the members when an execution ends.

    ``end`` tells the members how many steps there were, before the draw. While the executors of an
    execution lack a common end, a node commits to each of the latest ends that it has.

    If ``end`` is the node's own count, ``earlier`` are the roots for one step less, two steps less,
    and so on, as long as they show the same ``takeovers``; ``order`` shows that the client ordered
    so many steps (``frames.make_order``), or is "" if the node has no inputs of the client.
    """

    execution_id: Bytes32Field
    node: AddressField
    root: Bytes32Field  # of the node's Completion
    end: SignedEnd
    earlier: tuple[Bytes32Field, ...] = Field(default=(), max_length=limits.UNPAID_STEPS)
    order: OrderField = ""
    takeovers: tuple[SignedTakeover, ...] = Field(default=(), max_length=limits.MAX_TASKS)


class Takeovers(Message):
    """The takeovers that gave tasks to ``node`` or took tasks from it.

    The members wait for who took a task over, and for the answer of who was replaced. A node that
    was replaced, or whose execution failed, shows the client's signatures for the most steps, so
    that the client cannot end it after fewer: ``order`` as in an ``ExecutorCommitment``, and the
    latest interim ``end``.
    """

    execution_id: Bytes32Field
    node: AddressField
    takeovers: tuple[SignedTakeover, ...] = Field(max_length=limits.MAX_TASKS)
    order: OrderField = ""
    end: SignedEnd | None = None


def pack_completion(completion: Completion) -> bytes:
    """Return the packed bytes of a completion."""
    parts = [
        _HEAD.pack(
            bytes.fromhex(completion.salt[2:]),
            len(completion.tasks),
        )
    ]
    for entry in completion.tasks:
        states = () if entry.state == EMPTY_DIGEST else (entry.state,)
        outputs = len(entry.outputs) | _HAS_STATE * len(states)
        parts.append(_TASK.pack(entry.task, len(entry.inputs), outputs))
        parts += map(bytes.fromhex, (*entry.inputs, *entry.outputs, *states))
    for signed in completion.takeovers:
        told, signature = signed.takeover, bytes.fromhex(signed.signature[2:])
        parts.append(_TAKEOVER.pack(told.task, told.candidate, told.first_step, signature))
    return b"".join(parts)


def unpack_completion(execution_id: str, data: bytes) -> dict[str, Any]:
    """Return the packed fields, not validated yet; raise ValueError for malformed bytes."""
    try:
        salt, count = _HEAD.unpack_from(data)
        place = _HEAD.size
        tasks = []
        for _ in range(count):
            task, inputs, outputs = _TASK.unpack_from(data, place)
            has_state, outputs = bool(outputs & _HAS_STATE), outputs & ~_HAS_STATE
            place += _TASK.size
            found = []
            for _ in range(inputs + outputs + has_state):
                digest = data[place : place + _DIGEST_BYTES]
                if len(digest) != _DIGEST_BYTES:
                    raise ValueError("the packed completion is cut off")
                found.append(digest.hex())
                place += _DIGEST_BYTES
            if has_state and found[-1] == EMPTY_DIGEST:
                raise ValueError("the packed completion spells out an empty state")
            tasks.append(
                {
                    "task": task,
                    "inputs": tuple(found[:inputs]),
                    "outputs": tuple(found[inputs : inputs + outputs]),
                    "state": found[-1] if has_state else EMPTY_DIGEST,
                }
            )
        takeovers = [
            {
                "takeover": {
                    "execution_id": execution_id,
                    "task": task,
                    "candidate": candidate,
                    "first_step": first_step,
                },
                "signature": "0x" + signature.hex(),
            }
            for task, candidate, first_step, signature in _TAKEOVER.iter_unpack(data[place:])
        ]
    except struct.error:
        raise ValueError("the packed completion is cut off, or has bytes behind its end") from None
    return {
        "tasks": tuple(tasks),
        "takeovers": tuple(takeovers),
        "salt": "0x" + salt.hex(),
    }
