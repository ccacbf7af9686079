"""Live nodes: heartbeats, members' observations, and the snapshot that the members agree on.

The snapshot's root binds its header and two Merkle trees (``contracts/src/libraries/Roots.sol`` is
Solidity's side):

    snapshot root = H(tag, header, roots of two trees)  entries, by ascending node
                                                        loaded tasks, by ascending id

H is SHA-256 over 32-byte words, laid out as Solidity's abi.encode does; the first word is a tag.
The header repeats facts that follow from all entries (the reference node, and who may run which
task), so that a contract needs only one entry to check a node's score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median_low
from typing import Annotated, Final, Literal

from eth_hash.auto import keccak
from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.crypto import merkle
from splitup.messages.base import (
    AddressField,
    Bandwidth,
    Bytes32Field,
    Count,
    Credit,
    DigestField,
    EndpointField,
    Message,
    NodeEndpointField,
    Speed,
)
from splitup.messages.word_hashes import ADDRESS_PAD, hash_text, hash_words

UNRULED: Final = "?"  # prefix of a determinism class in which more than f members cannot recompute
_SNAPSHOT: Final = keccak(b"splitup/snapshot/v2")
_ENTRY: Final = keccak(b"splitup/snapshot-entry/v2")
_HELD: Final = keccak(b"splitup/snapshot-task/v3")
HEADER_WORDS: Final = 11  # of a snapshot, as ``make_snapshot_header`` lays them out
_ENTRY_COUNT: Final = 7
_ENTRIES_ROOT: Final = 9


class Heartbeat(Message):
    """A node's report that it is alive, sent to every committee member once per period."""

    node: AddressField
    boot_id: DigestField  # random, new at every start of the node
    sequence: Count
    sent_at_ms: Count
    block_hash: Bytes32Field  # the latest block that this member has told the node
    queue_ms: Count  # estimated work waiting
    resident: tuple[DigestField, ...] = Field(max_length=limits.MAX_RESIDENT_TASKS)
    vram_free_bytes: Count
    determinism: str = Field(max_length=200)
    speed_mflops: Speed = 0  # measured over its runs; 0 means not yet
    bandwidth_kbps: Bandwidth = 0  # measured over its downloads; 0 means not yet
    loading: bool = False  # a task that is not resident yet


class ModelHolders(Message):
    """How far live nodes have loaded a model, as one member sees it.

    Plans are made from the snapshot on chain; heartbeats tell what the next one will show.
    """

    model_id: Bytes32Field
    tasks: Count  # distinct ones
    held: Count  # of them, by nodes of the snapshot
    reported: Count  # of them, by heartbeats
    loading: Count  # live nodes that load a task, of any model
    able: Count  # live nodes with memory for one of the tasks that nobody reports
    live: Count  # nodes


class NodeView(Message):
    """A node as one committee member observes it, quantised so that observations compare equal."""

    node: AddressField
    rtt_ms: Count
    queue_ms: Count
    resident: tuple[DigestField, ...] = Field(max_length=limits.MAX_RESIDENT_TASKS)
    determinism: str = Field(max_length=200)
    speed_mflops: Speed = 0
    bandwidth_kbps: Bandwidth = 0
    vram_free_bytes: Count = 0
    assigned_micro_usdc: Count = 0  # price of its work since the last snapshot
    locked_micro_usdc: Count = 0  # of its stake, by executions under way


class Observation(Message):
    """All nodes that one member observes alive in an epoch, sorted by node."""

    configuration: Count
    epoch: Count
    sequence: Count  # of the one snapshot that it is valid for
    member: AddressField
    views: tuple[NodeView, ...]


class SnapshotEntry(Message):
    """A node that 2f+1 members observe alive, with the figures that selection uses."""

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
    credit_milli: Credit = 0  # see ``splitup.protocol.snapshots.snapshot_rules``
    locked_micro_usdc: Count = 0  # of the stake, by executions under way; rounded up

    @property
    def free_micro_usdc(self) -> int:
        """Return the part of the stake that another execution can lock."""
        reserved = self.locked_micro_usdc + limits.VALIDATION_RESERVE_MICRO_USDC
        return max(0, self.stake_micro_usdc - reserved)


class Snapshot(Message):
    """The agreed set of live nodes; its root is on chain before randomness that is used with it."""

    configuration: Count
    sequence: Count
    epoch: Count
    entries: tuple[SnapshotEntry, ...]

    def root(self) -> str:
        """Return the Merkle root that members sign; computed once."""
        return "0x" + self.once(compute_snapshot_root).hex()


class OpenedEntry(Message):
    """An entry of a snapshot, its row, and the Merkle proof that it stands there."""

    entry: SnapshotEntry
    row: Annotated[int, Field(ge=0, lt=limits.MAX_NODES)]
    proof: tuple[Bytes32Field, ...] = Field(max_length=limits.MAX_NODES_DEPTH)


class OpenedSnapshot(Message):
    """A snapshot's header and a few of its entries, provable by its root (``check_opened``)."""

    header: tuple[Bytes32Field, ...] = Field(min_length=HEADER_WORDS, max_length=HEADER_WORDS)
    entries: tuple[OpenedEntry, ...] = Field(max_length=limits.OPENED_ENTRIES)

    def find(self, node: str) -> SnapshotEntry | None:
        """Return the entry of a node, None when it is not among those shown."""
        return next((e.entry for e in self.entries if e.entry.node == node), None)


class ReachRequest(Message):
    """A node asks a member whether the member can connect to its endpoint."""

    node: AddressField
    endpoint: EndpointField


@dataclass(frozen=True, slots=True)
class Reference:
    """A typical node, for comparison: medians over a snapshot. 0 means not measured."""

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
    """Return the operator of a node: its own account unless it names another."""
    return entry.operator or entry.node


@dataclass(frozen=True, slots=True)
class TaskClasses:
    """The determinism classes in which at least ``MIN_OPERATORS`` operators hold a task; sorted."""

    ruled: tuple[str, ...]  # members can recompute in them
    unruled: tuple[str, ...]  # marked UNRULED

    def allowed(self, *, crosses_classes: bool) -> tuple[str, ...]:
        """Return the classes whose nodes may run the task; () means that all its holders may.

        Members verify a task that crosses classes in any class, by its tolerances.
        """
        return self.ruled + self.unruled if crosses_classes else self.ruled


def compute_classes(entries: Sequence[SnapshotEntry]) -> dict[str, TaskClasses]:
    """Return, for every loaded task, the determinism classes in which its nodes check each other.

    Classes of fewer operators do not count: nodes state their class themselves, and a node with a
    class of its own would be paid for work that nobody can check.
    """
    holders: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for entry in entries:
        operator = get_operator(entry)
        for task_id in entry.resident:
            holders[task_id][entry.determinism].add(operator)
    found = {}
    for task_id, classes in sorted(holders.items()):
        names = sorted(n for n, who in classes.items() if len(who) >= limits.MIN_OPERATORS)
        found[task_id] = TaskClasses(
            ruled=tuple(name for name in names if not name.startswith(UNRULED)),
            unruled=tuple(name for name in names if name.startswith(UNRULED)),
        )
    return found


def compute_snapshot_root(snapshot: Snapshot) -> bytes:
    """Return the root of a snapshot, 32 bytes."""
    return hash_words(_SNAPSHOT, *snapshot.once(make_snapshot_header))


def check_opened(opened: OpenedSnapshot, root: str) -> None:
    """Raise PeerFault unless header and entries belong to the snapshot with this root."""
    header = [bytes.fromhex(word[2:]) for word in opened.header]
    if hash_words(_SNAPSHOT, *header).hex() != root[2:]:
        raise PeerFault(f"the snapshot's header is not that of {root}")
    count, entries_root = int.from_bytes(header[_ENTRY_COUNT]), header[_ENTRIES_ROOT]
    for shown in opened.entries:
        proof = [bytes.fromhex(word[2:]) for word in shown.proof]
        merkle.check_proof(entries_root, count, shown.row, _hash_entry(shown.entry, {}), proof)


def make_entry_leaves(snapshot: Snapshot) -> list[bytes]:
    """Return the leaves of the entries' tree, in the entries' order."""
    classes: dict[str, bytes] = {}  # hashes of names; there are few distinct ones
    return [_hash_entry(entry, classes) for entry in snapshot.entries]


def make_held_leaves(classes: dict[str, TaskClasses]) -> list[bytes]:
    """Return the leaves of the tree of loaded tasks: task id and the hashes of both its lists."""
    names: dict[str, bytes] = {}
    return [
        hash_words(
            _HELD,
            bytes.fromhex(task_id),
            hash_words(*(hash_text(name, names) for name in held.ruled)),
            hash_words(*(hash_text(name, names) for name in held.unruled)),
        )
        for task_id, held in classes.items()
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
    """Return the hash of the fields that contracts never need: endpoint and locked stake.

    The locked stake decides which candidate of a task's list is its executor, not the list itself,
    and evidence on chain is only about the list.
    """
    locked = f"\0{entry.locked_micro_usdc}" if entry.locked_micro_usdc else ""
    return sha256(f"{entry.endpoint}{locked}".encode()).digest()


def _hash_entry(entry: SnapshotEntry, classes: dict[str, bytes]) -> bytes:
    return hash_words(
        _ENTRY,
        ADDRESS_PAD + bytes.fromhex(entry.node[2:]),
        ADDRESS_PAD + bytes.fromhex(get_operator(entry)[2:]),
        bytes.fromhex(entry.signing_key[2:]),
        hash_unopened(entry),
        entry.stake_micro_usdc.to_bytes(32),
        entry.rtt_ms.to_bytes(32),
        entry.queue_ms.to_bytes(32),
        entry.speed_mflops.to_bytes(32),
        entry.bandwidth_kbps.to_bytes(32),
        entry.vram_free_bytes.to_bytes(32),
        entry.credit_milli.to_bytes(32, signed=True),
        hash_text(entry.determinism, classes),
        sha256(bytes.fromhex("".join(entry.resident))).digest(),
    )
