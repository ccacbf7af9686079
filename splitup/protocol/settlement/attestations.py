"""Members' attestations about a verification, and which of their statements a quorum made.

A statement is: a commitment is held, a party is silent, the ruling on a task, or reveals are due.
It counts once 2f+1 members made it: any other 2f+1 members then include f+1 of them, so an honest
one. Members collect attestations to judge. Executors and validators, who only have to know when it
is safe to reveal, collect short notices of what members attest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.crypto.keys import Identity, verify
from splitup.messages.verification import (
    Attestation,
    DueNotice,
    Held,
    Ruling,
    SignedAttestation,
    SignedDueNotice,
    Silence,
)
from splitup.protocol.committee.certificates import CommitteeView

ATTESTATION_DOMAIN: Final = b"splitup/attestation/v1"
_NOTICE_DOMAIN: Final = b"splitup/due-notice/v1"


def sign_attestation(identity: Identity, attestation: Attestation) -> SignedAttestation:
    signature = identity.sign(ATTESTATION_DOMAIN, attestation.canonical_bytes())
    return SignedAttestation(attestation=attestation, signature="0x" + signature.hex())


def check_attestation(signed: SignedAttestation, committee: CommitteeView) -> None:
    """Raise PeerFault for a stranger's attestation or one that would fill every proposal.

    Raise BadSignature for one that its member did not sign.
    """
    member = committee.member_of(signed.attestation.member)
    payload = signed.attestation.canonical_bytes()
    if len(payload) > limits.MAX_ATTESTATION_BYTES:
        raise PeerFault(f"an attestation has {len(payload)} bytes", peer=member.account)
    verify(member.signing_key, ATTESTATION_DOMAIN, payload, bytes.fromhex(signed.signature[2:]))


def sign_notice(
    identity: Identity, attestation: Attestation, validator: str, tasks: Collection[int]
) -> SignedDueNotice:
    """Sign what an attestation says to a node that validates these tasks."""
    held = attestation.once(_index_held)
    notice = DueNotice(
        execution_id=attestation.execution_id,
        member=attestation.member,
        steps=attestation.steps,
        due=attestation.due,
        held=tuple(held[task, validator] for task in tasks if (task, validator) in held),
    )
    signature = identity.sign(_NOTICE_DOMAIN, notice.canonical_bytes())
    return SignedDueNotice(notice=notice, signature="0x" + signature.hex())


def check_notice(signed: SignedDueNotice, committee: CommitteeView) -> None:
    """Raise PeerFault or BadSignature for a notice that no member signed as its own."""
    member = committee.member_of(signed.notice.member)
    payload, signature = signed.notice.canonical_bytes(), bytes.fromhex(signed.signature[2:])
    verify(member.signing_key, _NOTICE_DOMAIN, payload, signature)


@dataclass(slots=True)
class DueNotices:
    """What members told one node of one execution: whether to reveal, and what they hold of it."""

    quorum: int
    own: dict[int, Held] = field(default_factory=dict)  # what the node committed to, by task
    _due: dict[str, int] = field(default_factory=dict)  # steps of the draw, by member
    _holders: dict[int, set[str]] = field(default_factory=dict)  # of ``own``, by task

    def add(self, notice: DueNotice) -> None:
        """Count a checked notice; what a member said stays said."""
        if notice.due:
            self._due[notice.member] = notice.steps
        for held in notice.held:
            if self.own.get(held.task) == held:
                self._holders.setdefault(held.task, set()).add(notice.member)

    def says_anybody_due(self) -> bool:
        """Return whether a member said that it is time to reveal."""
        return bool(self._due)

    def find_due_steps(self) -> int:
        """Return the steps of the draw, over which to reveal now; 0 if it is not time."""
        return _find_agreed(self._due, self.quorum)

    def is_fixed(self, task: int) -> bool:
        """Return whether the node's commitment for a task can no longer be ignored."""
        return len(self._holders.get(task, ())) >= self.quorum


# what a member says: also that reveals are due (by steps), or that it cannot recompute a task
Statement = Held | Silence | Ruling | tuple[Literal["due", "unable"], int]


class _Kept(NamedTuple):
    """An attestation that says something which no other one of its member says."""

    signed: SignedAttestation
    said: frozenset[Statement]

    @property
    def size_bytes(self) -> int:
        return self.signed.attestation.once(_measure)


class Attestations:
    """Checked attestations about one execution, and what enough members said in them.

    What a quorum said stays said. Each member's statements count as long as the attestations that
    prove them are kept, so that a proposal can show others all that its settlement follows from.
    Honest members only add to theirs. Of one that contradicts itself several are kept, up to a
    bound: first those without which a quorum could not be shown, then the latest.
    """

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum
        self._kept: dict[str, list[_Kept]] = {}  # by member
        self._statements: dict[Statement, set[str]] = {}
        self._due: dict[str, int] = {}  # steps of the draw, by member
        self._slow: dict[int, set[str]] = {}
        self._fixed: dict[tuple[int, str], str] = {}
        self._silent: set[tuple[str, int | None]] = set()
        self._rulings: dict[tuple[int, str], Ruling] = {}  # by task and whose claim
        self._own: dict[tuple[int, str], Ruling] = {}  # (task, member) -> what it got

    def renew(self) -> Attestations:
        """Return an empty collection for the same committee."""
        return Attestations(self._quorum)

    def fork(self) -> Attestations:
        """Return a collection that starts with all that was stated here."""
        other = self.renew()
        other._kept = {member: list(kept) for member, kept in self._kept.items()}
        other._statements = {said: set(members) for said, members in self._statements.items()}
        other._due = dict(self._due)
        other._slow = {task: set(members) for task, members in self._slow.items()}
        other._fixed, other._silent = dict(self._fixed), set(self._silent)
        other._rulings, other._own = dict(self._rulings), dict(self._own)
        return other

    def add(self, signed: SignedAttestation, *, may_replace: bool = False) -> bool:
        """Add a checked attestation; return whether it says something that was not known.

        Of a member that contradicted itself often a further one needs the place of another, and
        gets it if it ``may_replace`` one: if others show it, not the member itself.
        """
        attestation, member = signed.attestation, signed.attestation.member
        if self.knows(signed):
            return False
        self._note(attestation)
        new, kept = _Kept(signed, frozenset(_list_statements(attestation))), self._kept.get(member)
        if kept is None:
            kept = self._kept[member] = []
        if any(new.said <= one.said for one in kept):
            return False  # a member that restarted states less
        rest = [one for one in kept if not one.said <= new.said]
        while rest and not _fits([*rest, new]):
            spare = self._find_spare(rest, new) if may_replace else None
            if spare is None:
                return False
            rest.remove(spare)
        before = frozenset[Statement]().union(*(one.said for one in kept))
        self._kept[member] = kept = [*rest, new]
        for statement in before.difference(*(one.said for one in kept)):
            self._statements[statement].discard(member)
            if not self._statements[statement]:
                del self._statements[statement]
        for statement in new.said:
            self._count(statement, member)
        return True

    def _find_spare(self, kept: list[_Kept], new: _Kept) -> _Kept | None:
        """Return the oldest of a member's attestations that no quorum needs beside the others."""
        for one in kept:
            others = new.said.union(*(other.said for other in kept if other is not one))
            if not any(self._is_just_enough(statement) for statement in one.said - others):
                return one
        return None

    def _is_just_enough(self, statement: Statement) -> bool:
        """Return whether as many members made a statement as it needs to count, and no more."""
        enough = self._quorum
        if isinstance(statement, tuple) and statement[0] == "unable":
            enough = self._quorum // 2 + 1  # f + 1: no quorum is left that can
        return len(self._statements.get(statement, ())) == enough

    def knows(self, signed: SignedAttestation) -> bool:
        """Return whether this attestation is kept here, which needs no check."""
        kept = self._kept.get(signed.attestation.member, ())
        return any(
            one.signed.signature == signed.signature and one.signed == signed for one in kept
        )

    def _note(self, attestation: Attestation) -> None:
        """Keep what is no matter of a quorum."""
        member = attestation.member
        if attestation.due:
            self._due[member] = attestation.steps
        for ruling in attestation.rulings:
            if ruling.slow:
                self._slow.setdefault(ruling.task, set()).add(member)
            elif ruling.validator is None:
                known = self._own.get((ruling.task, member))
                if known is None or known.error or known.missing:
                    self._own[ruling.task, member] = ruling

    def _count(self, statement: Statement, member: str) -> None:
        members = self._statements.setdefault(statement, set())
        members.add(member)
        if len(members) < self._quorum:
            return
        match statement:
            case Held(task=task, validator=validator, root=root):
                self._fixed.setdefault((task, validator), root)
            case Silence(node=node, task=task):
                self._silent.add((node, task))
            case Ruling(claim=claim):
                known = self._rulings.get(claim)
                if known is None or (known.missing and not statement.missing) or statement.close:
                    self._rulings[claim] = statement  # a result outweighs missing inputs
            case _:
                pass  # counted when it is asked for

    def get_all(self) -> Sequence[SignedAttestation]:
        """Return the attestations that prove all that counts here, by account."""
        return [one.signed for _, kept in sorted(self._kept.items()) for one in kept]

    def is_due(self) -> bool:
        """Return whether executors and validators are to reveal now."""
        return self.find_due_steps() > 0

    def find_due_steps(self) -> int:
        """Return the steps of the draw, over which parties are to reveal now; 0 if they are not."""
        return _find_agreed(self._due, self._quorum)

    def find_fixed(self, task: int, validator: str) -> str | None:
        """Return the root that the validator can no longer change, or None."""
        return self._fixed.get((task, validator))

    def is_silent(self, node: str, task: int | None) -> bool:
        return (node, task) in self._silent

    def find_ruling(self, task: int, validator: str = "") -> Ruling | None:
        """Return the ruling on a disputed task that 2f+1 members reached independently, or None.

        It may state that they all lacked the same inputs. With ``validator`` it is about what that
        one claims instead of the executor.
        """
        return self._rulings.get((task, validator))

    def find_statement(self, task: int, member: str) -> Ruling | None:
        """Return what one member says that it got when it recomputed a task, or None."""
        return self._own.get((task, member))

    def count_unable(self, task: int) -> int:
        """Return how many members stated that they cannot recompute the task."""
        return len(self._find_unable(task))

    def _find_unable(self, task: int) -> set[str]:
        return self._statements.get(("unable", task), set())

    def is_delayed(self, task: int) -> bool:
        """Return whether members that still try to recompute the task may complete a quorum."""
        ruled = {m for (t, m), own in self._own.items() if t == task and not own.error}
        trying = self._slow.get(task, set()) - self._find_unable(task) - ruled
        return bool(trying) and len(ruled | trying) >= self._quorum


def _fits(kept: Sequence[_Kept]) -> bool:
    """Return whether so many attestations of one member may be kept and shown."""
    size_bytes = sum(one.size_bytes for one in kept)
    return len(kept) <= limits.MAX_CONFLICTING and size_bytes <= limits.MAX_ATTESTATION_BYTES


def _find_agreed(steps_by_member: Mapping[str, int], quorum: int) -> int:
    """Return the number of steps that a quorum names, or 0."""
    steps, count = next(iter(Counter(steps_by_member.values()).most_common(1)), (0, 0))
    return steps if count >= quorum else 0


def _index_held(attestation: Attestation) -> dict[tuple[int, str], Held]:
    return {(held.task, held.validator): held for held in attestation.held}


def _measure(attestation: Attestation) -> int:
    return len(attestation.canonical_bytes())


def _list_statements(attestation: Attestation) -> Iterator[Statement]:
    """Yield what an attestation says that counts once enough members say it."""
    yield from attestation.held
    yield from attestation.silent
    if attestation.due:
        yield "due", attestation.steps
    for ruling in attestation.rulings:
        if ruling.error:
            yield "unable", ruling.task
        elif not ruling.slow:
            yield ruling
            if ruling.close:  # members that found no stored outputs to compare with agree as well
                yield ruling.model_copy(update={"close": False})
