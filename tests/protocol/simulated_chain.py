"""The simulation's chain, which takes what the contracts would, and the nodes in its registry."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from splitup.core import limits
from splitup.crypto import bls, quorum
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import PlanCertificate, Request, SignedRequest
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.member import CommitteeMember
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.signed_requests import sign_request
from tests.builders import COMMON_CLASS, FOREIGN_CLASS, address
from tests.protocol.committees import CHAIN_ID, make_identity
from tests.protocol.virtual_time import VirtualTime

Exposures = tuple[tuple[str, int], ...]
LAST_CALL_S = 30  # the Market's
FEE_MICRO_USDC = 1  # of each settlement
MARKET = address(0xA)
CLIENT = address(0xC)
CLIENT_IDENTITY = make_identity(999)


@dataclass(slots=True)
class Chain:
    """What the contracts hold, and everything that was ever emitted."""

    sequence: int = 0
    root: str = "0x" + "00" * 32
    snapshots: list[str] = field(default_factory=list)
    plans: dict[str, str] = field(default_factory=dict)
    agreed: dict[str, str] = field(default_factory=dict)
    locked: Counter[str] = field(default_factory=Counter)  # micro-USDC
    exposures: dict[str, list[Exposures]] = field(default_factory=dict)
    balances: Counter[str] = field(default_factory=Counter)  # of who signs requests, micro-USDC
    frozen_until: int = 0
    settlements: dict[str, quorum.Settlement] = field(default_factory=dict)
    log: list[ev.Event] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Node:
    """A node that heartbeats, computes a made-up function, commits, reveals and verifies."""

    identity: Identity
    lies: bool = False  # returns wrong outputs
    false_accuser: bool = False  # as a validator
    mute_validator: bool = False
    determinism: str = COMMON_CLASS  # in the foreign one the last bits are others
    has_other_driver: bool = False  # and within the foreign one others again
    hides_outputs: bool = False  # commits to them, and stores nothing
    stores_others: bool = False  # than those it commits to
    misstates_inputs: bool = False  # commits to some that nobody has
    corrupts_state: bool = False  # right outputs, another state
    withholds_completion: bool = False
    forgets_takeovers: bool = False  # its completion lacks them
    withholds_result: bool = False
    stake_micro_usdc: int = 10**9
    operator: str = ""
    withholds_commitment: bool = False  # commits on chain by itself
    two_faced: bool = False  # pledges something else to every member
    vram_free_bytes: int = 0
    plans: dict[str, PlanCertificate] = field(default_factory=dict)
    verified: set[tuple[str, int]] = field(default_factory=set)
    sequence: int = 0
    heads: dict[str, str] = field(default_factory=dict)  # as each member named it last

    @property
    def address(self) -> str:
        return self.identity.address

    @property
    def is_foreign(self) -> bool:
        return self.determinism == FOREIGN_CLASS

    @property
    def is_dishonest(self) -> bool:
        return (
            self.lies
            or self.false_accuser
            or self.corrupts_state
            or self.hides_outputs
            or self.stores_others
            or self.withholds_completion
            or self.forgets_takeovers
            or self.withholds_result
        )


class SimulatedChain(VirtualTime, ABC):
    """One chain, whose events reach every member (``feed``) of a simulation."""

    random: random.Random
    economics: Economics
    manifest: Manifest
    view: CommitteeView
    members: dict[str, CommitteeMember]
    certificates: dict[str, dict[str, PlanCertificate]]
    nodes: list[Node]
    by_node: dict[str, Node]

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.chain = Chain()
        self.block = 10
        self._pending: list[Callable[[], None]] = []  # transactions for the next block

    @abstractmethod
    def feed(self, account: str, event: ev.Event) -> None:
        """Hand an event to a party."""

    def _timestamp(self) -> int:
        return int(self.now) + 1_000_000

    def _make_block(self) -> ev.BlockSeen:
        return ev.BlockSeen(self.block, self._timestamp(), f"0x{self.block:064x}")

    def _mine(self) -> None:
        self.block += 1
        pending, self._pending = self._pending, []
        for transaction in pending:
            transaction()
        for account in self.members:
            event = self._make_block()
            self.after(self.random.uniform(0, 0.05), partial(self.feed, account, event))

    def emit(self, event: ev.Event) -> None:
        """Events reach a member in order, though not all members at one moment."""
        self.chain.log.append(event)
        for account in self.members:
            self.after(0.002, partial(self.feed, account, event))

    def _execute(self, command: cmd.Command) -> None:
        accounts = [member.account for member in self.view.members]
        domain = self.view.domain
        match command:
            case cmd.SubmitSnapshot():
                struct = quorum.snapshot_struct_hash(
                    1, command.sequence, command.epoch, command.root
                )
                quorum.check_quorum(domain, struct, command.signatures, accounts)
                if command.sequence != self.chain.sequence + 1:
                    self.chain.rejected["SequenceInvalid"] += 1
                    return
                self.chain.sequence, self.chain.root = command.sequence, command.root
                self.chain.snapshots.append(command.root)
                self.emit(ev.SnapshotAccepted(1, command.sequence, command.root))
            case cmd.SubmitPlan():
                struct = quorum.plan_struct_hash(
                    self.view.configuration,
                    command.execution_id,
                    command.request.hash(),
                    command.plan_root,
                    bls.compute_seed(command.seed_signature),
                    command.executors,
                )
                quorum.check_quorum(domain, struct, command.signatures, accounts)
                if command.execution_id in self.chain.plans:
                    self.chain.rejected["StatusInvalid"] += 1
                    return
                if command.client_signature:
                    price = command.request.max_price_micro_usdc
                    if self.chain.balances[command.request.client] < price:
                        self.chain.rejected["BalanceTooSmall"] += 1
                        return
                    self.chain.balances[command.request.client] -= price
                    block = {"block_hash": f"0x{self.block:064x}"}
                    self.emit(ev.RequestSeen(command.request.model_copy(update=block)))
                self.chain.plans[command.execution_id] = command.plan_root
                self.emit(ev.PlanAccepted(command.execution_id, command.plan_root))
            case cmd.SubmitCommitments():
                execution_id = command.execution_id
                exposures_hash = quorum.hash_exposures(command.exposures)
                struct = quorum.commitments_struct_hash(execution_id, command.root, exposures_hash)
                quorum.check_quorum(domain, struct, command.signatures, accounts)
                if execution_id not in self.chain.plans or execution_id in self.chain.settlements:
                    self.chain.rejected["StatusInvalid"] += 1
                    return
                if execution_id in self.chain.agreed:
                    self.chain.rejected["CommitmentExists"] += 1
                    return
                exposures = self._lock(execution_id, command.exposures)
                if exposures is None:
                    self.chain.rejected["ExposureTooHigh"] += 1
                    return
                self.chain.agreed[execution_id] = command.root
                block_hash = f"0x{self.block:064x}"
                self.emit(ev.ExecutionCommitted(execution_id, command.root, block_hash, exposures))
            case cmd.SubmitSettlement():
                digest = quorum.settlement_hash(command.settlement)
                struct = quorum.settlement_struct_hash(command.execution_id, digest)
                quorum.check_quorum(domain, struct, command.signatures, accounts)
                if command.execution_id in self.chain.settlements:
                    self.chain.rejected["StatusInvalid"] += 1
                    return
                self._check_slashes(command)
                self.chain.settlements[command.execution_id] = command.settlement
                for exposures in self.chain.exposures[command.execution_id]:
                    self.chain.locked.subtract(dict(exposures))
                root = command.settlement.evidence_root
                self.emit(ev.ExecutionEnded(command.execution_id, root, FEE_MICRO_USDC))

    def _check_slashes(self, command: cmd.SubmitSettlement) -> None:
        """Fail unless the contract would take all that the settlement asks for."""
        history, locked = command.history, self.chain.exposures.get(command.execution_id, [])
        if history is None:
            assert not command.settlement.slashes
            return
        words = [word for exposures in locked for word in quorum.pack_words(exposures)]
        assert Counter(words) == Counter(history.exposures)
        exposed: Counter[str] = Counter()
        for exposures in locked:
            exposed.update(dict(exposures))
        for slash in command.settlement.slashes:
            most = exposed[slash.node] + limits.EXPOSURE_FLOOR_MICRO_USDC
            assert slash.amount_micro_usdc <= most, "more than its exposure"

    def _lock(self, execution_id: str, exposures: Exposures) -> Exposures | None:
        """Return what was locked; near the deadline nothing of a node that has too little.

        Before, return None when there is such a node.
        """
        found = []
        plan = next(iter(self.certificates[execution_id].values())).plan
        is_late = self._timestamp() + LAST_CALL_S >= plan.request.deadline
        for node, amount in exposures:
            assert amount >= limits.EXPOSURE_FLOOR_MICRO_USDC
            reserved = self.chain.locked[node] + limits.VALIDATION_RESERVE_MICRO_USDC
            covers = reserved + amount <= self.by_node[node].stake_micro_usdc
            if not covers and not is_late:
                return None
            found.append((node, amount if covers else 0))
        self.chain.locked.update(dict(found))
        self.chain.exposures.setdefault(execution_id, []).append(tuple(found))
        return tuple(found)

    def request(self, number: int = 1, *, steps: int = 4, deadline_s: int = 300) -> str:
        """Ask for an execution in the next block; return its id."""
        execution_id = f"0x{number:064x}"

        def mine() -> None:
            block_hash = f"0x{self.block:064x}"
            request = self._make_request(execution_id, CLIENT, steps, deadline_s, block_hash)
            self.emit(ev.RequestSeen(request))

        self._pending.append(mine)
        return execution_id

    def _make_request(
        self, execution_id: str, client: str, steps: int, deadline_s: int, block_hash: str
    ) -> Request:
        return Request(
            chain_id=CHAIN_ID,
            market=MARKET,
            execution_id=execution_id,
            model_id=self.manifest.model_id,
            client=client,
            client_key=CLIENT_IDENTITY.signing_key_hex,
            steps=steps,
            max_price_micro_usdc=10**6,
            deadline=self._timestamp() + deadline_s,
            snapshot_sequence=self.chain.sequence,
            snapshot_root=self.chain.root,
            block_hash=block_hash,
            verify_bps=self.economics.sampling_bps,
        )

    def sign_request(
        self, nonce: int, *, steps: int = 4, deadline_s: int = 300, **changes: object
    ) -> SignedRequest:
        """Return a request that the client signs, on the latest snapshot."""
        client = CLIENT_IDENTITY.address
        execution_id = quorum.compute_execution_id(CHAIN_ID, MARKET, client, nonce)
        request = self._make_request(execution_id, client, steps, deadline_s, ZERO_BYTES32)
        return sign_request(CLIENT_IDENTITY, request.model_copy(update={"nonce": nonce, **changes}))

    def tell_signed(self, signed: SignedRequest, accounts: Collection[str] = ()) -> None:
        """Show members, all by default, a signed request; each asks the chain about the client."""
        for account in accounts or list(self.members):
            event = ev.SignedRequestReceived(
                signed, self.chain.balances[signed.request.client], self.chain.frozen_until
            )
            self.after(0.002, partial(self.feed, account, event))

    def _records(self) -> list[ev.NodeRecord]:
        return [
            ev.NodeRecord(
                n.address,
                n.identity.signing_key_hex,
                "http://127.0.0.1:9000",
                n.stake_micro_usdc,
                n.operator,
                self.chain.locked[n.address],
            )
            for n in self.nodes
        ]

    def _read_registry(self) -> None:
        for account in self.members:
            self.feed(account, ev.NodesSeen(tuple(self._records())))
