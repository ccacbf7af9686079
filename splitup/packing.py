"""A completion as few bytes: what is hashed, journaled and shown.

    completion  steps u32 | salt 32 | tasks u16 | tasks | takeovers
    task        index u16 | inputs u16 | outputs u16, top bit: has a state | SHA-256 of every
                input, every output, and of the state if it has one
    takeover    task u16 | candidate u16 | first step u32 | signature 64

Integers are big-endian. The execution and the node that it belongs to stand beside it and are
hashed with it (``splitup.wire.Completion``); a task's id is the model's to say. A task of up to
five ports costs at most 198 bytes, and a completion 38 for itself, however many steps it is over.
One completion has one encoding.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from splitup.wire import Completion

EMPTY_DIGEST: Final = hashlib.sha256().hexdigest()  # of the state of a task that keeps none

_HEAD: Final = struct.Struct(">I32sH")
_TASK: Final = struct.Struct(">HHH")
_TAKEOVER: Final = struct.Struct(">HHI64s")
_DIGEST_BYTES: Final = 32
_HAS_STATE: Final = 1 << 15


def pack_completion(completion: Completion) -> bytes:
    """Return the bytes of a completion; its fields have been validated."""
    parts = [
        _HEAD.pack(
            completion.steps,
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
    """Return a completion's other fields, to be validated; raise ValueError for other bytes."""
    try:
        steps, salt, count = _HEAD.unpack_from(data)
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
                    raise ValueError("a completion that is cut off")
                found.append(digest.hex())
                place += _DIGEST_BYTES
            if has_state and found[-1] == EMPTY_DIGEST:
                raise ValueError("a completion that spells out an empty state")
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
        raise ValueError("a completion that is cut off, or goes on behind its end") from None
    return {
        "steps": steps,
        "tasks": tuple(tasks),
        "takeovers": tuple(takeovers),
        "salt": "0x" + salt.hex(),
    }
