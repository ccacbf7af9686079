"""What a member's machines share: its identity, what it signed, and contents known by digest.

Also the collector of threshold signatures, which makes the seeds of plans and draws.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.errors import BadSignature
from splitup.core.latest import Latest
from splitup.crypto.dkg import GroupKey
from splitup.crypto.keys import Identity
from splitup.crypto.signature_scheme import REAL, Scheme
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Request
from splitup.messages.snapshots import Snapshot
from splitup.protocol.committee.certificates import RANDOMNESS_DOMAIN, CommitteeView
from splitup.protocol.committee.commands import (
    Command,
    FetchManifest,
    FetchSnapshot,
    Forget,
    Persist,
)

SIGNED: Final = "signed"  # journal kind: slot -> digest of what we signed for it, end of slot
SNAPSHOT: Final = "snapshot"  # journal kind: root -> content


class Activity:
    """Whether a member rests: nothing is open, and nothing has changed for a while.

    Then it asks for fewer heartbeats, repeats its votes and snapshots less often, and looks at the
    chain less often. Whatever happens ends that at once. Members need not agree about it. A member
    is busy until ``note`` was called once.
    """

    def __init__(self) -> None:
        self.busy_at = math.inf
        self._woken_at = -math.inf

    def note(self, now: float) -> None:
        """Record that there is something to do."""
        if self.is_resting(now):
            self._woken_at = now
        self.busy_at = now

    def is_resting(self, now: float) -> bool:
        """Return whether there has been nothing to do for ``REST_AFTER_S``."""
        return now >= self.busy_at + limits.REST_AFTER_S

    def has_rested(self, now: float, within_s: float) -> bool:
        """Return whether we rest, or did so ``within_s`` ago: then others may, too."""
        return self.is_resting(now) or now - self._woken_at < within_s


class SigningGuard:
    """At most one signature per slot, across restarts: a slot is bound to the first digest.

    An account has one guard for all its configurations, because a request may move from one to
    another and back. ``entries`` are what earlier claims persisted, by slot.

    A slot of an execution is kept for ``tuning.SIGNED_MARGIN_S`` after the chain's time has closed
    it, whatever became of the execution: only then no event can make us sign for it again.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._entries = {slot: dict(entry) for slot, entry in (entries or {}).items()}

    def __len__(self) -> int:
        return len(self._entries)

    def claim(self, slot: str, digest: str, until_s: int = 0) -> list[Command] | None:
        """Return what to persist before signing, or None if another digest was signed.

        ``until_s`` is the block time from which the chain takes nothing more for this slot; 0 for
        a slot that ``forget`` drops.
        """
        known = self._entries.get(slot)
        if known is None:
            self._entries[slot] = {"digest": digest, "until_s": until_s}
            return [Persist(SIGNED, slot, dict(self._entries[slot]))]
        return [] if known["digest"] == digest else None

    def knows(self, slot: str) -> bool:
        return slot in self._entries

    def shorten(self, slot: str, until_s: int) -> list[Command]:
        """State that the chain closed a slot earlier than its claim said."""
        entry = self._entries.get(slot)
        if entry is None or entry["until_s"] <= until_s:
            return []
        entry["until_s"] = until_s
        return [Persist(SIGNED, slot, dict(entry))]

    def slots(self) -> list[str]:
        return list(self._entries)

    def forget(self, slot: str) -> list[Command]:
        """Drop a slot that can never be signed again."""
        return [] if self._entries.pop(slot, None) is None else [Forget(SIGNED, slot)]

    def forget_closed(self, timestamp_s: int) -> list[Command]:
        """Drop the slots that were closed so long ago that no reorganisation opens them again."""
        closed = [
            slot
            for slot, entry in self._entries.items()
            if entry["until_s"] and entry["until_s"] + tuning.SIGNED_MARGIN_S < timestamp_s
        ]
        return [command for slot in closed for command in self.forget(slot)]


class FeeTotals:
    """The fees that each model's executions paid lately: what is a day old counts half.

    Prices say nothing: a client may pay them to a node of its own. Fees are lost to it.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}  # by model, micro-USDC
        self._at = 0.0

    def add(self, model_id: str, micro_usdc: int, now: float) -> None:
        """Add a fee; forget totals below a micro-USDC, and of too many the least."""
        left, self._at = 0.5 ** ((now - self._at) / tuning.FEES_HALVE_S), now
        self._totals = {each: left * fee for each, fee in self._totals.items() if left * fee >= 1}
        if micro_usdc:
            self._totals[model_id] = self._totals.get(model_id, 0.0) + micro_usdc
        if len(self._totals) > tuning.MAX_OPEN_EXECUTIONS:
            del self._totals[min(self._totals, key=self._totals.__getitem__)]

    def find_large(self, parts: int) -> set[str]:
        """Return the models that paid at least one of so many equal parts of all fees."""
        least = sum(self._totals.values()) / parts
        return {model_id for model_id, fee in self._totals.items() if fee >= least}


class ContentStore:
    """Snapshots and manifests by digest. Missing ones are requested at most once a second.

    Anybody can register models. So half of the manifests are those of the executions planned last,
    which others do not displace.
    """

    def __init__(self, snapshots: Sequence[Snapshot] = ()) -> None:
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._manifests: dict[str, Manifest] = {}  # latest last
        # models of the executions that were planned last
        self._planned: Latest[str, None] = Latest(tuning.MAX_MANIFESTS // 2)
        self._fees = FeeTotals()
        self._asked: dict[str, float] = {}
        for snapshot in sorted(snapshots, key=lambda s: s.sequence):
            self.add_snapshot(snapshot)

    def add_snapshot(self, snapshot: Snapshot) -> list[Command]:
        root = snapshot.root()
        if root in self._snapshots:
            return []
        self._snapshots[root] = snapshot
        commands: list[Command] = [Persist(SNAPSHOT, root, snapshot.model_dump(mode="json"))]
        entries = sum(len(kept.entries) for kept in self._snapshots.values())
        while len(self._snapshots) > 1 and (
            len(self._snapshots) > tuning.MAX_SNAPSHOTS or entries > tuning.SNAPSHOT_ENTRIES_KEPT
        ):
            oldest, dropped = self._snapshots.popitem(last=False)
            entries -= len(dropped.entries)
            commands.append(Forget(SNAPSHOT, oldest))
        return commands

    def add_manifest(self, manifest: Manifest) -> None:
        self._manifests[manifest.model_id] = manifest
        if len(self._manifests) > tuning.MAX_MANIFESTS:
            del self._manifests[next(each for each in self._manifests if each not in self._planned)]

    def manifests(self) -> list[Manifest]:
        return list(self._manifests.values())

    @property
    def used(self) -> Collection[str]:
        """Return the models in use: those that people paid for lately."""
        return self._fees.find_large(tuning.MAX_MANIFESTS // 2)

    def find_snapshot(self, root: str) -> Snapshot | None:
        return self._snapshots.get(root)

    def find_manifest(self, model_id: str) -> Manifest | None:
        return self._manifests.get(model_id)

    def note_plan(self, model_id: str) -> None:
        """Keep a model's manifest: an execution of it was planned, and pays for its stake."""
        self._planned[model_id] = None

    def note_fee(self, model_id: str, micro_usdc: int, now: float) -> None:
        """Count what an execution of a model cost its client beside what nodes were paid."""
        self._fees.add(model_id, micro_usdc, now)

    def ask(self, model_id: str, root: str, now: float) -> list[Command]:
        """Return commands that fetch the missing ones of the two, at most once a second."""
        commands: list[Command] = []
        if model_id not in self._manifests and self._may_ask(model_id, now):
            commands.append(FetchManifest(model_id))
        return commands + self.ask_snapshot(root, now)

    def ask_snapshot(self, root: str, now: float) -> list[Command]:
        """Return the command that fetches a missing snapshot, at most once a second."""
        if root not in self._snapshots and self._may_ask(root, now):
            return [FetchSnapshot(root)]
        return []

    def _may_ask(self, name: str, now: float) -> bool:
        if now - self._asked.get(name, -tuning.GOSSIP_RETRY_S) < tuning.GOSSIP_RETRY_S:
            return False
        if len(self._asked) > tuning.MAX_OPEN_EXECUTIONS:
            self._asked.clear()
        self._asked[name] = now
        return True


@dataclass(slots=True)
class MemberContext:
    """Our identity in one committee configuration; the threshold key follows key generation."""

    identity: Identity
    view: CommitteeView
    group: GroupKey | None = None
    share: bytes = field(default=b"", repr=False)
    scheme: Scheme = REAL
    signing_guard: SigningGuard = field(default_factory=SigningGuard)
    contents: ContentStore = field(default_factory=ContentStore)
    can_recompute: Callable[[str], bool] = lambda determinism: True  # by determinism class
    grace_s: int = 0  # from an execution's deadline to its end, as by the Market
    timestamp_s: int = 0  # of the latest block
    is_active: bool = True  # our configuration is the current one
    heard: dict[str, float] = field(default_factory=dict)  # when others last sent a message
    activity: Activity = field(default_factory=Activity)

    @property
    def account(self) -> str:
        return self.identity.address

    @property
    def tolerated(self) -> int:
        """f: how many members may be faulty."""
        return (len(self.view.members) - 1) // 3

    def accounts(self) -> list[str]:
        """Return all members' accounts; the position in the list is a member's threshold index."""
        return [member.account for member in self.view.members]

    def index_of(self, account: str) -> int:
        return self.accounts().index(account)

    def set_key(self, group: GroupKey, share: bytes) -> None:
        self.group, self.share = group, share
        self.view = replace(self.view, group_key=group.public_key)

    def sign(self, struct_hash: bytes) -> str:
        """Return our quorum signature over an EIP-712 struct hash."""
        return "0x" + self.scheme.sign_quorum(self.identity, self.view.domain, struct_hash).hex()

    def check(self, account: str, struct_hash: bytes, signature: str) -> None:
        """Raise BadSignature unless ``account`` made this quorum signature."""
        signer = self.scheme.recover_signer(
            self.view.domain, struct_hash, bytes.fromhex(signature[2:])
        )
        if signer != account:
            raise BadSignature("the quorum signature is another account's", peer=account)

    def get_end_s(self, request: Request) -> int:
        """Return the block time from which the chain takes nothing more about an execution."""
        return request.deadline + self.grace_s

    def note_heard(self, account: str, now: float) -> None:
        self.heard[account] = now

    def note_lost(self, account: str) -> None:
        """Count a member as silent at once: its process accepts no connections."""
        self.heard.pop(account, None)

    def is_silent(self, account: str, now: float) -> bool:
        """Return whether a member missed two heartbeats; one that rests sends fewer."""
        if account == self.account:
            return False
        silence_s = limits.MEMBER_SILENCE_S
        if self.activity.has_rested(now, silence_s):
            silence_s += limits.REST_MEMBER_HEARTBEAT_S
        return now - self.heard.get(account, -math.inf) > silence_s

    def compute_order(self, seed: str, now: float) -> list[str]:
        """Return in which order members act for a seed: the seed's order, silent members last.

        Members may disagree about who is silent. Then two send the same thing, and the second is
        refused or ignored: the order only saves work.
        """
        order = compute_member_order(seed, self.accounts())
        return sorted(order, key=lambda account: self.is_silent(account, now))

    def get_place(self, seed: str, now: float) -> int:
        """Return our own rank in ``compute_order``."""
        return self.compute_order(seed, now).index(self.account)


@dataclass(slots=True)
class ThresholdSignatureCollector:
    """Collects partial signatures over one message until 2f+1 of them combine.

    The combination is checked first as a whole. Only if that fails the partials are checked one by
    one, and the senders of false ones named.
    """

    alpha: bytes
    partials: dict[int, str] = field(default_factory=dict)
    liars: set[int] = field(default_factory=set)
    signature: str = ""
    seed: str = ""

    def sign(self, context: MemberContext) -> str:
        """Return our own partial."""
        partial = context.scheme.sign_partial(context.share, RANDOMNESS_DOMAIN, self.alpha)
        self.partials[context.index_of(context.account)] = partial
        return partial

    def add(self, index: int, partial: str) -> None:
        """Keep a member's first partial; the valid one is unique, so others are not needed."""
        if index not in self.liars and not self.signature:
            self.partials.setdefault(index, partial)

    def combine(self, group: GroupKey, scheme: Scheme = REAL) -> list[int]:
        """Set ``signature`` and ``seed`` from enough partials; return the senders of false ones."""
        caught: list[int] = []
        while not self.signature and len(self.partials) >= group.threshold:
            chosen = dict(sorted(self.partials.items())[: group.threshold])
            try:
                signature = scheme.combine(chosen, group.threshold)
                scheme.verify_threshold(group.public_key, RANDOMNESS_DOMAIN, self.alpha, signature)
            except BadSignature:
                liars = [i for i, p in chosen.items() if not self._holds(group, i, p, scheme)]
                for index in liars:
                    del self.partials[index]
                self.liars.update(liars)
                caught += liars
                if not liars:
                    return caught  # impossible: valid shares of one polynomial combine
            else:
                self.signature, self.seed = signature, scheme.compute_seed(signature)
        return caught

    def _holds(self, group: GroupKey, index: int, partial: str, scheme: Scheme) -> bool:
        key = group.member_keys[index]
        try:
            scheme.verify_threshold(key, RANDOMNESS_DOMAIN, self.alpha, partial)
        except BadSignature:
            return False
        return True


def compute_member_order(seed: str, accounts: Sequence[str]) -> list[str]:
    """Return the members in the order in which they act for a seed."""

    def key(account: str) -> bytes:
        return hashlib.sha256(
            b"splitup/member-order/v1" + bytes.fromhex(seed[2:] + account[2:])
        ).digest()

    return sorted(accounts, key=key)
