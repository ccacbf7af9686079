"""A node's configuration: one TOML file, read once. Secrets are in it by path only."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from splitup.config import RpcUrlField
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import load_identity
from splitup.errors import ConfigurationError
from splitup.wire import EndpointField

GIGABYTE: Final = 10**9
_PATHS: Final = ("deployment", "keystore", "passphrase_file", "data_dir", "kernel_cache")

_TEMPLATE: Final = """\
# A SplitUp node. Run it with: splitup-node run --config {path}
# Relative paths are relative to this file.

# The chain, the contracts on it, and the storage gateway.
rpc_url = {rpc_url}
deployment = {deployment}
gateway_url = {gateway_url}

# The node's key. Whoever has both files has its stake: back them up, apart from each other.
keystore = {keystore}
passphrase_file = {passphrase_file}

# Journal, downloaded tasks, logs. One node per directory.
data_dir = {data_dir}

# Where the node listens, and how others reach it ("" when both are the same).
listen = {listen}
endpoint = {endpoint}

# Device memory that the node may fill, and has to stake for: 1000 USDC plus 100 USDC per GB.
vram = {vram}

# tinygrad device, for example "CUDA" or "CPU:X86"; "" chooses a GPU, else the CPU.
device = ""

# Compiled kernels; nodes of one machine may share a directory ("" keeps them in data_dir).
kernel_cache = ""

# Accept peers on loopback and private addresses: only for a network on one machine or in one room.
allow_loopback = {allow_loopback}
"""


class NodeConfig(BaseModel):
    """Everything a node is told; see the comments that ``splitup-node init`` writes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    rpc_url: RpcUrlField
    deployment: Path
    gateway_url: EndpointField
    keystore: Path
    passphrase_file: Path
    data_dir: Path
    listen: Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):[0-9]{1,5}$")]
    endpoint: EndpointField | Annotated[str, Field(max_length=0)] = ""
    vram: Annotated[ByteSize, Field(ge=1)]
    device: Annotated[str, Field(pattern=r"^[A-Za-z0-9:_+.-]*$", max_length=64)] = ""
    kernel_cache: Path | None = None
    allow_loopback: bool = False

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file. Raises ConfigurationError naming the field and the file."""
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no configuration {path}; make one with: splitup-node init "
                f"--data-dir {path.parent}"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the configuration {path} cannot be read: {error}") from None
        if values.get("kernel_cache") == "":
            del values["kernel_cache"]
        for name in _PATHS:
            if isinstance(values.get(name), str):
                values[name] = str(path.parent.absolute() / values[name])
        try:
            return cls.model_validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(str(part) for part in first["loc"][:1])
            problem = "is missing" if first["type"] == "missing" else f"is invalid: {first['msg']}"
            raise ConfigurationError(
                f"'{name}' in {path} {problem}; correct the file and start again"
            ) from None

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


def format_config(path: Path, values: dict[str, str | bool]) -> str:
    """Return the text of a new configuration with its comments."""
    # a JSON string is a TOML basic string; true and false are spelled alike
    return _TEMPLATE.format(
        path=path, **{name: json.dumps(value) for name, value in values.items()}
    )
