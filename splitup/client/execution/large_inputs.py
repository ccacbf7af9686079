"""Inputs too large for a frame: sent directly to their readers, and stored afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from splitup.core import tuning
from splitup.crypto.keys import Identity
from splitup.messages.base import CLIENT
from splitup.messages.plans import Request
from splitup.net.links import Link
from splitup.net.tensor_chunks import has_room, send_direct
from splitup.protocol.execution.storage_keys import LogName
from splitup.storage.log_store import LogObject, LogStore


class LargeInputs:
    """The large inputs of one execution, sent at most one step ahead of the store.

    The store sets the pace because nodes store the outputs of every step, too: with inputs far
    ahead of a slow store they would wait for it and be taken for failed. Chunks are sent to a
    reader once it has the plan; before that it would drop them.
    """

    def __init__(
        self, identity: Identity, request: Request, store: LogStore, direct_bytes: int
    ) -> None:
        """``direct_bytes`` is the most that may be queued for one reader."""
        self._identity = identity
        self._request = request
        self._store = store
        self._direct_bytes = direct_bytes
        self._is_stored = asyncio.Event()
        self._is_stored.set()
        self._announced: dict[str, asyncio.Event] = {}  # by node

    def mark_announced(self, node: str) -> None:
        """Note that a node has the plan, or will not get it from us."""
        self._find_announced(node).set()

    async def send(
        self, step: int, tensors: Mapping[int, bytes], readers: Mapping[int, Collection[Link]]
    ) -> dict[int, LogObject]:
        """Send a step's large inputs, by port, to their readers; return what is to be stored.

        Waits until the step before is stored.
        """
        await self._is_stored.wait()
        self._is_stored.clear()
        return {
            port: await self._send(port, step, tensors[port], readers[port]) for port in tensors
        }

    async def store(self, objects: Sequence[LogObject]) -> None:
        """Store what ``send`` returned. Raises StorageUnavailable, PeerFault, Refused."""
        try:
            await self._store.write(objects)
        finally:
            self._is_stored.set()

    async def _send(
        self, port: int, step: int, data: bytes, readers: Collection[Link]
    ) -> LogObject:
        await self._wait_ready(readers)
        links = [link for link in readers if has_room(link, len(data), self._direct_bytes)]
        execution_id = self._request.execution_id
        source = (CLIENT, port)
        digest, _ = await send_direct(self._identity, links, execution_id, source, step, data)
        name = LogName(CLIENT, port, self._request.client, step, apart=True)
        return LogObject(name, data, digest, len(data))

    async def _wait_ready(self, readers: Collection[Link]) -> None:
        """Wait for unconnected readers, at most as long as the way by the store would take."""
        try:
            async with asyncio.timeout(tuning.DIRECT_CONNECT_S):
                for link in readers:
                    await self._find_announced(link.peer).wait()
                    await link.connected.wait()
        except TimeoutError:
            return

    def _find_announced(self, node: str) -> asyncio.Event:
        return self._announced.setdefault(node, asyncio.Event())
