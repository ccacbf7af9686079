"""One account's view of SplitUp's contracts: call, send, follow events.

chain = await Chain.connect(rpc_url, deployment, private_key=key)
receipt = await chain.send("market", "deposit", 5_000_000)
async for event in chain.events(from_block=receipt.block_number): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from eth_abi.exceptions import DecodingError

from splitup.chain.abi import CONTRACTS, ContractName, load_abi
from splitup.chain.clock import ChainClock
from splitup.chain.event_stream import BlockId, BlockPace, ChainEvent, LogRange, Trail, decode_logs
from splitup.chain.rejections import explain_refusal
from splitup.chain.rpc import Rpc, RpcError
from splitup.core import tuning
from splitup.core.background import BackgroundTasks, Closing
from splitup.core.errors import ChainUnavailable, ConfigurationError, SplitUpError
from splitup.messages.network import Deployment

if TYPE_CHECKING:
    from splitup.chain.sender import Sender, Submitted

log = logging.getLogger(__name__)
T = TypeVar("T")

# USDC is not followed: it logs every transfer in the world, and ours have events of our own.
_FOLLOWED: Final[tuple[ContractName, ...]] = ("committee", "nodes", "models", "market")


@dataclass(frozen=True, slots=True)
class TransactionReceipt:
    """The result of a transaction. Without waiting, only its hash is known."""

    transaction: str
    block_number: int | None = None
    block_hash: str | None = None
    gas_used: int | None = None
    events: tuple[ChainEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block; the time of the latest one is the clock of all deadlines (Unix seconds)."""

    number: int
    hash: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class _Told:
    block: BlockId
    events: tuple[ChainEvent, ...]
    is_latest: bool  # there were no further blocks to read


@dataclass(frozen=True, slots=True)
class _Forked:
    ancestor: BlockId | None


class _BlockUnknown(ChainUnavailable):
    """Whoever answered does not have a block that others had."""


class Chain(Closing):
    """A connection to one deployment, as one account or, without a key, as a reader."""

    def __init__(self, rpc: Rpc, deployment: Deployment, sender: Sender | None) -> None:
        """Use ``connect``, which checks that the chain is the right one."""
        self.deployment = deployment
        self.clock = ChainClock()
        self._highest = 0  # block that ``fetch_head`` has returned
        self._head: ChainBlock | None = None
        self._head_changed = asyncio.Event()
        self._rpc = rpc
        self._log_range = LogRange()
        self._sender = sender
        self._background = BackgroundTasks()
        self._guard: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        rpc_url: str,
        deployment: Deployment,
        *,
        private_key: bytes | None = None,
        fee_ceiling_wei: int = tuning.FEE_CEILING_WEI,
    ) -> Self:
        """Connect, and check that the endpoint serves exactly this deployment.

        Raises ChainUnavailable when it does not answer, or serves another chain.
        """
        rpc = Rpc(rpc_url)
        try:
            await _check_deployment(rpc, deployment)
            sender = None
            if private_key is not None:
                from splitup.chain.sender import Sender  # at use: who reads signs nothing

                sender = Sender(
                    rpc, deployment.chain_id, private_key, fee_ceiling_wei=fee_ceiling_wei
                )
        except BaseException:
            await rpc.close()
            raise
        return cls(rpc, deployment, sender)

    async def close(self) -> None:
        """Stop following and guarding transactions, and close the connections."""
        await self._background.close()
        await self._rpc.close()

    @property
    def address(self) -> str:
        """The account that signs, lower-case."""
        address: str = self._get_sender().address
        return address

    # ---- calls ---------------------------------------------------------------------------------

    async def call(
        self, contract: ContractName, function: str, *args: Any, at: ChainBlock | None = None
    ) -> Any:
        """Return a view's value at the chain's head, or ``at`` a block.

        Structs, and several named results, are dictionaries. Values that have to be consistent
        are read at one block: an endpoint that does not know it fails instead of answering from
        an older one (EIP-1898). Raises InvalidInput for arguments that do not fit, ChainRejected,
        ChainUnavailable.
        """
        abi = load_abi(contract)
        request = {
            "to": self.deployment.get_address(contract),
            "data": abi.encode_call(function, args),
        }
        if self._sender is not None:
            request["from"] = self._sender.address
        try:
            where = "latest" if at is None else {"blockHash": at.hash}
            data = await self._rpc.request("eth_call", request, where)
        except RpcError as error:
            raise explain_refusal(f"{contract}.{function}", error) from None
        try:
            return abi.decode_result(function, bytes.fromhex(data[2:]))
        except DecodingError as error:  # it may have no contract there yet, and says "0x"
            raise ChainUnavailable(
                f"the chain at {self._rpc.place} answers {contract}.{function} with something else "
                f"than its result ({error}); try again, or use another RPC endpoint"
            ) from None

    def count_requests(self) -> int:
        """Return how many requests the endpoint has got on this connection."""
        return self._rpc.requests

    async def fetch_head(self) -> ChainBlock:
        """Return the chain's latest block, never a lower one than before.

        Raises ChainUnavailable, also when the endpoint stays behind a block that it, or another
        server behind the same URL, has returned before.
        """
        pause_s = tuning.RPC_BACKOFF_S
        for _ in range(tuning.RPC_TRIES):
            block = await self._fetch_block("latest")
            number = int(block["number"], 16)
            if number >= self._highest:
                self._highest = number
                return _make_block(block)
            await asyncio.sleep(pause_s)
            pause_s *= 2
        raise ChainUnavailable(
            f"the chain at {self._rpc.place} shows block {number} after block {self._highest}: it "
            "lags behind; wait, or use another RPC endpoint"
        )

    async def wait_for_head(self, seen: str) -> ChainBlock:
        """Return the latest block when its hash is another one than ``seen``, also after a reorg.

        It waits for what others ask on this connection: somebody has to follow ``events``.
        """
        while self._head is None or self._head.hash == seen:
            await self._head_changed.wait()
        return self._head

    async def fetch_ether_wei(self, account: str) -> int:
        """Return an account's ether, which pays for gas."""
        return int(await self._rpc.request("eth_getBalance", account, "latest"), 16)

    # ---- transactions --------------------------------------------------------------------------

    async def send(
        self, contract: ContractName, function: str, *args: Any, wait: bool = True
    ) -> TransactionReceipt:
        """Simulate, sign, send, and wait until the transaction is mined.

        Without ``wait`` the transaction is followed, and sent again if need be, in the background;
        a failure is logged. Raises InvalidInput, ChainRejected (with the contract's error, decoded)
        and ChainUnavailable.
        """
        sender = self._get_sender()
        data = load_abi(contract).encode_call(function, args)
        to = self.deployment.get_address(contract)
        submitted = await sender.submit(f"{contract}.{function}", to, data)
        if self._guard is None:
            self._guard = self._background.start(sender.guard())
        if wait:
            return self._make_receipt(await sender.wait(submitted))
        self._background.start(self._follow(sender, submitted))
        return TransactionReceipt(submitted.hashes[-1])

    async def _follow(self, sender: Sender, submitted: Submitted) -> None:
        try:
            await sender.wait(submitted)
        except SplitUpError as error:
            log.error("%s", error)

    def _make_receipt(self, raw: Mapping[str, Any]) -> TransactionReceipt:
        return TransactionReceipt(
            transaction=raw["transactionHash"],
            block_number=int(raw["blockNumber"], 16),
            block_hash=raw["blockHash"],
            gas_used=int(raw["gasUsed"], 16),
            events=decode_logs(self.deployment, raw["logs"]),
        )

    def _get_sender(self) -> Sender:
        if self._sender is None:
            raise ConfigurationError("this connection has no key; pass one to sign transactions")
        return self._sender

    # ---- events --------------------------------------------------------------------------------

    async def events(
        self,
        *,
        from_block: int,
        poll_s: float = 0.05,
        confirmations: int = 0,
        wake: asyncio.Event | None = None,
        get_least_s: Callable[[], float] = lambda: 0.0,
    ) -> AsyncGenerator[ChainEvent, None]:
        """Yield the events of committee, nodes, models and market, in order, without end.

        Failures of the RPC node are waited out. A reorganisation yields the reverted events
        again, ``removed``, and then the new ones; an event may come twice, but is never missed.
        Only blocks with ``confirmations`` blocks above them are read. ``poll_s`` is the pause
        between looks for a block that is due; ``get_least_s`` returns what no pause is below, for
        whom a block may be late. Setting ``wake`` makes it look at once. Raises
        ChainUnavailable when the chain was reorganised deeper than ``tuning.REORG_BLOCKS``.
        """
        trail: Trail | None = None
        from_block = max(from_block, self.deployment.first_block)
        pace = BlockPace(poll_s)
        pause_s = tuning.RPC_BACKOFF_S
        while True:
            try:
                if trail is None:
                    trail = Trail(from_block, await self._fetch_anchors(from_block))
                news = await self._look(trail, confirmations)
            except ChainUnavailable as error:
                log.warning("waiting for the chain to follow its events: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, tuning.RPC_BACKOFF_MAX_S)
                continue
            pause_s = tuning.RPC_BACKOFF_S
            if news is None:
                await _pause(max(pace.compute_pause(time.monotonic()), get_least_s()), wake)
            elif isinstance(news, _Forked):
                for event in trail.rewind(news.ancestor):
                    yield event
            else:
                trail.advance(news.block, news.events)
                pace.note_block(news.block.number, time.monotonic())
                for event in news.events:
                    yield event
                if news.is_latest and (least_s := get_least_s()):
                    await _pause(least_s, wake)

    async def fetch_events(
        self, contract: ContractName, *, from_block: int = 0, last: int | None = None
    ) -> tuple[ChainEvent, ...]:
        """Return one contract's events in order, up to a block or to the head.

        Asks for more blocks at once as long as the endpoint answers. Raises ChainUnavailable.
        """
        if last is None:
            last = (await self.fetch_head()).number
        addresses = [self.deployment.get_address(contract)]
        start = max(from_block, self.deployment.first_block)
        found: list[ChainEvent] = []
        while start <= last:
            told = await self._fetch_logs(addresses, start, last)
            found += told.events
            start = told.block.number + 1
        return tuple(found)

    async def holds(self, block: BlockId) -> bool:
        """Return whether a block is on the chain; raise ChainUnavailable."""
        found = await self._rpc.request("eth_getBlockByNumber", hex(block.number), False)
        return found is not None and found["hash"] == block.hash

    async def fetch_timestamp(self, block_hash: str) -> int | None:
        """Return a block's time (Unix seconds), None when the endpoint does not know the block.

        Raises ChainUnavailable.
        """
        block = await self._rpc.request("eth_getBlockByHash", block_hash, False)
        return None if block is None else int(block["timestamp"], 16)

    async def fetch_gas(self, transaction: str) -> int | None:
        """Return the gas that a transaction used, None while no block holds it."""
        receipt = await self._rpc.request("eth_getTransactionReceipt", transaction)
        return None if receipt is None else int(receipt["gasUsed"], 16)

    async def find_block(self, time_s: int) -> int:
        """Return the number of the first block at or after a time (Unix seconds).

        That is the block behind the head when all are earlier. Raises ChainUnavailable.
        """
        low, high = 0, int((await self._fetch_block("latest"))["number"], 16) + 1
        while low < high:
            middle = (low + high) // 2
            block = await self._fetch_block(hex(middle))
            if int(block["timestamp"], 16) < time_s:
                low = middle + 1
            else:
                high = middle
        return low

    async def _look(self, trail: Trail, confirmations: int) -> _Told | _Forked | None:
        """Read the next range of blocks; None when there is no new one."""
        last = trail.checkpoints[0]
        head = await self._fetch_block("latest")
        head_id = BlockId(int(head["number"], 16), head["hash"])
        if head_id == last or head_id.number < last.number:
            return None  # a lower head comes from an endpoint that lags behind: ignore it
        if head["parentHash"] != last.hash and not await self._is_still_there(last):
            return _Forked(await self._find_ancestor(trail))
        latest = head_id.number - confirmations
        end = min(latest, trail.next_block + tuning.LOG_RANGE_BLOCKS - 1)
        if end < trail.next_block:
            return None
        addresses = [self.deployment.get_address(name) for name in _FOLLOWED]
        told = await self._fetch_logs(addresses, trail.next_block, end)
        if told.block.number == head_id.number:
            is_ours = told.block.hash == head_id.hash
        else:
            is_ours = await self._is_still_there(last)
        if not is_ours:
            return None  # reorganised meanwhile: ask again, and find out where it forked
        return _Told(told.block, told.events, told.block.number == latest)

    async def _fetch_logs(self, addresses: Sequence[str], first: int, last: int) -> _Told:
        """Return the events of some contracts in a range that begins with ``first``.

        It ends with a block that whoever gave the logs has: an endpoint may have several backends,
        and one that lags behind answers [] for blocks that it does not have yet. Ranges shrink to
        what is answered. Raises ChainUnavailable.
        """
        while True:
            end = min(last, first + self._log_range.blocks - 1)
            try:
                block, logs = await _ask_again(partial(self._ask_for_logs, addresses, first, end))
            except ChainUnavailable as error:
                is_large = end - first >= tuning.LOG_RANGE_BLOCKS  # it may have been too slow
                if not isinstance(error, RpcError) and not is_large:
                    raise
                if self._log_range.note_refusal(end - first + 1):
                    continue
                block, logs = await _ask_again(partial(self._ask_by_hash, addresses, first))
            else:
                self._log_range.note_answer()
            return _Told(block, decode_logs(self.deployment, logs), end == last)

    async def _ask_for_logs(
        self, addresses: Sequence[str], first: int, end: int
    ) -> tuple[BlockId, Sequence[Mapping[str, Any]]]:
        where = {"address": addresses, "fromBlock": hex(first), "toBlock": hex(end)}
        found, logs = await self._rpc.request_all(
            ("eth_getBlockByNumber", [hex(end), False]), ("eth_getLogs", [where])
        )
        return BlockId(end, self._check_known(found, end)["hash"]), logs

    async def _ask_by_hash(
        self, addresses: Sequence[str], number: int
    ) -> tuple[BlockId, Sequence[Mapping[str, Any]]]:
        """Ask for one block where batches are not answered: a backend without it has to fail."""
        block = await self._fetch_block(hex(number))
        where = {"address": addresses, "blockHash": block["hash"]}
        try:
            return BlockId(number, block["hash"]), await self._rpc.request("eth_getLogs", where)
        except RpcError as error:
            raise _BlockUnknown(f"the chain at {self._rpc.place} has no logs: {error}") from None

    async def _is_still_there(self, block: BlockId) -> bool:
        """Return whether the chain still has a block; a backend that lags behind does not know."""
        found = await _ask_again(partial(self._fetch_block, hex(block.number)))
        return bool(found["hash"] == block.hash)

    async def _find_ancestor(self, trail: Trail) -> BlockId | None:
        for checkpoint in trail.checkpoints:
            if await self._is_still_there(checkpoint):
                return checkpoint
        return None

    async def _fetch_anchors(self, from_block: int) -> list[BlockId]:
        """Return two blocks before ``from_block``, one as far back as a reorganisation reaches."""
        head = await self.fetch_head()
        near = max(0, min(from_block - 1, head.number))
        numbers = sorted({max(0, near - tuning.REORG_BLOCKS), near})
        blocks = [await self._fetch_block(hex(number)) for number in numbers]
        return [BlockId(int(block["number"], 16), block["hash"]) for block in blocks]

    async def _fetch_block(self, which: str) -> Mapping[str, Any]:
        block: Mapping[str, Any] | None = await self._rpc.request(
            "eth_getBlockByNumber", which, False
        )
        known = self._check_known(block, which)
        if which == "latest":
            self._note_head(_make_block(known))
        return known

    def _check_known(self, block: Mapping[str, Any] | None, which: str | int) -> Mapping[str, Any]:
        if block is None:
            raise _BlockUnknown(f"the chain at {self._rpc.place} does not know block {which} yet")
        return block

    def _note_head(self, head: ChainBlock) -> None:
        self.clock.observe(head.number, head.timestamp)
        known = self._head
        if known is None or (head.number >= known.number and head.hash != known.hash):
            self._head = head
            self._head_changed.set()
            self._head_changed = asyncio.Event()


async def _ask_again(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while a backend answers that does not have the block; the next may be another."""
    for attempt in range(tuning.RPC_TRIES - 1):
        with contextlib.suppress(_BlockUnknown):
            return await ask()
        await asyncio.sleep(tuning.RPC_BACKOFF_S * 2**attempt)
    return await ask()


def _make_block(block: Mapping[str, Any]) -> ChainBlock:
    return ChainBlock(int(block["number"], 16), block["hash"], int(block["timestamp"], 16))


async def _pause(seconds: float, wake: asyncio.Event | None) -> None:
    if wake is None:
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
    wake.clear()


async def _check_deployment(rpc: Rpc, deployment: Deployment) -> None:
    addresses = [deployment.get_address(name) for name in CONTRACTS]
    try:
        chain_id, genesis, *codes = await asyncio.gather(
            rpc.request("eth_chainId"),
            rpc.request("eth_getBlockByNumber", "0x0", False),
            *(rpc.request("eth_getCode", address, "latest") for address in addresses),
        )
    except RpcError as error:
        raise ChainUnavailable(f"{rpc.place} is no Ethereum node: {error}") from None
    problem = None
    if int(chain_id, 16) != deployment.chain_id:
        problem = f"it is chain {int(chain_id, 16)}, not {deployment.chain_id}"
    elif genesis is None or genesis["hash"] != deployment.genesis_hash:
        problem = "its first block is another one"
    else:
        missing = [name for name, code in zip(CONTRACTS, codes, strict=True) if code == "0x"]
        if missing:
            problem = f"it has no {missing[0]} contract at {deployment.get_address(missing[0])}"
    if problem is not None:
        raise ChainUnavailable(
            f"the chain at {rpc.place} does not hold this deployment ({problem}): the deployment "
            "file is outdated; use that of the network that runs now, or start one with: "
            "splitup up"
        )
