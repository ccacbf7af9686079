"""``splitup up``, ``down``, ``status``, ``fund``: a network from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from splitup.chain.client import Chain
from splitup.config import NETWORK_FILE, NetworkConfig
from splitup.core.errors import ConfigurationError, InvalidInput, SplitUpError, Unavailable
from splitup.core.files import find_holder, follow_no_link
from splitup.devnet.processes import read_tail
from splitup.devnet.state import (
    DevnetState,
    get_key_files,
    is_ready,
    make_directory,
    read_runtime,
)
from splitup.devnet.status import NetworkHealth, fetch_health
from splitup.messages.network import Deployment
from splitup.net.http import SignedClient

if TYPE_CHECKING:  # which only those who start a network need
    from splitup.devnet.network import DevnetOptions

_STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class NetworkStatus:
    """The data of ``splitup status``; ``health`` is None when the chain does not answer."""

    directory: Path
    supervisor: int | None
    processes: tuple[tuple[str, int, bool], ...]  # name, process id, whether it runs
    health: NetworkHealth | None
    problem: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        rows = [{"name": n, "pid": pid, "running": up} for n, pid, up in self.processes]
        return {
            "directory": str(self.directory),
            "running": self.supervisor is not None,
            "supervisor": self.supervisor,
            "processes": rows,
            "problem": self.problem,
            **({} if self.health is None else self.health.to_dict()),
        }


def up(options: DevnetOptions, say: Callable[[str], None], update: Callable[[str], None]) -> None:
    """Run a network in the foreground until Ctrl-C or ``splitup down``.

    ``update`` gets lines of progress, of which each replaces the one before. Raises
    KeyboardInterrupt when it was stopped before it was ready.
    """
    from splitup.devnet.network import run_devnet

    is_up = False

    def greet(health: NetworkHealth) -> None:
        nonlocal is_up
        is_up = True
        say(f"ready: {health.describe()}")
        say(
            f"the network runs in {options.directory}; stop it with Ctrl-C, or in another terminal "
            f"with: splitup down --dir {options.directory.absolute()}"
        )

    asyncio.run(run_devnet(options, say, greet, report_progress=update, restart=True))
    if not is_up:
        raise KeyboardInterrupt


def up_detached(
    options: DevnetOptions, say: Callable[[str], None], update: Callable[[str], None]
) -> None:
    """Start a network in the background and return when it is ready.

    ``update`` gets what its supervisor says meanwhile. Raises ConfigurationError as
    ``Devnet.start``, and Unavailable, with the end of the supervisor's log, when it does not come
    up.
    """
    directory = options.directory.absolute()
    if (pid := find_holder(directory)) is not None:
        raise ConfigurationError(
            f"the network in {directory} is running already (process {pid}); "
            f"stop it with: splitup down --dir {directory}"
        )
    log = directory / "logs" / "supervisor.log"
    make_directory(log.parent)
    command = [sys.executable, "-m", "splitup.cli.app", "up", "--dir", str(directory)]
    command += [] if options.nodes is None else ["--nodes", str(options.nodes)]
    command += [] if options.members is None else ["--members", str(options.members)]
    command += [] if options.vram_bytes is None else ["--vram", str(options.vram_bytes)]
    start = log.stat().st_size if log.exists() else 0
    with open(log, "ab", opener=follow_no_link) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    while not is_ready(directory, process.pid):  # it ends when it makes no progress
        if process.poll() is not None:
            said = read_tail(log, start=start)
            mistake = said.rpartition("error: ")[2] if process.returncode == 2 else ""
            if mistake:  # a message that names its remedy
                raise ConfigurationError(mistake)
            raise Unavailable(f"the network did not start:\n{said}")
        if log.stat().st_size > start:
            update(read_tail(log, 1, start=start).strip())
        time.sleep(_POLL_S)
    say(f"ready; the network runs in {directory}; stop it with: splitup down --dir {directory}")


def down(directory: Path, say: Callable[[str], None]) -> None:
    """Stop the network of a directory and wait until everything has ended."""
    directory = directory.absolute()
    pid = find_holder(directory)
    if pid is None:
        raise ConfigurationError(
            f"no network runs in {directory}; if yours is elsewhere, name it with --dir"
        )
    os.kill(pid, signal.SIGTERM)
    ends = time.monotonic() + _STOP_TIMEOUT_S
    while find_holder(directory) == pid:
        if time.monotonic() > ends:
            raise Unavailable(
                f"the supervisor (process {pid}) did not stop within {_STOP_TIMEOUT_S:g} s; "
                f"end it with: kill -9 {pid}"
            )
        time.sleep(_POLL_S)
    say(
        f"stopped; chain, objects and keys are kept in {directory}; resume with: "
        f"splitup up --dir {directory}"
    )


def fund(directory: Path, account: str, micro_usdc: int) -> None:
    """Give an account test money of the network in a directory, which has to run.

    Raises ConfigurationError when there is none, InvalidInput when ``account`` is no address.
    """
    from splitup.crypto.keystore import load_identity
    from splitup.devnet import funding  # at use: other commands send nothing

    directory = directory.absolute()
    if not re.fullmatch("0x[0-9a-fA-F]{40}", account):
        raise InvalidInput(f"{account} is no address; give 0x and 40 hexadecimal digits")
    if find_holder(directory) is None:
        raise ConfigurationError(
            f"no network of 'splitup up' runs in {directory}; name its directory with --dir, "
            f"or start it with: splitup up --dir {directory}"
        )
    config = NetworkConfig.load(directory / NETWORK_FILE)
    deployer = load_identity(*get_key_files(directory, funding.DEPLOYER))
    deployment = Deployment.load(config.deployment)
    asyncio.run(
        funding.give_money(config.rpc_url, deployment, deployer, account.lower(), micro_usdc)
    )


def fetch_status(directory: Path) -> NetworkStatus:
    """Return the state of a network; raise ConfigurationError when the directory holds none."""
    directory = directory.absolute()
    state = DevnetState.load(directory)
    if state is None:
        raise ConfigurationError(
            f"there is no network in {directory}; start one with: splitup up --dir {directory}"
        )
    health, problem = None, ""
    try:
        config = NetworkConfig.load(directory / NETWORK_FILE)
        health = asyncio.run(_fetch_health(config, state, directory))
    except SplitUpError as error:
        problem = str(error)
    processes = tuple(
        (process.name, process.pid, _is_alive(process.pid))
        for process in read_runtime(directory).processes
    )
    return NetworkStatus(directory, find_holder(directory), processes, health, problem)


async def _fetch_health(
    config: NetworkConfig, state: DevnetState, directory: Path
) -> NetworkHealth:
    deployment = Deployment.load(config.deployment)
    async with await Chain.connect(config.rpc_url, deployment) as chain, SignedClient() as http:
        return await fetch_health(chain, http, state, directory)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False
