"""Messages between committee members: sending, and chunked transfer of large ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.codec import encode_canonical, parse_json
from splitup.core.errors import PeerFault, Refused, Unavailable
from splitup.core.latest import Latest
from splitup.core.places import FairLock
from splitup.messages import api
from splitup.net.chunked_messages import (
    ChunkedMessage,
    ChunkedMessages,
    fetch_chunked_message,
    unpack_chunked_message,
)
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import MemberView
from splitup.protocol.committee.commands import Gossip
from splitup.protocol.committee.events import Event, GossipReceived, MemberLost
from splitup.protocol.committee.peer_messages import (
    GossipMessage,
    count_nodes,
    encode_gossip,
    parse_gossip,
)

CHUNKED_MESSAGE_KIND: Final = "parcel"  # of gossip that is too large for one request

_MAX_OUTSTANDING: Final = 256  # messages per peer; one that does not answer must not fill memory

log = logging.getLogger("splitup.oracle")


@dataclass(slots=True)
class Peer:
    """Another member, and the state of our connection to it."""

    account: str
    signing_key: str
    endpoint: str
    is_up: bool = True
    outstanding: int = 0
    announced: dict[str, ChunkedMessage] = field(default_factory=dict)  # to be fetched, in order
    is_fetched_from: bool = False  # also while it rests, with nothing announced


class GossipTransport:
    """Sends and fetches gossip. ``feed`` takes our own events, ``feed_peer`` those of peers."""

    def __init__(
        self,
        http: SignedClient,
        background: BackgroundTasks,
        feed: Callable[[Event], None],
        feed_peer: Callable[[Event], None],
    ) -> None:
        self._http = http
        self._background = background
        self._feed = feed
        self._feed_peer = feed_peer
        self._peers: dict[str, Peer] = {}
        self.chunked_messages = ChunkedMessages()
        # large messages sent recently, by object identity: a repeated one is packed once
        self._packed: Latest[int, tuple[GossipMessage, ChunkedMessage]] = Latest(
            tuning.MAX_CHUNKED_MESSAGES
        )
        self._reading = FairLock()  # by sender
        self._fetched: Latest[tuple[str, str], None] = Latest(  # sender, digest
            limits.MAX_COMMITTEE * tuning.MAX_CHUNKED_MESSAGES
        )

    @property
    def peers(self) -> Iterable[Peer]:
        return self._peers.values()

    def set_peers(self, members: Iterable[MemberView]) -> None:
        """Take over the other members of our configurations; keep what is known of old ones."""
        old = self._peers
        self._peers = {}
        for member in members:
            known = old.get(member.account)
            if known is None or known.endpoint != member.endpoint:
                known = Peer(member.account, member.signing_key, member.endpoint)
            self._peers[member.account] = known

    # ---- sending ----------------------------------------------------------------------------

    def send(self, command: Gossip, accounts: list[str]) -> None:
        """Send a message to these members; a large one is announced, and they fetch it."""
        if count_nodes(command.message) > limits.CHUNKED_MESSAGE_NODES:
            self._background.start(self._announce(command, accounts))
            return
        body = encode_gossip(command.message, command.configuration)
        if accounts and len(encode_canonical(body)) > limits.GOSSIP_BYTES:
            self._background.start(self._announce(command, accounts))
        else:
            self._post_all(accounts, body)

    async def _announce(self, command: Gossip, accounts: list[str]) -> None:
        message = command.message
        known = self._packed.get(id(message))
        if known is None:
            body = encode_gossip(message, command.configuration)
            data = await asyncio.to_thread(encode_canonical, body)
            known = (message, await asyncio.to_thread(self.chunked_messages.offer, data))
            self._packed[id(message)] = known
        body = {
            "configuration": command.configuration,
            "kind": CHUNKED_MESSAGE_KIND,
            "message": known[1].model_dump(mode="json"),
        }
        self._post_all(accounts, body)

    def _post_all(self, accounts: list[str], body: dict[str, Any]) -> None:
        for account in accounts:
            peer = self._peers.get(account)
            if peer and peer.outstanding < _MAX_OUTSTANDING:
                peer.outstanding += 1
                self._background.start(self._post(peer, body))

    async def _post(self, peer: Peer, body: dict[str, Any]) -> None:
        try:
            await self._http.post_signed(api.GOSSIP, peer.endpoint, peer.account, body)
        except Unavailable as error:
            if peer.is_up:
                peer.is_up = False
                log.warning("member %s is down: %s", peer.account, error)
            self._feed(MemberLost(peer.account))
        except (PeerFault, Refused) as error:
            log.warning("member %s refused our %s: %s", peer.account, body["kind"], error)
        else:
            if not peer.is_up:
                peer.is_up = True
                log.info("member %s is back", peer.account)
        finally:
            peer.outstanding -= 1

    # ---- fetching ---------------------------------------------------------------------------

    def receive_chunked_message(self, account: str, chunked_message: ChunkedMessage) -> None:
        """Fetch a large message that a member announced, after those that it announced before.

        Lists of nodes, which members repeat every second, are fetched once. Other messages are
        repeated because an answer is missing, so each repetition is taken.
        """
        peer, digest = self._peers.get(account), chunked_message.packed_digest
        if peer is None or (account, digest) in self._fetched or digest in peer.announced:
            return
        if len(peer.announced) >= tuning.MAX_CHUNKED_MESSAGES:
            return  # it offers no more at once
        peer.announced[digest] = chunked_message
        if not peer.is_fetched_from:
            peer.is_fetched_from = True
            self._background.start(self._fetch_all(peer))

    async def _fetch_all(self, peer: Peer) -> None:
        try:
            while peer.announced:
                digest, chunked_message = next(iter(peer.announced.items()))
                spent_s = await self._fetch(peer, chunked_message)
                del peer.announced[digest]
                await asyncio.sleep(tuning.LARGE_MESSAGE_REST * spent_s)
        finally:
            peer.announced.clear()  # an error that nobody expected must not end all fetching
            peer.is_fetched_from = False

    async def _fetch(self, peer: Peer, chunked_message: ChunkedMessage) -> float:
        """Fetch and read a message; return how long reading took.

        A megabyte may unpack to a hundred, which take seconds and half a gigabyte to read.
        """
        started_s = ended_s = 0.0
        try:
            packed = await fetch_chunked_message(self._http, peer.endpoint, chunked_message)
            async with self._reading.hold(peer.account):
                started_s = time.monotonic()
                try:
                    read = asyncio.to_thread(_read, chunked_message, packed)
                    message, configuration = await read
                finally:
                    ended_s = time.monotonic()
            if count_nodes(message):
                self._fetched[peer.account, chunked_message.packed_digest] = None
            self._feed_peer(GossipReceived(peer.account, message, configuration))
        except (PeerFault, Refused, Unavailable) as error:
            log.warning("a large message of member %s was not accepted: %s", peer.account, error)
        return ended_s - started_s


def _read(chunked_message: ChunkedMessage, packed: bytes) -> tuple[GossipMessage, int]:
    """Unpack and parse what a chunked message holds: the body of a gossip request."""
    data = unpack_chunked_message(chunked_message, packed)
    try:
        body = parse_json(data, max_values=limits.MAX_DOCUMENT_VALUES)
    except (ValueError, RecursionError):
        raise PeerFault("a chunked message holds no JSON") from None
    if not isinstance(body, dict):
        raise PeerFault("a chunked message holds no gossip")
    return parse_gossip(body)
