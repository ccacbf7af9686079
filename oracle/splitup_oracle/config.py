"""The settings of members and gateways, ``oracle.toml`` and ``gateway.toml``; secrets by path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field

from splitup.config import GatewayUrlsField, MetricsField, load_toml
from splitup.core import tuning
from splitup.messages.base import EndpointField
from splitup.messages.network import RpcUrlField

_ADVICE: Final = "give another one with --config"
_Port = Annotated[int, Field(ge=0, le=65_535)]


class _Settings(BaseModel):
    """Settings in a file; relative paths are relative to it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file; raise ConfigurationError naming the setting that is wrong."""
        return load_toml(cls, path, advice=_ADVICE)


class OracleConfig(_Settings):
    """One committee member.

    The endpoint at which others reach this member is on chain (Committee.members), not here.
    """

    rpc_url: RpcUrlField
    deployment: Path
    keystore: Path
    passphrase_file: Path
    data_dir: Path
    listen_host: str = "127.0.0.1"
    listen_port: _Port
    gateway_urls: GatewayUrlsField
    kernel_cache: Path | None = None  # compiled tasks, by default in data_dir; one owner may share
    allow_loopback: bool = False  # whether nodes may be on this machine or a private network
    metrics: MetricsField = ""  # where Prometheus reads, "127.0.0.1:9464"


class GatewayPolicy(_Settings):
    """What an operator of a gateway decides."""

    open_models: bool = False  # whether keys that no active node holds may read models
    open_uploads: bool = False  # whether keys without deposit or stake may upload models
    upload_deposit_micro_usdc: Annotated[int, Field(ge=1)] = 1_000_000
    upload_bytes_per_day: Annotated[int, Field(ge=1)] = tuning.UPLOAD_BYTES_PER_DAY


class GatewayConfig(GatewayPolicy):
    """One of the storage gateways in front of a bucket."""

    rpc_url: RpcUrlField
    deployment: Path
    s3_endpoint: EndpointField  # reachable for everybody: it is part of every URL
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    credentials: Path  # 0600 JSON with access_key and secret_key
    listen_host: str = "127.0.0.1"
    listen_port: _Port
    # this gateway's URL as in everybody's configuration: requests are signed for it, and a gateway
    # accepts no token for another; "" if it is the URL at which it listens
    public_url: EndpointField | Annotated[str, Field(max_length=0)] = ""
    data_dir: Path  # holds audit.jsonl
    metrics: MetricsField = ""  # where Prometheus reads, "127.0.0.1:9464"
    # what those who join are told (GET /v1/network): the network's gateways, () for this one alone,
    # and an RPC endpoint, "" if they bring their own: rpc_url may hold a key, and is never told
    join_gateway_urls: GatewayUrlsField | Annotated[tuple[str, ...], Field(max_length=0)] = ()
    join_rpc_url: RpcUrlField | Annotated[str, Field(max_length=0)] = ""
