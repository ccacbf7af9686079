"""Equivocation: one member signs two different things for one slot. Detected, kept and reported.

Only a party that holds both signatures can detect it. Therefore votes go to all members, and a vote
that differs from our own is passed on once. Evidence goes to all members and to the chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from splitup.core import tuning
from splitup.core.errors import PeerFault
from splitup.core.latest import Latest
from splitup.crypto.quorum import plan_struct_hash, snapshot_struct_hash
from splitup.messages.plans import Request
from splitup.protocol.committee.commands import (
    Command,
    Fault,
    Forget,
    Gossip,
    Persist,
    SubmitEvidence,
)
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.peer_messages import Equivocation, PlanVote, SnapshotVote

EVIDENCE = "evidence"  # journal kind: slot and member -> two signatures

Vote = SnapshotVote | PlanVote


def get_slot(vote: Vote) -> str:
    """Return the slot of a vote, for which a member may sign only one thing."""
    if isinstance(vote, SnapshotVote):
        return f"snapshot/{vote.configuration}/{vote.sequence}/{vote.epoch}"
    return f"plan/{vote.configuration}/{vote.execution_id}/{vote.request_hash}"


def make_plan_slot(request: Request, configuration: int) -> str:
    """Return the slot of the one plan that a committee makes of the words of a request."""
    return f"plan/{configuration}/{request.execution_id}/{request.hash()}"


def compute_vote_hash(vote: Vote) -> bytes:
    """Return the EIP-712 struct hash that the vote's signature is over."""
    if isinstance(vote, SnapshotVote):
        return _hash_snapshot(vote.configuration, vote.sequence, vote.epoch, vote.root)
    return _hash_plan(
        vote.configuration,
        vote.execution_id,
        vote.request_hash,
        vote.root,
        vote.seed,
        vote.executors,
    )


# equal votes of different members have the same hash, which is computed once
_hash_snapshot = lru_cache(maxsize=256)(snapshot_struct_hash)
_hash_plan = lru_cache(maxsize=4_096)(plan_struct_hash)


class EquivocationDetector:
    """The recent verified votes, one per slot and member, and the equivocations found."""

    def __init__(self, context: MemberContext, evidence: Sequence[Equivocation] = ()) -> None:
        """Start with the ``evidence`` from before a restart; it may not have reached the chain."""
        self._context = context
        self._votes: Latest[tuple[str, str], Vote] = Latest(tuning.MAX_TRACKED_VOTES)
        members = {member.account for member in context.view.members}
        self._known: OrderedDict[tuple[str, str], Equivocation] = OrderedDict(
            ((get_slot(found.first), found.first.member), found)
            for found in evidence
            if found.first.member in members
        )
        self._unsent = list(self._known.values())

    def list_evidence(self) -> list[Equivocation]:
        """Return the equivocations found, oldest first."""
        return list(self._known.values())

    def process_tick(self) -> list[Command]:
        """Submit evidence found before a restart again, once; the chain accepts each only once."""
        if not self._unsent or not self._context.is_active:
            return []
        commands: list[Command] = [SubmitEvidence(evidence) for evidence in self._unsent]
        self._unsent.clear()
        return commands

    def check(self, vote: Vote) -> list[Command]:
        """Verify a vote's signature and record it; raise PeerFault, BadSignature."""
        self._context.view.member_of(vote.member)
        self._context.check(vote.member, compute_vote_hash(vote), vote.signature)
        return self.note(vote)

    def process_vote(self, vote: Vote) -> list[Command]:
        """Check and record a vote unless it is known already."""
        known = self._votes.get((get_slot(vote), vote.member))
        return [] if vote == known else self.check(vote)

    def note(self, vote: Vote) -> list[Command]:
        """Record a vote whose signature was verified; two different ones of a slot are evidence."""
        key = (get_slot(vote), vote.member)
        first = self._votes.setdefault(key, vote)
        if first.root == vote.root:
            return []
        return self._report(key, Equivocation(first=first, second=vote), tell=True)

    def process_evidence(self, evidence: Equivocation) -> list[Command]:
        """Check and keep evidence from a peer; raise PeerFault, BadSignature for false ones."""
        first, second = evidence.first, evidence.second
        key = (get_slot(first), first.member)
        if key in self._known:
            return []
        if (get_slot(second), second.member) != key:
            raise PeerFault("evidence of equivocation is about two slots or members")
        if first.root == second.root:
            raise PeerFault("evidence of equivocation holds the same root twice")
        self._context.view.member_of(first.member)
        for vote in (first, second):
            self._context.check(vote.member, compute_vote_hash(vote), vote.signature)
        return self._report(key, evidence, tell=False)

    def _report(self, key: tuple[str, str], evidence: Equivocation, tell: bool) -> list[Command]:
        if key in self._known:
            return []
        self._known[key] = evidence
        commands: list[Command] = []
        while len(self._known) > tuning.MAX_EVIDENCE:
            (slot, member), _ = self._known.popitem(last=False)
            commands.append(Forget(EVIDENCE, f"{slot}/{member}"))
        slot, member = key
        value = evidence.model_dump(mode="json")
        commands += [
            Persist(EVIDENCE, f"{slot}/{member}", value),
            Fault(member, f"signed two different things for {slot}"),
            SubmitEvidence(evidence),
        ]
        return [*commands, Gossip(None, evidence)] if tell else commands
