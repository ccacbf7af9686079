"""A local Ethereum chain: Foundry's Anvil, its command line and its accounts."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Final

from splitup.core.errors import ConfigurationError
from splitup.core.source_tree import find_source_tree

BINARY_VARIABLE: Final = "ANVIL_BIN"
CHAIN_ID: Final = 31_337
HARDFORK: Final = "prague"  # pinned: Anvil's default changes with its version
KEPT_STATES: Final = 512  # past blocks whose state can be asked; older ones would fill a disk
_NPM_PACKAGE: Final = "@foundry-rs/anvil-linux-amd64@1.7.1"  # as in contracts/package.json


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
    from eth_account import Account  # at use: its import costs most of a second of CPU time

    Account.enable_unaudited_hdwallet_features()
    _, mnemonic = Account.create_with_mnemonic()
    return str(mnemonic)


def derive_key(mnemonic: str, index: int) -> bytes:
    """Return the private key of Anvil's account ``index``, m/44'/60'/0'/0/index (BIP-44)."""
    from eth_account import Account

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
