"""Write the vectors that Python and Solidity share: ``python -m tests.contracts.vectors``.

Every case is an abi.encode of inputs and of the results that Python computes from them. The forge
tests decode it and compare their own results. The inputs range from zero to the wire's bounds.
"""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from eth_abi.abi import encode

from splitup.core import limits
from splitup.crypto import bls
from splitup.messages.plans import TaskTerms
from splitup.messages.snapshots import (
    UNRULED,
    Snapshot,
    SnapshotEntry,
    TaskClasses,
    compute_snapshot_root,
    make_entry_leaves,
    make_held_leaves,
)
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN
from splitup.protocol.planning import challenges, sampling_clocks
from splitup.protocol.planning.selection import Index
from tests.builders import address, make_snapshot, task_id
from tests.protocol.planning import exact_weights

FOLDER: Final = Path(__file__).resolve().parents[2] / "contracts" / "test" / "vectors"
CASES: Final = 200
_HEADER: Final = "(" + ",".join(["uint64"] * 9 + ["bytes32"] * 2) + ")"
_ENTRY: Final = (
    "(address,address,bytes32,bytes32,uint64,uint64,uint64,uint64,uint64,uint64,int64,"
    "bytes32,bytes32)"
)
_TASK: Final = "(uint64,bytes32,uint64,uint64,uint64,uint64,bool,bool,bytes32)"


def make_files() -> dict[str, str]:
    """Return the text of every file by name."""
    cases = {"selection.json": make_selection_cases(), "bls.json": make_bls_cases()}
    return {
        name: json.dumps({"cases": ["0x" + case.hex() for case in found]}, indent=0) + "\n"
        for name, found in cases.items()
    }


def make_selection_cases() -> list[bytes]:
    """(header, entry, task, isResident, seed, role, weight, clock, three hashes, classes) each.

    The hashes are the snapshot's root, and the leaves of its first entry and of a task that nodes
    of these ruled and unruled classes have loaded.
    """
    source = random.Random(20)
    return [_make_selection_case(source) for _ in range(CASES)]


def _make_selection_case(source: random.Random) -> bytes:
    def count() -> int:
        return source.randrange(2 ** source.choice([1, 4, 10, 20, 32, 53]))

    entries = tuple(
        SnapshotEntry(
            node=address(source.randrange(2**150) * 8 + place),
            signing_key="0x" + source.randbytes(32).hex(),
            endpoint="http://n",
            stake_micro_usdc=source.choice([count(), source.randrange(10**9, 6 * 10**9)]),
            rtt_ms=count(),
            queue_ms=count(),
            resident=(task_id(0),) if source.random() < 0.5 else (),
            determinism=source.choice(["", "CPU:X86"]),
            speed_mflops=source.choice([0, count()]),
            bandwidth_kbps=source.choice([0, count()]),
            credit_milli=source.randint(-limits.MAX_CREDIT_MILLI, limits.MAX_CREDIT_MILLI),
        )
        for place in range(3)
    )
    snapshot: Snapshot = make_snapshot(0, 0).model_copy(update={"entries": entries})
    entry, task, role = entries[0], source.randrange(limits.MAX_TASKS), source.randrange(2)
    terms = TaskTerms(
        task_id=task_id(0),
        flops=count(),
        weights_bytes=count(),
        input_bytes=count(),
        ready_ms=min(count(), sampling_clocks.MAX_ETA_MS),
        crosses_classes=source.random() < 0.5,
    )
    seed = "0x" + source.randbytes(32).hex()
    weight = exact_weights.compute_weight(entry, terms, snapshot.once(Index).reference)
    clock = exact_weights.compute_clock(seed, task, role, entry.node, weight)
    opened = challenges.open_entry(snapshot, make_entry_leaves(snapshot), 0)["entry"]
    figures = (terms.flops, terms.weights_bytes, terms.input_bytes, terms.ready_ms)
    opened_task = (
        *(task, bytes.fromhex(terms.task_id), *figures),
        *(terms.crosses_classes, True, bytes(32)),
    )
    ruled, unruled = (
        tuple(f"{mark}{place}" for place in range(source.randrange(3))) for mark in ("", UNRULED)
    )
    values: list[Any] = [
        tuple(challenges.open_header(snapshot).values()),
        tuple(_unhex(value) for value in opened.values()),
        opened_task,
        bool(entry.resident),
        _unhex(seed),
        role,
        weight,
        clock,
        compute_snapshot_root(snapshot),
        make_entry_leaves(snapshot)[0],
        make_held_leaves({terms.task_id: TaskClasses(ruled, unruled)})[0],
        *([sha256(name.encode()).digest() for name in names] for names in (ruled, unruled)),
    ]
    types = [_HEADER, _ENTRY, _TASK, "bool", "bytes32", "uint8", "uint256", "uint256"]
    types += ["bytes32"] * 3 + ["bytes32[]"] * 2
    return encode([f"({','.join(types)})"], [tuple(values)])


def make_bls_cases() -> list[bytes]:
    """(key, message, signature, seed) each."""
    source = random.Random(21)
    cases = []
    for length in (0, 1, 31, 32, 55, 56, 64, 160, 1000):
        secret = source.randrange(1, bls.GROUP_ORDER).to_bytes(32)
        message = source.randbytes(length)
        signature = bls.sign_partial(secret, RANDOMNESS_DOMAIN, message)
        cases.append(
            encode(
                ["bytes", "bytes", "bytes", "bytes32"],
                [
                    bls.encode_public_key_eip2537(bls.compute_public_key(secret)),
                    message,
                    bls.encode_signature_eip2537(signature),
                    bytes.fromhex(bls.compute_seed(signature)[2:]),
                ],
            )
        )
    return cases


def _unhex(value: Any) -> Any:
    is_word = isinstance(value, str) and len(value) == 66
    return bytes.fromhex(value[2:]) if is_word else value


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in make_files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
