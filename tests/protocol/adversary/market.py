"""The Market and the NodeRegistry as one execution after another sees them: money, locks, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from splitup.core import limits
from splitup.core.errors import SplitUpError
from splitup.crypto import quorum
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Request
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.planning.exposure import Economics
from tests.protocol.cheap_scheme import CheapScheme

MIN_DEADLINE_S: Final = 5
MAX_DEADLINE_S: Final = 600
GRACE_S: Final = 300
COMMIT_GRACE_S: Final = 30  # for what has no root yet
LAST_CALL_S: Final = 30  # before a deadline: from then on nobody waits for a node's stake
START_S: Final = 1_000_000
YEAR_S: Final = 365 * 86_400
RESERVATION_BPS: Final = 2_000  # a year, of the stake that a plan reserves
LEAST_RESERVED_MICRO_USDC: Final = 100_000_000

Exposures = Sequence[tuple[str, int]]


@dataclass(slots=True)
class Record:
    """One execution on chain."""

    request: Request
    opened_s: int
    reservation: int  # micro-USDC until the deadline
    status: str = "requested"  # then planned, settled or refunded
    kept: int = 0  # of the price, for the reserved stake
    closed_s: int = 0
    executors: int = 0
    agreed: bool = False
    locked: Counter[str] = field(default_factory=Counter)
    settlement: quorum.Settlement | None = None


class Market:
    """Takes transactions; a refused one raises ``Reverted``, as in Solidity."""

    def __init__(
        self,
        view: CommitteeView,
        scheme: CheapScheme,
        manifest: Manifest,
        economics: Economics,
        emit: Callable[[ev.Event], None],
    ) -> None:
        self._view, self._scheme, self._emit = view, scheme, emit
        self.economics = economics
        self.price_per_step = manifest.price_nano_usdc  # as it was registered
        self.tasks = len(manifest.tasks)
        self.now_s = START_S
        self.block_hash = "0x" + "00" * 32
        self.snapshots: set[tuple[int, str]] = set()
        self.balances: Counter[str] = Counter()
        self.frozen_until: Counter[str] = Counter()
        self.stakes: dict[str, int] = {}
        self.locked: Counter[str] = Counter()
        self.records: dict[str, Record] = {}
        self.reverted: Counter[str] = Counter()

    # ---- verbs ------------------------------------------------------------------------------

    def submit(self, command: cmd.Command) -> None:
        """Carry out a member's transaction; nothing changes when it reverts."""
        try:
            match command:
                case cmd.SubmitPlan():
                    self._accept_plan(command)
                case cmd.SubmitCommitments():
                    self._commit(command)
                case cmd.SubmitSettlement():
                    self._settle(command)
        except (Reverted, SplitUpError) as error:
            self.reverted[str(error)] += 1

    def try_request(self, request: Request) -> None:
        """Open an execution by its client's own transaction."""
        try:
            self._request(request)
        except Reverted as error:
            self.reverted[str(error)] += 1

    def _request(self, request: Request) -> None:
        request = request.model_copy(update={"block_hash": self.block_hash})
        self._open(request)
        self._emit(ev.RequestSeen(request))

    def close(self) -> None:
        """Refund what can be refunded by now; anybody may."""
        for execution_id, record in self.records.items():
            end = record.request.deadline + (GRACE_S if record.agreed else COMMIT_GRACE_S)
            if record.status in ("requested", "planned") and self.now_s >= end:
                record.kept = record.reservation if record.status == "planned" else 0
                record.status, record.closed_s = "refunded", self.now_s
                left = record.request.max_price_micro_usdc - record.kept
                self.balances[record.request.client] += left
                self._release(record)
                self._emit(ev.ExecutionEnded(execution_id))

    def quote(self, steps: int, duration_s: int) -> int:
        work = -(-self.price_per_step * steps // 1_000)  # rounded up, as its verification is
        return 2 * work + self.reserve(steps, duration_s)

    def reserve(self, steps: int, duration_s: int) -> int:
        """Return the price of what a plan reserves at most: F for each task, and S for all."""
        work = -(-self.price_per_step * steps // 1_000)
        stake = self.tasks * limits.EXPOSURE_FLOOR_MICRO_USDC
        stake += work * self.economics.slash_milli // self.economics.reward_milli
        price = max(stake, LEAST_RESERVED_MICRO_USDC) * duration_s * RESERVATION_BPS
        return -(-price // (10_000 * YEAR_S))

    # ---- rules ------------------------------------------------------------------------------

    def _open(self, request: Request) -> Record:
        _require(request.execution_id not in self.records, "NonceUsed")
        _require(0 < request.steps, "StepsInvalid")
        left_s = request.deadline - self.now_s
        _require(MIN_DEADLINE_S <= left_s <= MAX_DEADLINE_S, "DeadlineInvalid")
        quote = self.quote(request.steps, left_s)
        _require(request.max_price_micro_usdc >= quote, "PriceTooLow")
        _require(self.economics.sampling_bps <= request.verify_bps <= 10_000, "ShareInvalid")
        balance = self.balances[request.client]
        _require(balance >= request.max_price_micro_usdc, "BalanceTooSmall")
        self.balances[request.client] -= request.max_price_micro_usdc
        reservation = self.reserve(request.steps, left_s)
        self.records[request.execution_id] = Record(request, self.now_s, reservation)
        return self.records[request.execution_id]

    def _accept_plan(self, command: cmd.SubmitPlan) -> None:
        seed = self._scheme.compute_seed(command.seed_signature)
        struct = quorum.plan_struct_hash(
            self._view.configuration,
            command.execution_id,
            command.request.hash(),
            command.plan_root,
            seed,
            command.executors,
        )
        self._check_quorum(struct, command.signatures)
        request = command.request
        if command.client_signature:
            known = (request.snapshot_sequence, request.snapshot_root) in self.snapshots
            _require(known, "SnapshotUnknown")
            request = request.model_copy(update={"block_hash": self.block_hash})
            record = self._open(request)
            self._emit(ev.RequestSeen(request))
        else:
            record = self._require(command.execution_id, "requested")
            _require(record.request.hash() == request.hash(), "RecordMismatch")
        record.status, record.executors = "planned", command.executors
        self._emit(ev.PlanAccepted(command.execution_id, command.plan_root))

    def _commit(self, command: cmd.SubmitCommitments) -> None:
        record = self._require(command.execution_id, "planned")
        _require(not record.agreed, "CommitmentExists")
        exposures_hash = quorum.hash_exposures(command.exposures)
        struct = quorum.commitments_struct_hash(command.execution_id, command.root, exposures_hash)
        self._check_quorum(struct, command.signatures)
        exposures = self._lock(record, command.exposures)
        record.agreed = True
        self._emit(
            ev.ExecutionCommitted(command.execution_id, command.root, self.block_hash, exposures)
        )

    def _settle(self, command: cmd.SubmitSettlement) -> None:
        record = self._require(command.execution_id, "planned")
        _require(self.now_s < record.request.deadline + GRACE_S, "DeadlinePassed")
        settlement = command.settlement
        digest = quorum.settlement_hash(settlement)
        struct = quorum.settlement_struct_hash(command.execution_id, digest)
        self._check_quorum(struct, command.signatures)
        paid = [p for p in settlement.payments if not p.from_slash]
        left = record.request.max_price_micro_usdc - sum(p.amount_micro_usdc for p in paid)
        _require(left >= 0, "Overpaid")
        record.status, record.settlement, record.closed_s = "settled", settlement, self.now_s
        whole_s = record.request.deadline - record.opened_s
        used_s = min(self.now_s - record.opened_s, whole_s)
        record.kept = min(left, -(-record.reservation * used_s // whole_s))
        self.balances[record.request.client] += left - record.kept
        for slash in settlement.slashes:
            self.stakes[slash.node] -= min(self.stakes[slash.node], slash.amount_micro_usdc)
        for payment in settlement.payments:
            self.balances[payment.account] += payment.amount_micro_usdc
        self._release(record)
        self._emit(ev.ExecutionEnded(command.execution_id, settlement.evidence_root))

    def _require(self, execution_id: str, status: str) -> Record:
        record = self.records.get(execution_id)
        if record is None or record.status != status:
            raise Reverted("StatusInvalid")
        return record

    def _check_quorum(self, struct: bytes, signatures: bytes) -> None:
        accounts = {member.account for member in self._view.members}
        quorum.check_quorum(
            self._view.domain, struct, signatures, accounts, self._scheme.recover_signer
        )

    def _lock(self, record: Record, exposures: Exposures) -> tuple[tuple[str, int], ...]:
        """Lock stakes; near the deadline nothing of a node that has too little."""
        is_late = self.now_s + LAST_CALL_S >= record.request.deadline
        found = []
        for node, amount in exposures:
            covers = self.locked[node] + amount <= self.stakes[node]
            _require(covers or is_late, "ExposureTooHigh")
            found.append((node, amount if covers else 0))
        record.locked.update(dict(found))
        self.locked.update(dict(found))
        return tuple(found)

    def _release(self, record: Record) -> None:
        self.locked.subtract(record.locked)
        record.locked.clear()


class Reverted(Exception):
    """A transaction that the contract refuses."""


def _require(holds: bool, error: str) -> None:
    if not holds:
        raise Reverted(error)
