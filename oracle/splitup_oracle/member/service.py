"""Runs one committee member: start, the loops that give it events, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from splitup.chain.client import Chain
from splitup.chain.event_stream import ChainEvent
from splitup.chain.market import fetch_economics
from splitup.chain.rejections import explain_retirement
from splitup.core import limits, tuning
from splitup.core.background import cancel
from splitup.core.errors import ChainUnavailable, InvalidInput
from splitup.crypto.keystore import load_identity
from splitup.messages.network import Deployment
from splitup.net.http import SignedClient
from splitup.net.http_server import serve_app
from splitup.net.metrics import serve_metrics
from splitup.protocol.committee.commands import FetchManifest
from splitup.protocol.committee.events import (
    BlockSeen,
    BoardRead,
    EventReverted,
    NodesSeen,
    RequestSeen,
    SnapshotAccepted,
    Tick,
)
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.journal import Journal
from splitup_oracle.config import OracleConfig
from splitup_oracle.member.chain_events import make_board_event, make_event, make_node_record
from splitup_oracle.member.http_server import MemberServer
from splitup_oracle.member.metrics import list_readings
from splitup_oracle.member.shell import Member

_TICK_S: Final = 0.05  # a third of the shortest stage delay
_POLL_S: Final = 0.05  # between polls; a member that sees a request first wakes the others
_NODES_S: Final = 0.25  # at least between two readings of the registry
_CURSOR_S: Final = 10.0
_STAKES_S: Final = 10.0  # a snapshot may be three times as old
_RETRY_S: Final = 5.0  # before a failed request to the chain or the gateway is repeated
_MISSING_S: Final = 320.0  # at most between two requests for a manifest that no gateway has
_PAGE: Final = 100  # nodes per call
_PROBES_S: Final = 1.0  # between looks whether nodes are to be probed
_REST_PROBES_S: Final = 10.0  # the same while the member rests
_PROBES: Final = 32  # at once

_CURSOR: Final = "cursor"
_MODEL: Final = "model"  # journal kind: models registered before the cursor
_RETIRED: Final = "retired"  # journal kind: retired models, and where on the chain they were

log = logging.getLogger("splitup.oracle")


def list_latest(
    models: Iterable[tuple[str, Mapping[str, int]]], retired: Collection[str]
) -> list[str]:
    """Return the models whose manifests are fetched before an execution asks for them.

    Of more than are kept these are the latest, by their places on the chain, and leave room for
    those in use.
    """
    places = {model: place for model, place in models if model not in retired}
    most = tuning.MAX_MANIFESTS
    if len(places) > most:
        most //= 2
    names = ("block", "log_index")  # which journals of earlier versions have not
    return sorted(places, key=lambda m: [places[m].get(name, 0) for name in names])[-most:]


class Retries:
    """When to ask again for what was missing: each time after twice as long."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}  # until when, and how long

    def list_due(self, missing: Sequence[str], now: float) -> list[str]:
        """Return what is to be asked for now, of all that is missing."""
        pauses = {name: self._pauses.get(name, (now, _RETRY_S / 2)) for name in missing}
        due = [name for name, (until, _) in pauses.items() if now >= until]
        for name in due:
            pause_s = min(2 * pauses[name][1], _MISSING_S)
            pauses[name] = now + pause_s, pause_s
        self._pauses = pauses
        return due


def _get_place(event: ChainEvent) -> dict[str, int]:
    return {"block": event.block_number, "log_index": event.log_index}


class BoardReverted(ChainUnavailable):
    """A reorganisation took back what members posted, or a configuration of the committee."""


async def run_member(config: OracleConfig, stop: asyncio.Event) -> None:
    """Serve as a committee member until ``stop`` is set.

    Raises ConfigurationError for keys, files, ports and accounts that do not fit, ChainUnavailable
    when the chain cannot be reached at start or was reorganised too deeply.
    """
    while True:
        try:
            return await _serve(config, stop)
        except BoardReverted as error:  # what was signed is in the journal, all else on the chain
            log.warning("%s; reading the chain again", error)


async def _serve(config: OracleConfig, stop: asyncio.Event) -> None:
    identity = load_identity(config.keystore, config.passphrase_file)
    deployment = Deployment.load(config.deployment)
    config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        journal = stack.enter_context(Journal.open(config.data_dir))
        chain = await stack.enter_async_context(
            await Chain.connect(config.rpc_url, deployment, private_key=identity.private_key)
        )
        http = await stack.enter_async_context(SignedClient(identity))
        node_http = await stack.enter_async_context(
            SignedClient(allow_loopback=config.allow_loopback)
        )
        gateway = GatewayClient(config.gateway_urls, identity, http=http)
        parameters = await chain.call("market", "parameters")
        member = Member(
            identity,
            await fetch_economics(chain),
            chain,
            journal,
            http,
            node_http,
            gateway,
            data_dir=config.data_dir,
            kernel_cache=config.kernel_cache,
            grace_s=parameters["settlementGraceS"],
        )
        stack.push_async_callback(member.close)
        source = EventSource(member)
        await source.start()
        interface = MemberServer(member)
        server = await serve_app(interface.make_app(), config.listen_host, config.listen_port)
        stack.push_async_callback(server.close)
        stack.push_async_callback(interface.relay.close)
        await stack.enter_async_context(
            serve_metrics(config.metrics, lambda: list_readings(member.get_status()))
        )
        log.info("member %s serves on %s", member.account, server.url)
        await source.run(stop)
        log.info("member %s stops", member.account)


class EventSource:
    """The loops that give a member its events: chain, clock, key generation, probes."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._chain = member.chain
        self._journal = member.journal
        self._changes: list[tuple[int, int, int]] = []  # (block, log index, configuration)
        self._board_block = 0  # the board was read below this block
        self._open: dict[str, int] = {}  # unsettled executions -> block of the request
        self._seen_block = -1  # all events below this block were given
        self._nodes_changed = asyncio.Event()
        self._board_changed = asyncio.Event()
        self._models_changed = asyncio.Event()
        member.retired.update(model_id for model_id, _ in member.journal.items(_RETIRED))

    async def start(self) -> None:
        """Give the member what it must know before it processes peers' messages."""
        head = await self._chain.fetch_head()
        self._member.feed(BlockSeen(head.number, head.timestamp, head.hash))
        self._member.feed(SnapshotAccepted(0, 0, "0x" + "00" * 32))  # until the chain has one
        await self._read_board()
        if not self._member.machine.is_member:
            raise InvalidInput(
                f"account {self._member.account} is no member of committee configuration "
                f"{self._member.machine.current}, nor of an announced one; use a member's "
                "keystore, or have the network's owner appoint it: splitup-deploy network deploy"
            )
        await self._feed_nodes()

    async def run(self, stop: asyncio.Event) -> None:
        """Run all loops until ``stop`` is set or one fails; raise its error."""
        loops: list[Callable[[], Awaitable[None]]] = [
            self._follow_events,
            self._follow_head,
            self._tick,
            self._follow_nodes,
            self._follow_models,
            self._probe,
            self._follow_board,
            self._keep_cursor,
        ]
        tasks = [asyncio.ensure_future(loop()) for loop in loops]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {stopping, *tasks}
            while not stopping.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what ended a loop
        finally:
            await cancel(stopping, *tasks)
            self._store_cursor()

    # ---- the chain --------------------------------------------------------------------------

    async def _follow_events(self) -> None:
        cursor = self._journal.get(_CURSOR, "") or {"block": 0}
        async for event in self._chain.events(
            from_block=cursor["block"],
            poll_s=_POLL_S,
            get_least_s=self._member.get_poll_s,
            confirmations=self._chain.deployment.confirmations,
            wake=self._member.behind,
        ):
            self._feed_event(event)
            self._seen_block = event.block_number

    def _feed_event(self, event: ChainEvent) -> None:
        if event.contract == "committee":
            self._board_changed.set()
        if event.contract == "nodes":
            self._nodes_changed.set()
        elif event.name == "ModelRegistered":
            self._journal.put(_MODEL, event.args["modelId"], _get_place(event))
            self._models_changed.set()
        elif event.name == "ModelRetired":
            self._note_retirement(event)
        configuration = self._find_configuration(event)
        translated = make_event(event, self._chain.deployment, configuration)
        if event.removed:
            log.warning(
                "the chain was reorganised: %s in block %d is reverted; a higher setting of "
                "confirmations avoids that",
                event.name,
                event.block_number,
            )
            if event.block_number < self._board_block and make_board_event(event) is not None:
                self._seen_block = max(0, event.block_number - tuning.REORG_BLOCKS)
                raise BoardReverted(f"{event.name} in block {event.block_number} is reverted")
            if translated is not None:
                self._member.feed(EventReverted(translated))
            return
        if translated is not None:
            if isinstance(translated, RequestSeen):
                translated = self._refuse_retired(translated, event)
                self._open[translated.request.execution_id] = event.block_number
            self._member.feed(translated)

    def _note_retirement(self, event: ChainEvent) -> None:
        model_id = event.args["modelId"]
        if event.removed:
            self._journal.delete(_RETIRED, model_id)
            self._member.retired.discard(model_id)
        else:
            self._journal.put(_RETIRED, model_id, _get_place(event))
            self._member.retired.add(model_id)

    def _refuse_retired(self, seen: RequestSeen, event: ChainEvent) -> RequestSeen:
        """Mark a request that the chain holds behind the retirement of its model."""
        model_id = seen.request.model_id
        place = self._journal.get(_RETIRED, model_id)
        if place is None:
            return seen
        if (event.block_number, event.log_index) < (place["block"], place["log_index"]):
            return seen
        return replace(seen, refusal=explain_retirement(model_id))

    def _find_configuration(self, event: ChainEvent) -> int:
        """Return the configuration that was current at an event's position on the chain."""
        if event.name == "MembersSet":
            self._note_change(event)
        place = (event.block_number, event.log_index)
        return max((c for *at, c in self._changes if tuple(at) < place), default=0)

    def _note_change(self, event: ChainEvent) -> None:
        change = (event.block_number, event.log_index, event.args["configuration"])
        if event.removed:
            self._changes = [known for known in self._changes if known != change]
        elif change not in self._changes:
            self._changes.append(change)
            del self._changes[: -tuning.MAX_CHANGES]

    async def _follow_head(self) -> None:
        seen = ""
        while True:
            head = await self._chain.wait_for_head(seen)
            seen = head.hash
            self._member.feed(BlockSeen(head.number, head.timestamp, head.hash))

    async def _follow_nodes(self) -> None:
        while True:
            # locked stakes change without an event
            await self._wait(
                self._nodes_changed, tuning.REST_READ_S if self._rests() else _STAKES_S
            )
            self._nodes_changed.clear()
            try:
                await self._feed_nodes()
            except ChainUnavailable as error:
                log.warning("the registry cannot be read: %s", error)
                self._nodes_changed.set()
            await asyncio.sleep(_NODES_S)

    async def _feed_nodes(self) -> None:
        count = min(await self._chain.call("nodes", "nodeCount"), limits.MAX_NODES)
        pages = await asyncio.gather(
            *(self._chain.call("nodes", "nodesPage", i, _PAGE) for i in range(0, count, _PAGE))
        )
        records = [make_node_record(node) for page in pages for node in page if node["active"]]
        self._member.feed(NodesSeen(tuple(records)))

    async def _follow_models(self) -> None:
        """Fetch the manifests of registered models; retry while the gateway lacks one."""
        retries, machine = Retries(), self._member.machine
        while True:
            self._models_changed.clear()
            latest = list_latest(self._journal.items(_MODEL), self._member.retired)
            missing = [model_id for model_id in latest if not machine.has_manifest(model_id)]
            for model_id in retries.list_due(missing, time.monotonic()):
                self._member.carry_out([FetchManifest(model_id)])
            await self._wait(self._models_changed, _RETRY_S)

    async def _keep_cursor(self) -> None:
        while True:
            await asyncio.sleep(_CURSOR_S)
            self._store_cursor()

    def _store_cursor(self) -> None:
        """Store the block from which a restart must read: the oldest one of an open execution."""
        if self._seen_block < 0:
            return
        self._open = {
            execution_id: block
            for execution_id, block in self._open.items()
            if self._member.machine.is_open(execution_id)
        }
        block = min([self._seen_block, *self._open.values()])
        if self._journal.get(_CURSOR, "") != {"block": block}:
            self._journal.put(_CURSOR, "", {"block": block})

    # ---- the clock and the nodes ------------------------------------------------------------

    async def _tick(self) -> None:
        stirred = self._member.stirred
        while True:
            stirred.clear()
            self._member.feed(Tick())
            now = time.monotonic()
            left_s = self._member.machine.get_next_s(now) - now
            if left_s > _TICK_S:
                await self._wait(stirred, left_s)
            else:
                await asyncio.sleep(_TICK_S)

    def _rests(self) -> bool:
        return self._member.machine.is_resting(time.monotonic())

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                await event.wait()

    async def _probe(self) -> None:
        """Probe every node that sends heartbeats: at the first one, then every few seconds.

        When a rest ends all are probed: it asks them for heartbeats, and shows who is gone.
        """
        probed: dict[str, float] = {}
        gate = asyncio.Semaphore(_PROBES)

        async def probe(node: str, endpoint: str) -> None:
            async with gate:
                await self._member.probe(node, endpoint)

        while True:
            now = time.monotonic()
            heard = self._member.machine.list_heard(now)
            period_s = tuning.REST_RTT_PERIOD_S if self._rests() else tuning.RTT_PERIOD_S
            if self._member.woken:
                self._member.woken, period_s = False, 0.0
            targets = [
                (node, endpoint)
                for node, endpoint in heard
                if self._member.machine.is_unprobed(node)
                or now - probed.get(node, -math.inf) >= period_s
            ]
            probed = {node: probed.get(node, -math.inf) for node, _ in heard}
            probed.update({node: now for node, _ in targets})
            await asyncio.gather(*(probe(node, endpoint) for node, endpoint in targets))
            await self._wait(self._member.heard, _REST_PROBES_S if self._rests() else _PROBES_S)
            self._member.heard.clear()

    # ---- members and their keys -------------------------------------------------------------

    async def _follow_board(self) -> None:
        """Give the machine configurations and what members post to generate or hand over a key."""
        seen = ""
        while True:
            try:
                await self._read_board()
            except ChainUnavailable as error:
                log.warning("the committee's events cannot be read: %s", error)
                await asyncio.sleep(tuning.RPC_BACKOFF_MAX_S)
            if self._rests():  # nothing is posted, and no deadline in blocks runs
                await self._wait(self._board_changed, tuning.REST_READ_S)
            self._board_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    seen = (await self._chain.wait_for_head(seen)).hash

    async def _read_board(self) -> None:
        head = await self._chain.fetch_head()
        last = head.number - self._chain.deployment.confirmations
        if last < self._board_block:
            self._member.feed(BoardRead(last))
            return
        for event in await self._chain.fetch_events(
            "committee", from_block=self._board_block, last=last
        ):
            if event.name == "MembersSet":
                self._note_change(event)
            if event.name == "SnapshotAccepted":
                args = event.args
                self._member.feed(
                    SnapshotAccepted(args["configuration"], args["sequence"], args["root"])
                )
            posted = make_board_event(event)
            if posted is not None:
                self._member.feed(posted)
        self._board_block = last + 1
        self._member.feed(BoardRead(last))
