"""``oracle.toml`` and ``gateway.toml``: what members and gateways are told; secrets by path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field

from splitup.config import GatewayUrlsField, RpcUrlField, load_toml
from splitup.core import tuning
from splitup.messages.base import EndpointField

_ADVICE: Final = "give another one with --config"
_Port = Annotated[int, Field(ge=0, le=65_535)]


class OracleConfig(BaseModel):
    """One committee member. Relative paths are relative to the file.

    Where the others reach this member is on chain (Committee.members), not here.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    rpc_url: RpcUrlField
    deployment: Path
    keystore: Path
    passphrase_file: Path
    data_dir: Path
    listen_host: str = "127.0.0.1"
    listen_port: _Port
    gateway_urls: GatewayUrlsField
    confirmations: Annotated[int, Field(ge=0, le=64)] = 0
    allow_loopback: bool = False  # whether nodes may be on this machine or a private network

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file; raise ConfigurationError naming the setting that is wrong."""
        return load_toml(cls, path, advice=_ADVICE)


class GatewayConfig(BaseModel):
    """One of the storage gateways in front of a bucket."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    rpc_url: RpcUrlField
    deployment: Path
    s3_endpoint: EndpointField  # as everybody reaches it: it is part of every URL
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    credentials: Path  # 0600 JSON with access_key and secret_key
    listen_host: str = "127.0.0.1"
    listen_port: _Port
    # as everybody's configuration spells this gateway: requests are signed for it, and a token for
    # one gateway is worth nothing at another; "" where it is where it listens
    public_url: EndpointField | Annotated[str, Field(max_length=0)] = ""
    data_dir: Path  # holds audit.jsonl
    open_models: bool = False  # whether keys that no active node holds may read models
    open_uploads: bool = False  # whether keys without deposit or stake may upload models
    upload_deposit_micro_usdc: Annotated[int, Field(ge=1)] = 1_000_000
    upload_bytes_per_day: Annotated[int, Field(ge=1)] = tuning.UPLOAD_BYTES_PER_DAY  # of one key

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file; raise ConfigurationError naming the setting that is wrong."""
        return load_toml(cls, path, advice=_ADVICE)
