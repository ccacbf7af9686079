"""Members' attestations about a verification, and which of their statements a quorum made.

A statement is: a commitment is held, a party is silent, the ruling on a task, or reveals are due.
It counts once 2f+1 members made it: any other 2f+1 members then include f+1 of them, so an honest
one. Members collect attestations to judge; executors and validators collect them to know when it is
safe to reveal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, assert_never

from splitup.core import limits
from splitup.crypto.keys import Identity, verify
from splitup.messages.verification import Attestation, Held, Ruling, SignedAttestation, Silence
from splitup.protocol.committee.certificates import CommitteeView

ATTESTATION_DOMAIN: Final = b"splitup/attestation/v1"


def sign_attestation(identity: Identity, attestation: Attestation) -> SignedAttestation:
    signature = identity.sign(ATTESTATION_DOMAIN, attestation.canonical_bytes())
    return SignedAttestation(attestation=attestation, signature="0x" + signature.hex())


def check_attestation(signed: SignedAttestation, committee: CommitteeView) -> None:
    """Raise PeerFault for a stranger's attestation, BadSignature for one it did not sign."""
    member = committee.member_of(signed.attestation.member)
    verify(
        member.signing_key,
        ATTESTATION_DOMAIN,
        signed.attestation.canonical_bytes(),
        bytes.fromhex(signed.signature[2:]),
    )


class Attestations:
    """Checked attestations about one execution. Statements are only added, never removed."""

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum
        self._latest: dict[str, SignedAttestation] = {}
        self._statements: dict[Held | Silence | Ruling, set[str]] = {}
        self._made: Counter[str] = Counter()  # statements per member, to bound our memory
        self._due: dict[str, int] = {}  # steps of the draw, by member
        self._unable: dict[int, set[str]] = {}
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
        other._latest, other._due = dict(self._latest), dict(self._due)
        other._statements = {said: set(members) for said, members in self._statements.items()}
        other._made = Counter(self._made)
        other._unable = {task: set(members) for task, members in self._unable.items()}
        other._slow = {task: set(members) for task, members in self._slow.items()}
        other._fixed, other._silent = dict(self._fixed), set(self._silent)
        other._rulings, other._own = dict(self._rulings), dict(self._own)
        return other

    def add(self, signed: SignedAttestation) -> bool:
        """Add a checked attestation; return whether it is new."""
        attestation = signed.attestation
        known = self._latest.get(attestation.member)
        if known == signed:
            return False
        if known is None or _count_statements(attestation) >= _count_statements(known.attestation):
            self._latest[attestation.member] = signed  # a member that restarted states less
        if attestation.due:
            self._due[attestation.member] = attestation.steps
        statements: list[Held | Silence | Ruling] = [*attestation.held, *attestation.silent]
        for statement in [*statements, *attestation.rulings]:
            self._count(statement, attestation.member)
        return True

    def knows(self, signed: SignedAttestation) -> bool:
        """Return whether this is the member's latest attestation here, which needs no check."""
        return self._latest.get(signed.attestation.member) == signed

    def _count(self, statement: Held | Silence | Ruling, member: str) -> None:
        if isinstance(statement, Ruling) and statement.slow:
            self._slow.setdefault(statement.task, set()).add(member)
            return
        if isinstance(statement, Ruling) and statement.validator is None:
            known = self._own.get((statement.task, member))
            if known is None or known.error or known.missing:
                self._own[statement.task, member] = statement
        if isinstance(statement, Ruling) and statement.error:
            self._unable.setdefault(statement.task, set()).add(member)
            return
        if isinstance(statement, Ruling) and statement.close:
            # members that found no stored outputs to compare with must not stop the ruling
            self._count(statement.model_copy(update={"close": False}), member)
        members = self._statements.get(statement, set())
        if member in members or self._made[member] >= 3 * limits.MAX_STATEMENTS:
            return
        self._made[member] += 1
        self._statements.setdefault(statement, members).add(member)
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
            case _ as never:
                assert_never(never)

    def get_all(self) -> Sequence[SignedAttestation]:
        """Return every member's attestation with the most statements, by account."""
        return [signed for _, signed in sorted(self._latest.items())]

    def is_due(self) -> bool:
        """Return whether executors and validators are to reveal now."""
        return self.find_due_steps() > 0

    def find_due_steps(self) -> int:
        """Return the steps of the draw, over which parties are to reveal now; 0 if they are not."""
        steps, count = next(iter(Counter(self._due.values()).most_common(1)), (0, 0))
        return steps if count >= self._quorum else 0

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
        return len(self._unable.get(task, ()))

    def is_delayed(self, task: int) -> bool:
        """Return whether members that still try to recompute the task may complete a quorum."""
        ruled = {m for (t, m), own in self._own.items() if t == task and not own.error}
        trying = self._slow.get(task, set()) - self._unable.get(task, set()) - ruled
        return bool(trying) and len(ruled | trying) >= self._quorum


def _count_statements(attestation: Attestation) -> int:
    return (
        len(attestation.held)
        + len(attestation.silent)
        + len(attestation.rulings)
        + int(attestation.due)
    )
