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

from eth_abi.exceptions import DecodingError

from splitup.chain.abi import CONTRACTS, load_abi
from splitup.core import tuning
from splitup.core.errors import ChainUnavailable
from splitup.messages.network import Deployment


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


class BlockPace:
    """When to ask for the next block: seldom, until it is due by the pace of the last blocks.

    A node of Ethereum's that is asked twenty times a second for blocks that come every twelve
    seconds would refuse us soon. The shortest interval of the last eight blocks counts, so that a
    chain without a steady pace is asked often.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._intervals_s: deque[float] = deque(maxlen=8)
        self._last: tuple[int, float] | None = None

    def note_block(self, number: int, now_s: float) -> None:
        """Remember when a block was first seen; several at once count as evenly spaced."""
        if self._last is not None and number > self._last[0]:
            self._intervals_s.append((now_s - self._last[1]) / (number - self._last[0]))
        self._last = (number, now_s)

    def compute_pause(self, now_s: float) -> float:
        """Return the seconds to wait before the next question."""
        if self._last is None or not self._intervals_s:
            return self._poll_s
        interval_s = min(self._intervals_s)
        left_s = self._last[1] + interval_s - now_s
        early_s = left_s - min(tuning.BLOCK_EARLY * interval_s, tuning.BLOCK_EARLY_S)
        if early_s > self._poll_s:
            return min(early_s, tuning.BLOCK_POLL_MAX_S)
        return min(max(self._poll_s, -left_s / 4), tuning.BLOCK_LATE_POLL_S)


class LogRange:
    """How many blocks to ask for the logs of at once: as many as the endpoint answers.

    Providers cut off between 10 and 10,000 blocks, or by the number of logs, each with words of its
    own; some refuse for a while only. So any refusal makes ranges smaller, down to one block, and
    what was refused is tried again after many answers.
    """

    def __init__(self) -> None:
        self.blocks = tuning.LOG_RANGE_BLOCKS
        self._most = tuning.LOG_RANGE_MAX_BLOCKS
        self._answered = 0

    def note_answer(self) -> None:
        """Ask for more the next time."""
        self._answered += 1
        if self._answered % tuning.LOG_RANGE_MEMORY == 0:
            self._most = min(2 * self._most, tuning.LOG_RANGE_MAX_BLOCKS)
        self.blocks = min(2 * self.blocks, self._most)

    def note_refusal(self, blocks: int) -> bool:
        """Ask for fewer than ``blocks``; return whether that is possible."""
        self.blocks = self._most = max(1, blocks // 4)
        return blocks > 1


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
    """Decode eth_getLogs' or a receipt's entries, in order; foreign ones are left out.

    Raises ChainUnavailable for one that no contract of ours can have written.
    """
    contracts = {deployment.get_address(name): name for name in CONTRACTS}
    events = []
    for entry in logs:
        contract = contracts.get(entry["address"].lower())
        if contract is None:
            continue
        data = bytes.fromhex(entry["data"][2:])
        try:
            decoded = load_abi(contract).decode_log(entry["topics"], data)
        except DecodingError as error:
            raise ChainUnavailable(
                f"an event of contract {contract} is damaged ({error}); "
                "if that lasts, use another RPC endpoint"
            ) from None
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
