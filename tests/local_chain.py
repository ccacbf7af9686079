"""A chain for tests: Anvil while a context lasts, and a hash that the Market contract keeps."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.chain.rpc import Rpc
from splitup.core.errors import ChainUnavailable, ConfigurationError, Unavailable
from splitup.devnet.anvil import CHAIN_ID, build_command, find_anvil

START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 10.0
_BLOCKS_AT_ONCE: Final = 50


@dataclass(frozen=True, slots=True)
class Anvil:
    """A running chain."""

    process: asyncio.subprocess.Process
    url: str
    port: int

    async def stop(self) -> None:
        """Send SIGTERM, upon which Anvil saves its state; kill it when it does not end in time."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


async def wait_until_ready(
    port: int, process: asyncio.subprocess.Process, timeout_s: float = START_TIMEOUT_S
) -> str:
    """Return the RPC URL once the chain answers; raise ChainUnavailable if it ends or hangs."""
    url = f"http://127.0.0.1:{port}"
    async with Rpc(url) as rpc:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while process.returncode is None:
            with contextlib.suppress(Unavailable):
                if int(await rpc.request("eth_chainId", tries=1), 16) == CHAIN_ID:
                    return url
            if asyncio.get_running_loop().time() > deadline:
                raise ChainUnavailable(f"Anvil does not answer on port {port}; see its log")
            await asyncio.sleep(0.02)
    raise ChainUnavailable(
        f"Anvil ended at once with exit code {process.returncode}: port {port} is busy, or its "
        "state file is damaged; choose another port, or see its log"
    )


def _check_port(port: int) -> None:
    """Raise ConfigurationError for a busy port, whose server would answer instead of the chain."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ConfigurationError(
                f"port {port} is busy; stop the program that listens there or choose another port"
            ) from None


@contextlib.asynccontextmanager
async def start_anvil(
    port: int,
    *,
    mnemonic: str,
    accounts: int = 10,
    binary: Path | None = None,
    state_file: Path | None = None,
    block_time_s: int | None = None,
    mixed_mining: bool = False,
    log_file: Path | None = None,
    extra: Sequence[str] = (),
) -> AsyncIterator[Anvil]:
    """Run a chain on 127.0.0.1 as long as the context lasts.

    Without ``block_time_s`` every transaction is mined at once. With ``state_file`` the chain is
    the same one the next time. The first ``accounts`` keys of ``mnemonic`` own 10,000 ether each.
    """
    _check_port(port)
    command = build_command(
        binary or find_anvil(),
        port,
        mnemonic=mnemonic,
        accounts=accounts,
        state_file=state_file,
        block_time_s=block_time_s,
        mixed_mining=mixed_mining,
    )
    with contextlib.ExitStack() as stack:
        output = asyncio.subprocess.DEVNULL
        if log_file is not None:
            output = stack.enter_context(log_file.open("ab")).fileno()
        process = await asyncio.create_subprocess_exec(
            *command, *extra, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    anvil = Anvil(process, f"http://127.0.0.1:{port}", port)
    try:
        await wait_until_ready(port, process)
        yield anvil
    finally:
        await anvil.stop()


async def mine(rpc: Rpc, blocks: int) -> None:
    """Mine empty blocks, a few at a time: an endpoint that takes long to answer counts as down."""
    for first in range(0, blocks, _BLOCKS_AT_ONCE):
        await rpc.request("anvil_mine", hex(min(_BLOCKS_AT_ONCE, blocks - first)))
