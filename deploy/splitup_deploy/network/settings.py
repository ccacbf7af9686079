"""The owner's file, ``network.toml``: what a network's contracts are, and who does what in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from splitup.chain.deployment import CreationRecord, MarketParameters, Terms
from splitup.config import load_toml
from splitup.core import limits, tuning
from splitup.core.errors import ConfigurationError
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import load_identity, read_address
from splitup.messages.base import AddressField, Bytes32Field, EndpointField
from splitup.messages.network import RpcUrlField
from splitup.storage.private_files import create_party

_DAY_S: Final = 86_400
_TEMPLATE: Final = """\
# A network's contracts. See what would be done with: splitup-deploy network plan --config {path}
# Relative paths are relative to this file.

rpc_url = {rpc_url}
keystore = "keystore.json"
passphrase_file = "passphrase"

# The token: USDC's address on this chain, or "test", which deploys one that is worth nothing.
usdc = {usdc}

# Blocks that all members wait before they believe what they read (0 to {max_confirmations}).
confirmations = {confirmations}

# Written by 'deploy': what everybody needs, and what 'verify' needs.
deployment = "deployment.json"
record = "record.json"

# Seconds until a node's stake is free, and until a former member's bond is. The latter is fixed.
unbonding_period_s = {unbonding_period_s}
bond_period_s = {bond_period_s}

# Who may change the rest ("" is the account of the key above), and who gets fees and slashed money
# ("" is the owner).
owner = ""
treasury = ""

# Refuse new executions; those that run go on.
paused = false

# Transactions are not sent above this price of gas.
fee_ceiling_gwei = {fee_ceiling_gwei}

# [market] takes the market's parameters, such as: fee_bps = 100
# Each member's own [[members]] follows here: 'splitup-oracle join' prints it.
"""


class MemberSettings(BaseModel):
    """One member of the committee, as it says of itself."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    account: AddressField
    signing_key: Bytes32Field
    endpoint: EndpointField


class NetworkSettings(BaseModel):
    """What a network's contracts shall be; ``splitup-deploy network init`` writes a file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    rpc_url: RpcUrlField
    keystore: Path
    passphrase_file: Path
    usdc: AddressField | Literal["test"]
    confirmations: Annotated[int, Field(ge=0, le=limits.MAX_CONFIRMATIONS)]
    deployment: Path
    record: Path
    unbonding_period_s: Annotated[int, Field(ge=1, le=90 * _DAY_S)] = 7 * _DAY_S
    bond_period_s: Annotated[int, Field(ge=1, le=90 * _DAY_S)] = 14 * _DAY_S
    owner: AddressField | Literal[""] = ""
    treasury: AddressField | Literal[""] = ""
    paused: bool = False
    fee_ceiling_gwei: Annotated[int, Field(ge=1)] = tuning.FEE_CEILING_WEI // 10**9
    market: MarketParameters = MarketParameters()
    members: Annotated[tuple[MemberSettings, ...], Field(max_length=limits.MAX_COMMITTEE)] = ()
    _path: Path = PrivateAttr(default=Path("network.toml"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file; raise ConfigurationError naming the setting that is wrong."""
        advice = f"make one with: splitup-deploy network init --data-dir {path.parent}"
        settings = load_toml(cls, path, advice=advice)
        settings._path = path
        return settings

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        for name in MemberSettings.model_fields:
            if len({getattr(member, name) for member in self.members}) != len(self.members):
                raise ValueError("two members have one account, signing key or endpoint")
        if self.members and (len(self.members) < 4 or len(self.members) % 3 != 1):
            raise ValueError(f"{len(self.members)} members are listed; list 4, 7, 10 … 31")
        return self

    @model_validator(mode="after")
    def _check_bond_period(self) -> Self:
        longest = self.market.max_deadline_s + self.market.settlement_grace_s
        if self.bond_period_s <= longest:
            raise ValueError(
                f"bond_period_s is {self.bond_period_s}, and a former member signs for executions "
                f"that last up to {longest} s; make it longer, or max_deadline_s shorter"
            )
        return self

    @property
    def path(self) -> Path:
        """The file that this was read from."""
        return self._path

    @property
    def token(self) -> str | None:
        """The address of USDC, None for a test token that is deployed."""
        return None if self.usdc == "test" else self.usdc

    @property
    def terms(self) -> Terms:
        """What the contracts are told when they are made."""
        return Terms(self.unbonding_period_s, self.bond_period_s, self.market)

    @property
    def fee_ceiling_wei(self) -> int:
        """The most to pay per gas."""
        return self.fee_ceiling_gwei * 10**9

    def list_members(self) -> list[tuple[str, str, str]]:
        """Return the members as the contract takes them, sorted."""
        return sorted((one.account, one.signing_key, one.endpoint) for one in self.members)

    def read_account(self) -> str:
        """Return the account of the key that signs, without opening it."""
        return read_address(self.keystore)

    def load_identity(self) -> Identity:
        """Open the key that signs. Raises ConfigurationError."""
        return load_identity(self.keystore, self.passphrase_file)

    def load_record(self) -> CreationRecord | None:
        """Return what was made so far, None before anything was. Raises ConfigurationError."""
        try:
            data = self.record.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.record} ({error.strerror})") from None
        try:
            return CreationRecord.model_validate_json(data)
        except ValueError:
            raise ConfigurationError(
                f"{self.record} is damaged; restore it from a backup: without it a contract that "
                "was made already would be made again"
            ) from None


@dataclass(frozen=True, slots=True)
class CreatedNetwork:
    """What ``create_network_file`` made."""

    config: Path
    owner: str


def create_network_file(
    directory: Path,
    *,
    rpc_url: str,
    usdc: str,
    confirmations: int,
    passphrase: Callable[[], str] = str,
) -> CreatedNetwork:
    """Write the owner's key, its passphrase and ``network.toml``; see ``create_party``.

    Raises ConfigurationError also when a value cannot be used.
    """
    path = directory / "network.toml"
    text = _TEMPLATE.format(
        path=path,
        rpc_url=json.dumps(rpc_url),
        usdc=json.dumps(usdc.lower()),
        confirmations=confirmations,
        max_confirmations=limits.MAX_CONFIRMATIONS,
        unbonding_period_s=7 * _DAY_S,
        bond_period_s=14 * _DAY_S,
        fee_ceiling_gwei=tuning.FEE_CEILING_WEI // 10**9,
    )
    identity = create_party(
        directory, path.name, text, passphrase=passphrase, check=NetworkSettings.load
    )
    return CreatedNetwork(path, identity.address)
