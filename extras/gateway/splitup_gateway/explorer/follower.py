"""Keeps the index at the chain's head: reads events, writes them in batches."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from splitup.chain.client import Chain
from splitup.chain.event_stream import ChainEvent
from splitup.core import tuning
from splitup.core.errors import Unavailable
from splitup_gateway.explorer.event_index import EventIndex

_log = logging.getLogger("splitup_gateway.explorer")

POLL_S: Final = 0.5
MOST_WAITING: Final = 2_000  # events that were read and not written yet
PAUSE_S: Final = 5.0  # after the database failed


class Follower:
    """Follows one chain into one index until it is cancelled."""

    def __init__(self, chain: Chain, index: EventIndex) -> None:
        self._chain = chain
        self._index = index

    async def run(self) -> None:
        """Follow without end; after a failure begin again, where the index ends."""
        while True:
            try:
                await self._follow(await self._find_start())
            except Unavailable as error:
                _log.warning("%s", error)
            except Exception:  # the server that runs this has other work, which goes on
                _log.exception("the explorer's index stopped; beginning again")
            await asyncio.sleep(PAUSE_S)

    async def _find_start(self) -> int:
        """Return the block to go on with.

        The last blocks are read again, since they may have been reverted while nobody followed. If
        an older one has been, everything is read again.
        """
        last = await asyncio.to_thread(self._index.find_last_block)
        if last is None:
            return 0
        start = max(0, last.number - tuning.REORG_BLOCKS)
        older = await asyncio.to_thread(self._index.find_last_block, before=start)
        if older is None or not await self._chain.holds(older):
            start = 0
        await asyncio.to_thread(self._index.delete_from, start)
        return start

    async def _follow(self, start: int) -> None:
        """Write what is read; raise ChainUnavailable when the chain was reorganised too deeply."""
        waiting: asyncio.Queue[ChainEvent | Exception] = asyncio.Queue(MOST_WAITING)
        reading = asyncio.create_task(self._read(start, waiting))
        try:
            while True:
                items = [await waiting.get()]
                while not waiting.empty():
                    items.append(waiting.get_nowait())
                batch = [item for item in items if isinstance(item, ChainEvent)]
                await asyncio.to_thread(self._index.apply, batch)
                for item in items:
                    if isinstance(item, Exception):
                        raise item
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, start: int, waiting: asyncio.Queue[ChainEvent | Exception]) -> None:
        try:
            async for event in self._chain.events(from_block=start, poll_s=POLL_S):
                await waiting.put(event)
        except Exception as error:  # raised again by who writes
            await waiting.put(error)
