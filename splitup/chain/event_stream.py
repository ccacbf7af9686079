"""The contracts' events in order, across failures of the node and reorganisations of the chain.

``Trail`` decides, without I/O, what was delivered, what a reorganisation reverted and what to read
next. ``Chain.events`` makes the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from splitup.chain.abi import CONTRACTS, load_abi
from splitup.chain.deployment import Deployment
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable


@dataclass(frozen=True, slots=True)
class ChainEvent:
    """One event of one contract. ``removed`` withdraws an event that a reorganisation reverted."""

    name: str
    args: Mapping[str, Any]
    block_number: int
    block_hash: str
    log_index: int
    transaction: str
    contract: str
    removed: bool = False


@dataclass(frozen=True, slots=True)
class BlockId:
    """A block by number and hash."""

    number: int
    hash: str


@dataclass(slots=True)
class _Seen:
    block: BlockId
    events: tuple[ChainEvent, ...]


class Trail:
    """The events that a subscriber was given, as far back as a reorganisation may reach.

    Every block with events is a checkpoint, and so is the last block of every range that was read.
    ``anchors`` are blocks before the first range, in ascending order, at least one.
    """

    def __init__(self, from_block: int, anchors: Sequence[BlockId]) -> None:
        self.next_block = from_block
        self._seen = deque(_Seen(anchor, ()) for anchor in anchors)

    @property
    def checkpoints(self) -> list[BlockId]:
        """Blocks whose hashes must still hold, the latest first."""
        return [seen.block for seen in reversed(self._seen)]

    def advance(self, block: BlockId, events: tuple[ChainEvent, ...]) -> None:
        """Note that all events up to ``block`` were given to the subscriber."""
        for key, group in groupby(events, lambda e: BlockId(e.block_number, e.block_hash)):
            self._seen.append(_Seen(key, tuple(group)))
        if self._seen[-1].block != block:
            self._seen.append(_Seen(block, ()))
        self.next_block = block.number + 1
        reach = block.number - tuning.REORG_BLOCKS
        while len(self._seen) > 1 and self._seen[1].block.number <= reach:
            self._seen.popleft()

    def rewind(self, ancestor: BlockId | None) -> tuple[ChainEvent, ...]:
        """Go back to ``ancestor``, the latest checkpoint still on chain; return what was reverted.

        The events are marked removed, the latest first. Raises ChainUnavailable when no checkpoint
        is on chain any more.
        """
        if ancestor is None:
            raise ChainUnavailable(
                f"the chain was reorganised by more than {tuning.REORG_BLOCKS} blocks, or is "
                "another chain; stop, and compare the RPC endpoint with a second one first"
            )
        removed: list[ChainEvent] = []
        while self._seen[-1].block != ancestor:
            seen = self._seen.pop()
            removed.extend(replace(event, removed=True) for event in reversed(seen.events))
        self.next_block = ancestor.number + 1
        return tuple(removed)


def decode_logs(
    deployment: Deployment, logs: Sequence[Mapping[str, Any]]
) -> tuple[ChainEvent, ...]:
    """Decode eth_getLogs' or a receipt's entries, in order; foreign ones are left out."""
    contracts = {deployment.get_address(name): name for name in CONTRACTS}
    events = []
    for entry in logs:
        contract = contracts.get(entry["address"].lower())
        if contract is None:
            continue
        decoded = load_abi(contract).decode_log(entry["topics"], bytes.fromhex(entry["data"][2:]))
        if decoded is None:
            continue
        events.append(
            ChainEvent(
                name=decoded[0],
                args=decoded[1],
                block_number=int(entry["blockNumber"], 16),
                block_hash=entry["blockHash"],
                log_index=int(entry["logIndex"], 16),
                transaction=entry["transactionHash"],
                contract=contract,
            )
        )
    return tuple(sorted(events, key=lambda event: (event.block_number, event.log_index)))
