"""Tensors too large for a frame, straight to their readers while the store takes its time.

The producer sends the bytes in pieces and then a signed frame with their digest. The reader hashes
them as they come. Nothing depends on it: pieces are sent once, to peers that keep up, and what does
not arrive whole, in order and with the right digest is fetched when the producer has stored it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from splitup import limits
from splitup.errors import PeerFault, SplitUpError
from splitup.frames import Piece
from splitup.net.links import Link, LinkPool
from splitup.net.relay import RELAY_PATH
from splitup.protocol.queue import PortId
from splitup_node.executions import Execution


def find_direct_links(
    pool: LinkPool, execution: Execution, targets: Iterable[str], nbytes: int, most_bytes: int
) -> list[Link]:
    """Return the links of readers that a tensor can go to directly.

    Not through a relay, whose bytes a second are few, not behind ``most_bytes`` that a peer has not
    taken yet, and not while the store is that far behind: it sets the pace then.
    """
    if execution.publishing_bytes > most_bytes:
        return []
    links = []
    for target in targets:
        node = execution.certificate.plan.node_of(target)
        if RELAY_PATH in node.endpoint:
            continue
        try:
            link = pool.open(node.node, node.endpoint)
        except SplitUpError:
            continue  # one that is gone is the client's business
        if link.connected.is_set() and link.bulk_bytes + nbytes <= most_bytes:
            links.append(link)
    return links


async def send_pieces(
    links: Sequence[Link], execution_id: str, source: PortId, step: int, data: bytes | memoryview
) -> None:
    """Send a tensor's bytes; a link that breaks meanwhile loses them."""
    for offset in range(0, len(data) if links else 0, limits.PIECE_BYTES):
        payload = data[offset : offset + limits.PIECE_BYTES]
        piece = Piece(execution_id, *source, step, len(data), offset, payload).encode()
        for link in links:
            link.send_bulk(piece)
        await asyncio.sleep(0)  # the first is on its way before the last is copied


@dataclass(slots=True)
class _Incoming:
    data: bytearray
    received: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class Pieces:
    """What is arriving at this node in pieces, ``limits.PIECES_BYTES`` at most."""

    def __init__(self) -> None:
        self._incoming: dict[str, dict[tuple[PortId, int], _Incoming]] = {}  # by execution
        self._bytes = 0

    def add(self, execution: Execution, sender: str, piece: Piece) -> None:
        """Take a piece from the peer with the Ed25519 key ``sender``.

        Raises PeerFault when nobody may send it here. One that does not follow on the last is
        ignored: the tensor will come from the store.
        """
        port = (piece.task, piece.port)
        if not execution.check_tensor(port, piece.length):
            return
        if sender != execution.roster.get_key(piece.task):
            if execution.roster.takeovers:
                return  # the executor was replaced
            raise PeerFault(f"{sender} sends pieces of task {piece.task} of {execution.id}")
        if piece.step >= execution.certificate.plan.request.steps:
            raise PeerFault(f"a piece of step {piece.step} of {execution.id}: nobody paid for it")
        incoming = self._find(execution.id, port, piece)
        if incoming is None or piece.offset != incoming.received:
            return
        incoming.data[piece.offset : piece.offset + len(piece.payload)] = piece.payload
        incoming.digest.update(piece.payload)
        incoming.received += len(piece.payload)

    def take(self, execution_id: str, port: PortId, step: int, digest: bytes) -> memoryview | None:
        """Return and forget a tensor when it is whole and has this SHA-256, else only forget it."""
        incoming = self._incoming.get(execution_id, {}).pop((port, step), None)
        if incoming is None:
            return None
        self._bytes -= len(incoming.data)
        if incoming.received < len(incoming.data) or incoming.digest.digest() != digest:
            return None
        return memoryview(incoming.data)

    def drop(self, execution_id: str) -> None:
        """Forget an execution."""
        for incoming in self._incoming.pop(execution_id, {}).values():
            self._bytes -= len(incoming.data)

    def _find(self, execution_id: str, port: PortId, piece: Piece) -> _Incoming | None:
        tensors = self._incoming.setdefault(execution_id, {})
        incoming = tensors.get((port, piece.step))
        if incoming is not None:
            return incoming if len(incoming.data) == piece.length else None
        if piece.offset or self._bytes + piece.length > limits.PIECES_BYTES:
            return None
        incoming = tensors[port, piece.step] = _Incoming(bytearray(piece.length))
        self._bytes += piece.length
        return incoming
