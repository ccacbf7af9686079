"""The running devnet: starts every process in order, watches them, stops them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.chain.client import Chain
from splitup.chain.deployment import MarketParameters
from splitup.chain.rpc import Rpc
from splitup.client.inputs import format_bytes
from splitup.core.background import run_until
from splitup.core.errors import ChainUnavailable, ConfigurationError, Unavailable
from splitup.core.event_loop import catch_signals
from splitup.devnet import files, funding
from splitup.devnet.anvil import build_command, find_anvil
from splitup.devnet.disk import describe_low
from splitup.devnet.processes import DevnetProcess, find_program, spawn
from splitup.devnet.restarts import Restarts
from splitup.devnet.s3_server import find_weed, start_object_server
from splitup.devnet.state import (
    DEFAULT_MEMBERS,
    GATEWAYS,
    OBJECTS,
    DevnetState,
    Lock,
    RunningProcess,
    Runtime,
    make_endpoint,
    read_runtime,
    write_runtime,
)
from splitup.devnet.status import NetworkHealth, fetch_health, read_load_problems
from splitup.net.http import SignedClient

CHAIN_TIMEOUT_S: Final = 60.0  # until its first answer, usually a tenth of a second
_QUIET_S: Final = 120.0  # in which not one more party got ready: then something is wrong
_PROBE_S: Final = 0.5  # while it starts: each look asks every party, which takes their time
_WATCH_S: Final = 1.0  # between looks whether all processes run
_DISK_PERIOD_S: Final = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DevnetOptions:
    """The options of ``splitup up``; None means the directory's value or else the default.

    ``parameters`` are the market's, used at the first start.
    """

    directory: Path
    nodes: int | None = None
    vram_bytes: int | None = None
    parameters: MarketParameters = funding.DEVNET_PARAMETERS
    members: int | None = None


DEFAULT_NODES: Final = 6
DEFAULT_VRAM_BYTES: Final = 10**9


class Devnet:
    """One network in one directory, run by this process.

    ``start`` and ``stop`` must be called from the main thread, whose end is the children's end.
    """

    def __init__(
        self, options: DevnetOptions, report: Report, report_progress: Report | None = None
    ) -> None:
        """``report_progress`` gets lines of which each replaces the one before."""
        self.directory = options.directory.absolute()
        self._options = options
        self._report = report
        self._report_progress = report_progress or report
        self._lock = Lock(self.directory)
        self._groups: list[list[DevnetProcess]] = []  # in the order they were started
        self._commands: dict[str, list[str | Path]] = {}  # of gateways, members and nodes, by name
        self._restarts = Restarts()
        self._ended: set[str] = set()  # processes whose end was reported
        self._is_disk_low = False
        self._told: set[str] = set()  # why tasks do not load

    @property
    def children(self) -> list[DevnetProcess]:
        return [child for group in self._groups for child in group]

    async def start(self) -> NetworkHealth:
        """Start or resume the network and return when it is ready to execute.

        Raises ConfigurationError (running already, port taken, damaged directory, missing
        program) and Unavailable (a party ended, with the end of its log, or the network is not
        ready in time). Whatever was started is stopped before an error leaves.
        """
        self._lock.acquire()
        try:
            self._check_disk()
            for find in (find_anvil, find_weed):
                find()  # what is missing is said before any key is made
            self._stop_leftovers()
            self._write_runtime(ready=False)
            state = self._prepare_state()
            return await self._start(state)
        except OSError as error:
            await self.stop()
            raise Unavailable(
                f"cannot use {error.filename or self.directory} ({error.strerror or error}); free "
                "some space, or check the disk"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def _start(self, state: DevnetState) -> NetworkHealth:
        directory = self.directory
        mnemonic = funding.load_mnemonic(directory)
        parties = funding.load_parties(directory, mnemonic, state)
        self._report("starting the chain and the object store")
        rpc_url = await self._start_chain(state, mnemonic)
        objects = start_object_server(directory / OBJECTS)
        self._add_group([objects])
        self._report("preparing contracts, funds and stakes")
        deployment = await funding.load_deployment(
            directory, rpc_url, parties.deployer, self._options.parameters
        )
        leaving = await funding.set_up_chain(rpc_url, deployment, parties, state)
        layout = files.DevnetLayout(directory, state, parties, rpc_url, objects)
        files.write_network_file(layout)
        self._report("starting the gateways, the committee and the nodes")
        self._spawn_group(
            [(f"gateway-{i}", files.write_gateway_file(layout, i)) for i in range(GATEWAYS)]
        )
        members = [(p.name, files.write_member_file(layout, p)) for p in parties.members]
        self._spawn_group(sorted(members))
        nodes = {p.name: files.write_node_file(layout, i) for i, p in enumerate(parties.nodes)}
        for name in leaving:
            self._report(
                f"{name} is leaving and is not started; to have it at the next start, run: "
                f"splitup-node unstake --cancel --config {nodes.pop(name)}"
            )
        self._spawn_group(list(nodes.items()))
        async with (
            await Chain.connect(rpc_url, deployment) as chain,
            SignedClient() as http,
        ):
            health = await self._wait_until_ready(chain, http, state)
        self._write_runtime(ready=True)
        return health

    async def watch(self, *, restart: bool) -> None:
        """Run until cancelled; raise Unavailable when the chain or the object store ends.

        Gateways, members and nodes that end are reported and, with ``restart``, started again
        after a pause that grows from 1 s to 60 s.
        """
        clock = asyncio.get_running_loop().time
        disk_due = clock() + _DISK_PERIOD_S
        while True:
            await asyncio.sleep(_WATCH_S)
            self._check_essential()
            for child in self.children:
                if not child.is_running():
                    self._process_end(child, clock(), restart=restart)
            for name in self._restarts.list_due(clock()):
                self._start_again(name)
                self._restarts.process_start(name, clock())
            if clock() >= disk_due:
                disk_due = clock() + _DISK_PERIOD_S
                self._check_disk()
                self.report_load_problems()

    def report_load_problems(self) -> None:
        """Say once for every reason that nodes refuse tasks."""
        for task_id, reasons in read_load_problems(self.directory).items():
            for reason, nodes in reasons.items():
                if reason not in self._told:
                    self._told.add(reason)
                    self._report(f"{nodes} nodes do not load task {task_id[:12]}: {reason}")

    def _process_end(self, child: DevnetProcess, now: float, *, restart: bool) -> None:
        """Report the end of a process once, and plan its restart."""
        if child.name in self._ended:
            return
        self._ended.add(child.name)
        if restart:
            pause_s = self._restarts.process_end(child.name, now)
            self._report(f"{child.describe_exit()}; starting it again in {pause_s:g} s")
        else:
            self._report(child.describe_end())

    def _start_again(self, name: str) -> None:
        self._ended.discard(name)
        child = spawn(name, self._commands[name], log=self._log(name))
        for group in self._groups:
            group[:] = [child if other.name == name else other for other in group]
        self._write_runtime(ready=True)

    def _check_disk(self) -> None:
        """Say once that the disk has little room left."""
        warning = describe_low(self.directory)
        if warning and not self._is_disk_low:
            self._report(warning)
        self._is_disk_low = bool(warning)

    async def stop(self) -> None:
        """Stop everything that was started, in reverse order, and release the directory."""
        for group in reversed(self._groups):
            for child in group:
                child.request_stop()
            await asyncio.gather(*(asyncio.to_thread(child.stop) for child in group))
        self._groups.clear()
        self._lock.release()

    # ---- starting ------------------------------------------------------------------------------

    def _prepare_state(self) -> DevnetState:
        options = self._options
        state = DevnetState.load(self.directory)
        if state is None:
            state = DevnetState.create(
                nodes=DEFAULT_NODES if options.nodes is None else options.nodes,
                vram_bytes=options.vram_bytes or DEFAULT_VRAM_BYTES,
                members=DEFAULT_MEMBERS if options.members is None else options.members,
            )
        elif options.members not in (None, state.members):
            raise ConfigurationError(
                f"the network in {self.directory} has {state.members} members, and that is fixed; "
                "leave out --members, or start another network with: splitup up --dir OTHER"
            )
        elif options.vram_bytes not in (None, state.vram_bytes):
            raise ConfigurationError(
                f"the nodes in {self.directory} have {format_bytes(state.vram_bytes)} of memory "
                "each, and that is fixed; leave out --vram, or start another network with: "
                "splitup up --dir OTHER"
            )
        elif options.nodes is not None and options.nodes != state.nodes:
            state = state.resize(options.nodes)
        state.check_ports(self.directory)
        state.save(self.directory)
        return state

    async def _start_chain(self, state: DevnetState, mnemonic: str) -> str:
        command = build_command(
            find_anvil(),
            state.chain_port,
            mnemonic=mnemonic,
            accounts=funding.count_accounts(state),
            state_file=self.directory / "chain-state.json",
            block_time_s=1,
            mixed_mining=False,
        )
        # Anvil makes a new first block at every start; an equal timestamp gives it an equal hash
        command += ["--timestamp", str(state.genesis_time_s)]
        child = spawn("chain", command, log=self._log("chain"))
        self._add_group([child])
        url = make_endpoint(state.chain_port)
        async with Rpc(url) as rpc, asyncio.timeout(CHAIN_TIMEOUT_S):
            while True:
                child.check_running()
                with contextlib.suppress(ChainUnavailable):
                    await rpc.request("anvil_setTime", int(time.time()))
                    return url
                await asyncio.sleep(0.02)

    def _spawn_group(self, parties: Sequence[tuple[str, Path]]) -> None:
        group: list[DevnetProcess] = []
        self._groups.append(group)
        for name, config in parties:
            program, verb = files.PROGRAMS[name.partition("-")[0]]
            self._commands[name] = [find_program(program), verb, "--config", config]
            group.append(spawn(name, self._commands[name], log=self._log(name)))
        self._write_runtime(ready=False)

    def _add_group(self, group: list[DevnetProcess]) -> None:
        self._groups.append(group)
        self._write_runtime(ready=False)

    async def _wait_until_ready(
        self, chain: Chain, http: SignedClient, state: DevnetState
    ) -> NetworkHealth:
        loop = asyncio.get_running_loop()
        ends, said = loop.time() + _QUIET_S, ""
        while True:
            for child in self.children:
                child.check_running()
            self._check_essential()
            health = await fetch_health(chain, http, state, self.directory)
            if (line := health.describe()) != said:
                ends, said = loop.time() + _QUIET_S, line
                self._report_progress(line)
            if health.is_ready():
                return health
            if loop.time() > ends:
                raise Unavailable(
                    f"the network does not get ready: {line}, and no change for {_QUIET_S:g} s; "
                    f"the logs are in {self.directory / 'logs'}"
                )
            await asyncio.sleep(_PROBE_S)

    def _check_essential(self) -> None:
        """Raise Unavailable when a part has ended without which nothing works."""
        for child in self.children:
            if child.name in ("chain", "objects"):
                child.check_running()

    def _stop_leftovers(self) -> None:
        """End the processes that a killed supervisor left, recognised by directory and name."""
        mark = os.fsencode(self.directory) + b"/"
        for process in read_runtime(self.directory).processes:
            command = Path(f"/proc/{process.pid}/cmdline")
            with contextlib.suppress(OSError):
                if mark in command.read_bytes():
                    ended = os.pidfd_open(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
                    # its memory goes first, and with it the command: only later its ports are free
                    select.select([ended], [], [])
                    os.close(ended)

    def _write_runtime(self, *, ready: bool) -> None:
        processes = [RunningProcess(c.name, c.pid, str(c.log)) for c in self.children]
        write_runtime(self.directory, Runtime(ready, tuple(processes), os.getpid()))

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"


async def run_devnet(
    options: DevnetOptions,
    report: Report,
    on_ready: Callable[[NetworkHealth], None],
    *,
    report_progress: Report | None = None,
    restart: bool = False,
) -> None:
    """Run a network until SIGINT or SIGTERM, then stop it cleanly; see ``Devnet.watch``."""
    stopping = asyncio.Event()
    net = Devnet(options, report, report_progress)
    with catch_signals(stopping):
        try:
            await run_until(stopping, _start_and_watch(net, on_ready, restart=restart))
        finally:
            if net.children:
                report("stopping")
            await net.stop()


async def _start_and_watch(
    net: Devnet, on_ready: Callable[[NetworkHealth], None], *, restart: bool
) -> None:
    on_ready(await net.start())
    await net.watch(restart=restart)
