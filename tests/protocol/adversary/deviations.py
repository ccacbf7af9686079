"""How one party departs from the protocol in a run: a few habits, drawn from the seed.

A habit is about one kind of message that the party sends (or makes, before it commits to it). It
replaces, shrinks or enlarges fields, takes them from other messages, omits, repeats or delays. A
changed message is signed again where its sender holds the key.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from splitup.crypto.keys import Identity
from splitup.messages.base import Message
from splitup.messages.completions import SignedEnd, SignedTakeover
from splitup.messages.plans import SignedRequest
from splitup.messages.verification import SignedAttestation, ValidatorCommitment
from splitup.protocol.committee.context import MemberContext
from splitup.protocol.committee.equivocation import compute_vote_hash
from splitup.protocol.committee.peer_messages import Attested, PlanVote, SettlementSignature
from splitup.protocol.committee.settlement_proposals import SettlementProposal
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.execution.takeovers import sign_takeover
from splitup.protocol.planning.signed_requests import sign_request
from splitup.protocol.settlement.attestations import sign_attestation
from tests.protocol.adversary.mutations import Pool, mutate

# What each party sends; "made" is what it computes, before it tells anybody.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "client": (
        "Request",
        "SignedRequest",
        "SentTensors",
        "LoggedTensors",
        "SignedTakeover",
        "SignedEnd",
        "interim SignedEnd",
    ),
    "executor": (
        "SentTensors",
        "LoggedTensors",
        "made MadeTensors",
        "made Completion",
        "ExecutorCommitment",
        "Takeovers",
        "Completion",
    ),
    "validator": (
        "made VerificationResult",
        "ValidatorCommitment",
        "VerificationResult",
        "RecomputedTensors",
    ),
    "member": (
        "PlanPartial",
        "PlanVote",
        "PlanCertificateMessage",
        "PlanDelivered",
        "PlanRequest",
        "PlanCertificate",
        "CommitmentsVote",
        "CommitmentsRequest",
        "CommitmentsReply",
        "CommitmentsShared",
        "DrawPartial",
        "DrawMessage",
        "Attested",
        "made Ruling",
        "SettlementProposal",
        "SettlementSignature",
        "VerificationOrder",
    ),
    "relay": ("PlanCertificate", "VerificationOrder", "SentTensors"),
    "gateway": ("LoggedTensors",),
}
SHARES: Final = {  # of the seeds, in which a party deviates
    "client": 25,
    "executor": 32,
    "validator": 12,
    "member": 8,
    "relay": 13,
    "gateway": 10,
}
ACTIONS: Final = ("change", "change", "change", "change", "omit", "repeat", "repeat", "delay")
REPEATS: Final = 8  # later copies, each changed in another way
LATER_S: Final = (0.0, 0.3, 5.0, 25.0, 60.0, 90.0)
SEALED: Final = frozenset({"SentTensors"})  # a relay cannot change what passes through it sealed

Copies = list[tuple[float, Message]]  # delay in seconds, message


@dataclass(slots=True)
class Habit:
    """What the party does to one kind of message."""

    kind: str
    action: str
    to_all_alike: bool
    share: float  # of the messages of this kind
    # by the original's id, which stays its own while it is kept here
    changed: dict[int, tuple[Message, Message]] = field(default_factory=dict, repr=False)


class Adversary:
    """One party, and what it does; ``notes`` say what it did."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed ^ 0xBAD)
        self.party = rng.choices(list(SHARES), list(SHARES.values()))[0]
        self.pool = Pool()
        self.accounts: set[str] = set()  # whose messages it sends
        self.identities: dict[str, Identity] = {}
        self.context: MemberContext | None = None
        self.notes: list[str] = []
        self.habits: list[Habit] = []
        # an executor that fills its stake by executions of its own, once it has work
        self.fills_stake = self.party == "executor" and random.Random(seed ^ 0x57A).random() < 0.2
        # a member that tells one other what it hides from all, about what its validator pledged
        self.divides = self.party == "member" and random.Random(seed ^ 0xD1F).random() < 0.3
        self.told = self.misled = ""  # members
        # a client that gives tasks away, or makes them fail, when it has what it wants
        gives_away = random.Random(seed ^ 0x61FE).random() < 0.25
        self.gives_away = self.party == "client" and gives_away
        # it gives all of them to others, and ends it for these after fewer steps
        self.abandons = self.gives_away and random.Random(seed ^ 0xABA).random() < 0.4

    def choose_habits(self, *, is_signed: bool, is_abroad: bool) -> None:
        """Draw what the party does; a client makes either kind of request.

        Validators store what they recompute where members compare it, abroad.
        """
        rng, missing = self.random, {"Request" if is_signed else "SignedRequest"}
        if not is_abroad:
            missing.add("RecomputedTensors")
        if self.gives_away:
            return
        kinds = [kind for kind in KINDS[self.party] if kind not in missing]
        self.habits = [
            Habit(
                rng.choice(kinds),
                rng.choice(ACTIONS),
                rng.random() < 0.6,
                rng.choice((1.0, 1.0, 0.5)),
            )
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]

    def owns(self, sender: str, via: str) -> bool:
        """Return whether the adversary is the sender, or carries the message."""
        return sender in self.accounts or via == self.party

    def make(self, sender: str, message: Message) -> Message:
        """Change what a party is about to commit to, so that all it says later agrees with it."""
        if sender not in self.accounts:
            return message
        self.pool.note(message)
        for habit in self.habits:
            if habit.kind == f"made {type(message).__name__}":
                message = self._change(habit, message, is_sealed=False) or message
        return message

    def send(
        self,
        sender: str,
        message: Message,
        via: str = "",
        again: Callable[[float], Message] | None = None,
        to: str = "",
    ) -> Copies:
        """Return what is sent instead of a message to a member, ``to``, or a node, and when.

        ``again`` makes the message as its sender would some seconds later, with other times in it.
        """
        self.pool.note(message)
        if not self.owns(sender, via):
            return [(0.0, message)]
        if self.divides:
            if isinstance(message, SettlementProposal | SettlementSignature):
                return []  # all others have to agree
            message = self._divide(message, to)
        copies: Copies = [(0.0, message)]
        is_sealed = sender not in self.accounts and type(message).__name__ in SEALED
        for habit in self.habits:
            if habit.kind == _get_kind(message) and self.random.random() < habit.share:
                copies = [c for copy in copies for c in self._apply(habit, copy, is_sealed, again)]
        return copies

    def _divide(self, message: Message, to: str) -> Message:
        """Let one member alone hear that a pledge is held, which the validator withholds from one.

        All get the rest, which is never in one attestation with that.
        """
        if isinstance(message, ValidatorCommitment) and to == self.misled:
            return message.model_copy(update={"root": "0x" + "ab" * 32})
        if not isinstance(message, Attested):
            return message
        attestation, update = message.attestation.attestation, {"held": ()}
        if to == self.told and self.random.random() < 0.5:
            update = {"silent": (), "rulings": (), "due": False}
        self.notes.append(f"tells {to} {' and '.join(update)} no more")
        changed = attestation.model_copy(update=update)
        return Attested(attestation=sign_attestation(self.identities[changed.member], changed))

    def _apply(
        self,
        habit: Habit,
        copy: tuple[float, Message],
        is_sealed: bool,
        again: Callable[[float], Message] | None,
    ) -> Copies:
        delay_s, message = copy
        name = _get_kind(message)
        match habit.action:
            case "omit":
                self.notes.append(f"omits {name}")
                return []
            case "delay":
                later_s = self.random.choice((0.5, 3.0, 15.0, 45.0, 120.0))
                self.notes.append(f"delays {name} by {later_s:g} s")
                return [(delay_s + later_s, message)]
            case "repeat":
                found: Copies = [copy]
                for _ in range(REPEATS):
                    later_s = delay_s + self.random.choice(LATER_S)
                    other = message
                    if again is not None and self.random.random() < 0.5:
                        other = again(later_s)
                        self.notes.append(f"repeats {name} {later_s:g} s later")
                    else:
                        other = self._change(habit, message, is_sealed, fresh=True) or message
                    found.append((later_s, other))
                return found
        changed = self._change(habit, message, is_sealed)
        if changed is None:
            return [copy]
        if name in ("VerificationOrder", "PlanCertificate"):  # the first one counts: race it
            return [(delay_s, changed), (delay_s + 0.2, message)]
        return [(delay_s, changed)]

    def _change(
        self, habit: Habit, message: Message, is_sealed: bool, fresh: bool = False
    ) -> Message | None:
        if is_sealed:
            return None
        known = habit.changed.get(id(message))
        if known is not None and habit.to_all_alike and not fresh:
            return known[1]
        changed, paths = message, []
        for _ in range(self.random.choice((1, 1, 1, 2))):
            found = mutate(changed, self.random, self.pool)
            if found is not None:
                changed, path = found
                paths.append(path)
        if changed is message:
            return None
        if self.random.random() < 0.9:
            changed = self._sign_again(changed)
        self.notes.append(f"{habit.action}s {_get_kind(message)}.{', '.join(paths)}")
        habit.changed[id(message)] = (message, changed)
        return changed

    # ---- signatures -------------------------------------------------------------------------

    def _sign_again(self, message: Message) -> Message:
        """Sign what is inside a message again, as far as the adversary holds the keys."""
        updates: dict[str, object] = {}
        for name in type(message).model_fields:
            value = getattr(message, name)
            if isinstance(value, Message):
                updates[name] = self._sign_again(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Message):
                updates[name] = tuple(self._sign_again(item) for item in value)
        message = message.model_copy(update=updates) if updates else message
        sign = _SIGNERS.get(type(message))
        return sign(self, message) if sign is not None else message

    def _sign_end(self, signed: SignedEnd) -> Message:
        client = self._find_client()
        return signed if client is None else sign_end(client, signed.end)

    def _sign_takeover(self, signed: SignedTakeover) -> Message:
        client = self._find_client()
        return signed if client is None else sign_takeover(client, signed.takeover)

    def _sign_request(self, signed: SignedRequest) -> Message:
        client = self._find_client()
        return signed if client is None else sign_request(client, signed.request)

    def _sign_attestation(self, signed: SignedAttestation) -> Message:
        identity = self.identities.get(signed.attestation.member)
        return signed if identity is None else sign_attestation(identity, signed.attestation)

    def _sign_vote(self, vote: PlanVote) -> Message:
        if self.context is None or vote.member != self.context.account:
            return vote
        signature = self.context.sign(compute_vote_hash(vote))
        return vote.model_copy(update={"signature": signature})

    def _find_client(self) -> Identity | None:
        if self.party != "client":
            return None
        return next(iter(self.identities.values()), None)


def _get_kind(message: Message) -> str:
    """Return the name of a message's kind, as in ``KINDS``."""
    name = type(message).__name__
    return f"interim {name}" if isinstance(message, SignedEnd) and not message.end.final else name


_SIGNERS: Final[dict[type, Callable[..., Message]]] = {
    SignedEnd: Adversary._sign_end,
    SignedTakeover: Adversary._sign_takeover,
    SignedRequest: Adversary._sign_request,
    SignedAttestation: Adversary._sign_attestation,
    PlanVote: Adversary._sign_vote,
}
