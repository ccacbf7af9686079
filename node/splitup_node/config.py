"""A node's configuration: one TOML file, read once. It names secrets by their path only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from splitup.config import GatewayUrlsField, MemoryField, MetricsField, load_toml
from splitup.core import tuning
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import load_identity
from splitup.messages.base import EndpointField
from splitup.messages.network import RpcUrlField

GIGABYTE: Final = 10**9
DEFAULT_FILE: Final = "node.toml"

_TEMPLATE: Final = """\
# A SplitUp node. Run it with: splitup-node run --config {path}
# Relative paths are relative to this file.

# The chain, the contracts on it, and the storage gateways: when one is gone, the next is asked.
rpc_url = {rpc_url}
deployment = {deployment}
gateway_urls = {gateway_urls}

# The node's key. Whoever has both files has its stake: back them up, apart from each other.
keystore = {keystore}
passphrase_file = {passphrase_file}

# Journal, downloaded tasks, logs. One node per directory.
data_dir = {data_dir}

# Where the node listens, and how others reach it ("" when both are the same).
listen = {listen}
endpoint = {endpoint}

# What to do when the committee cannot connect to that: "auto" goes through a committee member's
# relay, a URL always through that relay, "off" stays unreachable.
relay = "auto"

# Relay for other nodes: their frames pass through here unread.
offer_relay = false

# Device memory that the node may fill, and has to stake for: 1000 USDC plus 100 USDC per GB.
vram = {vram}

# tinygrad devices, a worker process for each: ["CUDA:0", "CUDA:1"], ["AMD"], ["METAL"],
# ["CPU:X86"]; [] chooses a GPU, else the CPU. They must be of one kind.
devices = []

# Memory of each device, in the order above, ["24GB", "12GB"]; [] shares vram out equally.
device_memory = []

# Threads that a CPU computes with: one for each core that the node has for itself, fewer where
# other programs or nodes compute. Two decode 1.6 to 1.9 times as fast as one; results are the same.
threads = 1

# Compiled kernels; nodes of one machine may share a directory ("" keeps them in data_dir).
kernel_cache = ""

# Where Prometheus reads /metrics, such as "127.0.0.1:9464" ("" offers nothing). No secrets are in
# it, but how busy the node is: keep it on the loopback, or behind a firewall.
metrics = ""

# Accept peers on loopback and private addresses: only for a network on one machine or in one room.
allow_loopback = {allow_loopback}
"""


DeviceField = Annotated[str, Field(pattern=r"^[A-Za-z0-9:_+.-]+$", max_length=64)]


def _check_listen(value: str) -> str:
    if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):[0-9]{1,5}", value):
        raise ValueError("give an address and a port, such as 0.0.0.0:7700")
    return value


class NodeConfig(BaseModel):
    """All settings of a node; ``splitup-node init`` writes a file with comments on each."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", defer_build=True)

    rpc_url: RpcUrlField
    deployment: Path
    gateway_urls: GatewayUrlsField
    keystore: Path
    passphrase_file: Path
    data_dir: Path
    listen: Annotated[str, AfterValidator(_check_listen)]
    endpoint: EndpointField | Annotated[str, Field(max_length=0)] = ""
    relay: Literal["auto", "off"] | EndpointField = "auto"
    offer_relay: bool = False
    vram: MemoryField
    devices: Annotated[tuple[DeviceField, ...], Field(max_length=tuning.MAX_DEVICES)] = ()
    device_memory: Annotated[tuple[MemoryField, ...], Field(max_length=tuning.MAX_DEVICES)] = ()
    threads: Annotated[int, Field(ge=1, le=tuning.MAX_KERNEL_THREADS)] = 1
    kernel_cache: Path | None = None
    allow_loopback: bool = False
    metrics: MetricsField = ""
    _path: Path = PrivateAttr(default=Path(DEFAULT_FILE))

    @classmethod
    def load(cls, path: Path, *, from_flags: bool = False) -> Self:
        """Read a TOML file. Raises ConfigurationError naming the field and the file, or the flag.

        ``from_flags`` is as for ``load_toml``.
        """
        advice = "name yours with --config, or make one with: splitup-node join URL"
        config = load_toml(cls, path, advice=advice, from_flags=from_flags)
        config._path = path
        return config

    @property
    def path(self) -> Path:
        """Return the file that this was read from."""
        return self._path

    def make_command(self, verb: str) -> str:
        """Return the command line of a verb for this node, for messages that name a remedy."""
        return make_command(verb, self._path)

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        sizes, count = self.device_memory, max(1, len(self.devices))
        if sizes and (len(sizes) != count or sum(sizes) > self.vram):
            raise ValueError("device_memory must name one size per device, together at most vram")
        return self

    @property
    def device_shares(self) -> tuple[tuple[str, int], ...]:
        """Return each device ("" for the one to be chosen) and the bytes it may fill."""
        devices = self.devices or ("",)
        shares = self.device_memory or (int(self.vram) // len(devices),) * len(devices)
        return tuple(zip(devices, map(int, shares), strict=True))

    @property
    def host(self) -> str:
        """Return the address to listen on."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Return the port to listen on, 0 for any."""
        return int(self.listen.rpartition(":")[2])

    @property
    def vram_gb(self) -> int:
        """Return the memory to stake for, in whole GB."""
        return max(1, -(-int(self.vram) // GIGABYTE))

    def load_identity(self) -> Identity:
        """Open the node's key file. Raises ConfigurationError."""
        return load_identity(self.keystore, self.passphrase_file)


def make_command(verb: str, path: Path) -> str:
    """Return the command line of a verb for the node with this configuration."""
    return f"splitup-node {verb}" + ("" if str(path) == DEFAULT_FILE else f" --config {path}")


def format_config(path: Path, values: Mapping[str, str | bool | Sequence[str]]) -> str:
    """Return the text of a new configuration with its comments."""
    # JSON's strings, lists of strings, true and false are TOML's
    return _TEMPLATE.format(
        path=path, **{name: json.dumps(value) for name, value in values.items()}
    )
