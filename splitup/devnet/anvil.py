"""A local Ethereum chain: start, watch and stop Foundry's Anvil."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eth_account import Account

from splitup.chain.rpc import Rpc
from splitup.core.errors import ChainUnavailable, ConfigurationError, Unavailable
from splitup.devnet.source_tree import find_source_tree

BINARY_VARIABLE: Final = "ANVIL_BIN"
CHAIN_ID: Final = 31_337
HARDFORK: Final = "prague"  # pinned: Anvil's default changes with its version
START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 10.0
KEPT_STATES: Final = 512  # past blocks whose state can be asked; older ones would fill a disk
_NPM_PACKAGE: Final = "@foundry-rs/anvil-linux-amd64@1.7.1"  # as in contracts/package.json


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


def find_anvil() -> Path:
    """Return the binary of $ANVIL_BIN, of a clone's contracts/node_modules or of PATH.

    Raises ConfigurationError when none of them can be run.
    """
    named = os.environ.get(BINARY_VARIABLE)
    tree = find_source_tree()
    candidates = [
        named or None,
        None if tree is None else str(tree / "contracts" / "node_modules" / ".bin" / "anvil"),
        "anvil",
    ]
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found is not None:
            return Path(found)
        if candidate and candidate == named:
            raise ConfigurationError(f"${BINARY_VARIABLE} names {named}, which cannot be run")
    raise ConfigurationError(
        "the local chain needs Anvil, which is not installed; install it with: "
        f"{compose_anvil_install()}, or set ${BINARY_VARIABLE} to the path of the binary"
    )


def compose_anvil_install() -> str:
    """Return the command that installs Anvil on this machine."""
    tree = find_source_tree()
    if tree is not None:
        return f"(cd {tree / 'contracts'} && npm ci --ignore-scripts)"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return f"npm install --global {_NPM_PACKAGE}"
    return "foundryup (the installer of Foundry, of which Anvil is a part)"


def create_mnemonic() -> str:
    """Return twelve random words (BIP-39), a seed for ``derive_key``."""
    Account.enable_unaudited_hdwallet_features()
    _, mnemonic = Account.create_with_mnemonic()
    return str(mnemonic)


def derive_key(mnemonic: str, index: int) -> bytes:
    """Return the private key of Anvil's account ``index``, m/44'/60'/0'/0/index (BIP-44)."""
    Account.enable_unaudited_hdwallet_features()
    account = Account.from_mnemonic(mnemonic, account_path=f"m/44'/60'/0'/0/{index}")
    return bytes(account.key)


def build_command(
    binary: Path,
    port: int,
    *,
    mnemonic: str,
    accounts: int,
    state_file: Path | None,
    block_time_s: int | None,
    mixed_mining: bool,
) -> list[str]:
    """Return the command line that starts Anvil."""
    command = [str(binary), "--host", "127.0.0.1", "--port", str(port), "--silent"]
    command += ["--chain-id", str(CHAIN_ID), "--hardfork", HARDFORK]
    command += ["--mnemonic", mnemonic, "--accounts", str(accounts), "--balance", "10000"]
    command += ["--enable-tx-gas-limit", "--no-cors"]
    command += ["--prune-history", str(KEPT_STATES)]  # else all stay in ~/.foundry
    if state_file is not None:  # an interval, because a SIGKILL leaves no time to save
        command += ["--state", str(state_file), "--state-interval", "1"]
    if block_time_s is not None:
        command += ["--block-time", str(block_time_s)]
        command += ["--mixed-mining"] if mixed_mining else []
    return command


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
