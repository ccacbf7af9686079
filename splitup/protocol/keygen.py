"""Distributed key generation with the chain as bulletin board.

Everything is decided from what the chain ordered, so that all members decide the same: which
dealings count (all of them, or those there are when the time for the last ones is over), which
complaints do, hence the group key. A member that lost its journal finds its share again in the
posted dealings.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitup import limits
from splitup.codec import compute_digest, encode_canonical
from splitup.crypto import dkg
from splitup.errors import InvalidInput, PeerFault
from splitup.protocol.certificates import CommitteeView
from splitup.protocol.events import (
    Command,
    ComplaintPosted,
    ConfirmGroupKey,
    DealingPosted,
    Fault,
    KeyReady,
    Log,
    PostComplaint,
    PostDealing,
)
from splitup.protocol.shared import Seat


@dataclass(frozen=True, slots=True)
class _Dealt:
    dealing: dkg.Dealing
    block: int


def make_ceremony(view: CommitteeView) -> dkg.Ceremony:
    """Return the ceremony of a configuration: its id names the chain and the contract too."""
    value = {
        "chain_id": view.domain.chain_id,
        "committee": view.domain.committee,
        "configuration": view.configuration,
    }
    ceremony_id = "0x" + compute_digest(b"splitup/ceremony/v1\0" + encode_canonical(value))
    return dkg.Ceremony(ceremony_id, tuple(member.signing_key for member in view.members))


class KeyGeneration:
    """One member's part in the key generation of one configuration.

    ``entropy`` (32 secret bytes) must be in the journal before: the same entropy gives the same
    dealing after a restart.
    """

    def __init__(self, seat: Seat, entropy: bytes) -> None:
        self._seat = seat
        self._ceremony = make_ceremony(seat.view)
        self._place = seat.index_of(seat.account)
        self._entropy = entropy
        self._dealt: dict[int, _Dealt] = {}
        self._first_block: int | None = None
        self._block = 0
        self._shares: dict[int, bytes] = {}
        self._complaints: dict[int, int] = {}  # dealer -> block of the first valid complaint
        self._done = False

    @property
    def is_done(self) -> bool:
        return self._done

    def process_start(self) -> list[Command]:
        """Post our dealing, unless the events replayed so far hold it already."""
        if self._place in self._dealt or self._done:
            return []
        dealing = dkg.make_dealing(self._ceremony, self._place, self._entropy)
        return [PostDealing(dealing.to_bytes())]

    def process_dealing(self, event: DealingPosted) -> list[Command]:
        """Check a dealing and open our share of it; complain when it is bad."""
        if self._done or event.dealer not in self._seat.accounts():
            return []
        dealer = self._seat.index_of(event.dealer)
        if self._first_block is None:
            self._first_block = event.block_number
        try:
            dealing = dkg.Dealing.from_bytes(event.dealing, self._ceremony)
            if dealing.dealer != dealer:
                raise PeerFault("posted a dealing under another member's number")
        except PeerFault as error:  # everybody sees the same bytes: as if it had not been posted
            return [Fault(event.dealer, f"posted a malformed dealing: {error}")]
        if dealer in self._dealt:
            return []
        self._dealt[dealer] = _Dealt(dealing, event.block_number)
        seat = self._seat
        try:
            self._shares[dealer] = dkg.open_and_verify_share(
                self._ceremony, dealing, self._place, seat.identity
            )
        except PeerFault as error:
            complaint = dkg.make_complaint(self._ceremony, dealing, self._place, seat.identity)
            return [
                Fault(event.dealer, f"dealt us a bad share: {error}"),
                PostComplaint(event.dealer, complaint.to_bytes()),
            ]
        return []

    def process_complaint(self, event: ComplaintPosted) -> list[Command]:
        """Judge a complaint from public bytes; a true one excludes its dealer."""
        if self._done or event.dealer not in self._seat.accounts():
            return []
        dealer = self._seat.index_of(event.dealer)
        dealt = self._dealt.get(dealer)
        if dealt is None:
            return []
        try:
            complaint = dkg.Complaint.from_bytes(event.evidence, self._ceremony)
        except PeerFault as error:
            return [Fault(event.complainer, f"posted a malformed complaint: {error}")]
        if not dkg.is_complaint_valid(self._ceremony, dealt.dealing, complaint):
            return [Fault(event.complainer, f"complained falsely about dealer {event.dealer}")]
        self._complaints.setdefault(dealer, event.block_number)
        return [Log(f"dealer {event.dealer} is excluded from key generation by a complaint")]

    def process_block(self, number: int) -> list[Command]:
        """Compute the key when dealings and complaints are final at this block."""
        self._block = max(self._block, number)
        closed_at = self._get_closing_block()
        if self._done or closed_at is None:
            return []
        if self._block < closed_at + limits.DKG_COMPLAINT_BLOCKS:
            return []
        qualified = {
            dealer: dealt.dealing
            for dealer, dealt in self._dealt.items()
            if dealt.block <= closed_at and not self._is_excluded(dealer, closed_at)
        }
        try:
            group = dkg.compute_group(self._ceremony, qualified)
        except InvalidInput as error:
            self._done = True
            return [Log(f"key generation failed: {error}")]
        self._done = True
        if not qualified.keys() <= self._shares.keys():
            return [Log("our share of the group key is incomplete; this member cannot sign seeds")]
        shares = {dealer: self._shares[dealer] for dealer in qualified}
        share = dkg.compute_secret_share(group, self._place, shares)
        return [KeyReady(group, share), ConfirmGroupKey(group.public_key)]

    def _is_excluded(self, dealer: int, closed_at: int) -> bool:
        block = self._complaints.get(dealer)
        return block is not None and block <= closed_at + limits.DKG_COMPLAINT_BLOCKS

    def _get_closing_block(self) -> int | None:
        """Return the block after which no dealing counts, or None while that is open."""
        if self._first_block is None:
            return None
        timeout = self._first_block + limits.DKG_TIMEOUT_BLOCKS
        blocks = sorted(dealt.block for dealt in self._dealt.values())
        in_time = [block for block in blocks if block <= timeout]
        if len(in_time) == len(self._ceremony.members):
            return in_time[-1]
        if self._block <= timeout:
            return None
        if len(in_time) >= self._ceremony.threshold:
            return timeout
        if len(blocks) >= self._ceremony.threshold:
            return blocks[self._ceremony.threshold - 1]
        return None
