"""How snapshots and plans become 32 bytes: what one signs, what the chain stores and can open.

Every leaf and header is SHA-256 over 32-byte words as Solidity's abi.encode lays them out, the
first being a tag of its own; Solidity's side is contracts/src/libraries/Roots.sol.

    snapshot root = H(tag, header, roots of two trees)  entries by ascending node
                                                        tasks that are held, by ascending id
    plan root     = H(tag, request, seed, tree's root)  tasks in the manifest's order

The snapshot's header states what its entries imply, the reference node and who may run a task, so
that the chain needs no more than one entry to weigh a node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median_low
from typing import TYPE_CHECKING, Final

from eth_hash.auto import keccak

from splitup import limits
from splitup.codec import encode_canonical
from splitup.crypto import merkle
from splitup.errors import PeerFault

if TYPE_CHECKING:
    from splitup.wire import OpenedSnapshot, Plan, Request, Snapshot, SnapshotEntry

UNRULED: Final = "?"  # before the name of a class that more than f members cannot recompute in
_SNAPSHOT: Final = keccak(b"splitup/snapshot/v2")
_ENTRY: Final = keccak(b"splitup/snapshot-entry/v2")
_HELD: Final = keccak(b"splitup/snapshot-task/v2")
_PLAN: Final = keccak(b"splitup/plan/v2")
_TASK: Final = keccak(b"splitup/plan-task/v2")
_PAD: Final = bytes(12)  # before an address
HEADER_WORDS: Final = 11  # of a snapshot, as ``make_snapshot_header`` lays them out
_ENTRY_COUNT: Final = 7
_ENTRIES_ROOT: Final = 9


@dataclass(frozen=True, slots=True)
class Reference:
    """The node that the others are measured by: medians over a snapshot. 0 means unmeasured."""

    rtt_ms: int
    queue_ms: int
    speed_mflops: int
    bandwidth_kbps: int


def compute_reference(entries: Sequence[SnapshotEntry]) -> Reference:
    """Return the medians over all entries, of speed and bandwidth over the measured ones."""

    def median(values: Iterable[int]) -> int:
        known = list(values)
        return median_low(known) if known else 0

    return Reference(
        rtt_ms=median(entry.rtt_ms for entry in entries),
        queue_ms=median(entry.queue_ms for entry in entries),
        speed_mflops=median(e.speed_mflops for e in entries if e.speed_mflops),
        bandwidth_kbps=median(e.bandwidth_kbps for e in entries if e.bandwidth_kbps),
    )


def get_operator(entry: SnapshotEntry) -> str:
    """Return who runs a node: by default the node's own account."""
    return entry.operator or entry.node


def compute_classes(entries: Sequence[SnapshotEntry]) -> dict[str, tuple[str, ...]]:
    """Return, for every task that is held, the determinism classes that can check themselves.

    Those are held by ``MIN_OPERATORS`` operators: nodes state their class themselves, and one that
    invents its own would be paid for work that nobody can check. Nor do those that members marked
    because they could not settle a dispute in them. Sorted; empty when no class can.
    """
    holders: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for entry in entries:
        operator = get_operator(entry)
        for task_id in entry.resident:
            holders[task_id][entry.determinism].add(operator)
    return {
        task_id: tuple(
            sorted(
                name
                for name, who in classes.items()
                if len(who) >= limits.MIN_OPERATORS and not name.startswith(UNRULED)
            )
        )
        for task_id, classes in sorted(holders.items())
    }


# ---- snapshots ---------------------------------------------------------------------------------


def compute_snapshot_root(snapshot: Snapshot) -> bytes:
    """Return the root of a snapshot, 32 bytes."""
    return _hash(_SNAPSHOT, *snapshot.once(make_snapshot_header))


def check_opened(opened: OpenedSnapshot, root: str) -> None:
    """Raise PeerFault unless a header and its entries are those of the snapshot with this root."""
    header = [bytes.fromhex(word[2:]) for word in opened.header]
    if _hash(_SNAPSHOT, *header).hex() != root[2:]:
        raise PeerFault(f"a snapshot's header is not that of {root}")
    count, entries_root = int.from_bytes(header[_ENTRY_COUNT]), header[_ENTRIES_ROOT]
    for shown in opened.entries:
        proof = [bytes.fromhex(word[2:]) for word in shown.proof]
        merkle.check_proof(entries_root, count, shown.row, _hash_entry(shown.entry, {}), proof)


def make_entry_leaves(snapshot: Snapshot) -> list[bytes]:
    """Return the leaves of the entries' tree, in the entries' order."""
    classes: dict[str, bytes] = {}  # few distinct ones
    return [_hash_entry(entry, classes) for entry in snapshot.entries]


def make_held_leaves(classes: dict[str, tuple[str, ...]]) -> list[bytes]:
    """Return the leaves of the tree of held tasks: task id and the hashes of its classes."""
    names: dict[str, bytes] = {}
    return [
        _hash(
            _HELD,
            bytes.fromhex(task_id),
            _hash(*(_hash_text(name, names) for name in able)),
        )
        for task_id, able in classes.items()
    ]


def make_snapshot_header(snapshot: Snapshot) -> tuple[bytes, ...]:
    """Return the header's words: slot, reference, the trees' sizes and roots."""
    reference = compute_reference(snapshot.entries)
    classes = compute_classes(snapshot.entries)
    numbers = (
        snapshot.configuration,
        snapshot.sequence,
        snapshot.epoch,
        reference.rtt_ms,
        reference.queue_ms,
        reference.speed_mflops,
        reference.bandwidth_kbps,
        len(snapshot.entries),
        len(classes),
    )
    return (
        *(number.to_bytes(32) for number in numbers),
        merkle.compute_root(snapshot.once(make_entry_leaves)),
        merkle.compute_root(make_held_leaves(classes)),
    )


def hash_unopened(entry: SnapshotEntry) -> bytes:
    """Return the hash of what of an entry the chain never opens: endpoint and locked stake.

    The latter decides who of a task's list runs it, not the list, so that no evidence needs it.
    """
    locked = f"\0{entry.locked_micro_usdc}" if entry.locked_micro_usdc else ""
    return sha256(f"{entry.endpoint}{locked}".encode()).digest()


def _hash_entry(entry: SnapshotEntry, classes: dict[str, bytes]) -> bytes:
    return _hash(
        _ENTRY,
        _PAD + bytes.fromhex(entry.node[2:]),
        _PAD + bytes.fromhex(get_operator(entry)[2:]),
        bytes.fromhex(entry.signing_key[2:]),
        hash_unopened(entry),
        entry.stake_micro_usdc.to_bytes(32),
        entry.rtt_ms.to_bytes(32),
        entry.queue_ms.to_bytes(32),
        entry.speed_mflops.to_bytes(32),
        entry.bandwidth_kbps.to_bytes(32),
        entry.vram_free_bytes.to_bytes(32),
        entry.credit_milli.to_bytes(32, signed=True),
        _hash_text(entry.determinism, classes),
        sha256(bytes.fromhex("".join(entry.resident))).digest(),
    )


# ---- plans -------------------------------------------------------------------------------------


def compute_plan_root(plan: Plan) -> bytes:
    """Return the root of a plan, 32 bytes."""
    return _hash(_PLAN, *make_plan_header(plan))


def make_plan_header(plan: Plan) -> tuple[bytes, ...]:
    """Return the header's words: what was asked, what was drawn, the tree's size and root."""
    request = plan.request
    return (
        _hash_request(request),
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
            figures = (terms.flops, terms.weights_bytes, terms.input_bytes, terms.ready_ms)
            words = (bytes.fromhex(terms.task_id), *(figure.to_bytes(32) for figure in figures))
        else:
            words = (merkle.EMPTY,) * 5
        leaves.append(
            _hash(
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
    return _hash(*(_PAD + bytes.fromhex(node[2:]) for node in candidates))


def _hash_request(request: Request) -> bytes:
    """All of it but its block: a reorganisation that only moves a request leaves its plan alone."""
    value = request.model_dump(mode="json", exclude={"block_hash"})
    return sha256(b"splitup/request/v2\0" + encode_canonical(value)).digest()


def _hash_directory(plan: Plan) -> bytes:
    """The nodes' keys, endpoints and exposures, the executors' places; the chain never opens it."""
    return _hash(
        *(
            _hash(
                _PAD + bytes.fromhex(entry.node[2:]),
                bytes.fromhex(entry.signing_key[2:]),
                sha256(entry.endpoint.encode()).digest(),
                entry.exposure_micro_usdc.to_bytes(32),
            )
            for entry in plan.nodes
        ),
        *(place.to_bytes(32) for place in plan.places),
    )


def _hash(*words: bytes) -> bytes:
    return sha256(b"".join(words)).digest()


def _hash_text(text: str, known: dict[str, bytes]) -> bytes:
    digest = known.get(text)
    if digest is None:
        digest = known[text] = sha256(text.encode()).digest()
    return digest
