"""Distributed key generation with the chain as bulletin board.

All decisions use only what the chain ordered, so all members decide the same: which dealings count
(all, or those posted before a timeout), which complaints count, and hence the group key. A member
that lost its journal recovers its share from the posted dealings.

A *handover* to another configuration keeps the group key. Its dealers are the old members, who
reshare their shares; the new members receive and check the new shares, and may complain. A party
that is neither follows the generation from its public part, which it needs to check a later
handover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from splitup.core import limits
from splitup.core.codec import compute_digest, encode_canonical
from splitup.core.errors import InvalidInput, PeerFault
from splitup.crypto import dkg
from splitup.crypto.keys import Identity
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.commands import (
    Command,
    ConfirmGroupKey,
    Fault,
    Log,
    PostComplaint,
    PostDealing,
)
from splitup.protocol.committee.events import ComplaintPosted, DealingPosted, KeyReady


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The configuration that hands over: its members, its key, and our share or b""."""

    view: CommitteeView
    group: dkg.GroupKey
    share: bytes = field(default=b"", repr=False)


def make_ceremony(
    view: CommitteeView, previous: dkg.GroupKey | None = None, confirmations: int = 0
) -> dkg.Ceremony:
    """Return the ceremony of a configuration; its id binds the chain and the contract.

    It binds ``confirmations``, too: members that read at other depths have other windows, would
    decide differently, and must find that out by refusing each other's dealings.
    """
    value = {
        "chain_id": view.domain.chain_id,
        "committee": view.domain.committee,
        "configuration": view.configuration,
        "confirmations": confirmations,
    }
    ceremony_id = "0x" + compute_digest(b"splitup/ceremony/v1\0" + encode_canonical(value))
    keys = tuple(member.signing_key for member in view.members)
    return dkg.Ceremony(ceremony_id, keys, previous)


class KeyGeneration:
    """The key generation of one configuration, as a dealer, a receiver, both or an observer.

    ``entropy`` (32 secret bytes) must be in the journal first, because the same entropy gives the
    same dealing after a restart.
    """

    def __init__(
        self,
        identity: Identity,
        view: CommitteeView,
        entropy: bytes,
        predecessor: Predecessor | None = None,
        confirmations: int = 0,
    ) -> None:
        """``confirmations``: how deep the blocks are that this machine is told."""
        self._identity = identity
        self._predecessor = predecessor
        previous = predecessor.group if predecessor else None
        self._ceremony = make_ceremony(view, previous, confirmations)
        # A dealing is seen ``confirmations`` blocks after its own, and so is the end of dealings.
        # The margins for getting into a block grow alike: deeper chains are slower and more busy.
        self._timeout_blocks = limits.DKG_TIMEOUT_BLOCKS + 2 * confirmations
        self._complaint_blocks = limits.DKG_COMPLAINT_BLOCKS * (confirmations + 1)
        self._wait_blocks = confirmations + 1  # until what we post at once can be seen
        self._dealers = _list_accounts(predecessor.view if predecessor else view)
        self._place = _find(identity.address, _list_accounts(view))
        self._dealer = _find(identity.address, self._dealers)
        self._entropy = entropy
        self._dealt: dict[int, tuple[dkg.Dealing, int]] = {}  # with their blocks
        self._first_block: int | None = None
        self._block = 0
        self._shares: dict[int, bytes] = {}
        self._complaints: dict[int, int] = {}  # dealer -> block of the first valid complaint
        # dealer -> (block from which to post it again, our complaint), until the chain has one
        self._unposted: dict[int, tuple[int, PostComplaint]] = {}
        self._done = False
        self._group: dkg.GroupKey | None = None

    @property
    def group(self) -> dkg.GroupKey | None:
        """The group key, once the posted dealings determine it."""
        return self._group

    @property
    def is_done(self) -> bool:
        return self._done

    def process_start(self) -> list[Command]:
        """Post our dealing and our complaints unless the chain holds them already."""
        if self._done:
            return []
        return [*self._deal(), *self._complain_again()]

    def _complain_again(self) -> list[Command]:
        due = {d: post for d, (block, post) in self._unposted.items() if block <= self._block}
        self._unposted |= {dealer: (self._block + self._wait_blocks, due[dealer]) for dealer in due}
        return list(due.values())

    def _deal(self) -> list[Command]:
        if self._dealer is None or self._dealer in self._dealt:
            return []
        if self._predecessor is None:
            dealing = dkg.make_dealing(self._ceremony, self._dealer, self._entropy)
        elif self._predecessor.share:
            dealing = dkg.make_resharing(
                self._ceremony, self._dealer, self._predecessor.share, self._entropy
            )
        else:
            return []  # without a share of the old key we cannot reshare it
        return [PostDealing(dealing.to_bytes())]

    def process_dealing(self, event: DealingPosted) -> list[Command]:
        """Check a dealing and open our share of it; complain when it is bad."""
        dealer = _find(event.dealer, self._dealers)
        if self._done or dealer is None:
            return []
        if self._first_block is None:
            self._first_block = event.block_number
        try:
            dealing = dkg.Dealing.from_bytes(event.dealing, self._ceremony)
            if dealing.dealer != dealer:
                raise PeerFault("posted a dealing under another member's number")
        except PeerFault as error:  # all members reject the same bytes
            return [Fault(event.dealer, f"posted a malformed dealing: {error}")]
        if dealer in self._dealt:
            return []
        self._dealt[dealer] = dealing, event.block_number
        if self._place is None:
            return []
        try:
            self._shares[dealer] = dkg.open_and_verify_share(
                self._ceremony, dealing, self._place, self._identity
            )
        except PeerFault as error:
            complaint = dkg.make_complaint(self._ceremony, dealing, self._place, self._identity)
            post = PostComplaint(event.dealer, complaint.to_bytes())
            self._unposted[dealer] = (event.block_number + self._wait_blocks, post)
            return [Fault(event.dealer, f"dealt us a bad share: {error}"), post]
        return []

    def process_complaint(self, event: ComplaintPosted) -> list[Command]:
        """Check a complaint from public bytes; a true one excludes its dealer."""
        dealer = _find(event.dealer, self._dealers)
        if self._done or dealer is None:
            return []
        dealt = self._dealt.get(dealer)
        if dealt is None:
            return []
        try:
            complaint = dkg.Complaint.from_bytes(event.evidence, self._ceremony)
        except PeerFault as error:
            return [Fault(event.complainer, f"posted a malformed complaint: {error}")]
        if not dkg.is_complaint_valid(self._ceremony, dealt[0], complaint):
            return [Fault(event.complainer, f"complained falsely about dealer {event.dealer}")]
        self._complaints.setdefault(dealer, event.block_number)
        self._unposted.pop(dealer, None)
        return [Log(f"dealer {event.dealer} is excluded from key generation by a complaint")]

    def process_block(self, number: int) -> list[Command | KeyReady]:
        """Compute the key when dealings and complaints are final at this block."""
        self._block = max(self._block, number)
        closed_at = self._get_closing_block()
        if self._done or closed_at is None:
            return []
        if self._block < closed_at + self._complaint_blocks:
            return []
        qualified = {
            dealer: dealing
            for dealer, (dealing, block) in self._dealt.items()
            if block <= closed_at and not self._is_excluded(dealer, closed_at)
        }
        try:
            group = dkg.compute_group(self._ceremony, qualified)
        except InvalidInput as error:
            self._done = True
            return [Log(f"key generation failed: {error}")]
        self._done = True
        self._group = group
        if self._place is None:
            return []
        if not self._shares.keys() >= set(group.qualified):
            return [Log("our share of the group key is incomplete; this member cannot sign seeds")]
        shares = {dealer: self._shares[dealer] for dealer in group.qualified}
        share = dkg.compute_secret_share(self._ceremony, group, self._place, shares)
        return [KeyReady(group, share), ConfirmGroupKey(group.public_key)]

    def _is_excluded(self, dealer: int, closed_at: int) -> bool:
        block = self._complaints.get(dealer)
        return block is not None and block <= closed_at + self._complaint_blocks

    def _get_closing_block(self) -> int | None:
        """Return the block after which no dealing counts, or None while that is open."""
        if self._first_block is None:
            return None
        timeout = self._first_block + self._timeout_blocks
        blocks = sorted(block for _, block in self._dealt.values())
        in_time = [block for block in blocks if block <= timeout]
        needed = self._ceremony.dealings_needed
        if len(in_time) == self._ceremony.dealer_count:
            return in_time[-1]
        if self._block <= timeout:
            return None
        if len(in_time) >= needed:
            return timeout
        if len(blocks) >= needed:
            return blocks[needed - 1]
        return None


def _list_accounts(view: CommitteeView) -> list[str]:
    return [member.account for member in view.members]


def _find(account: str, accounts: Sequence[str]) -> int | None:
    return accounts.index(account) if account in accounts else None
