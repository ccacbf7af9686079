"""How a program finds its network: one frozen object, read once; flag > environment > file.

``splitup up`` writes ``network.json`` into its directory (``./.splitup`` unless told otherwise).
Any other network is the same file, written by hand as JSON or TOML; relative paths in it are
relative to the file. Secrets are never in it, only the paths of the files that hold them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitup import limits
from splitup.codec import parse_json
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import load_identity
from splitup.errors import ConfigurationError
from splitup.wire import EndpointField

HOME_VARIABLE: Final = "SPLITUP_HOME"
DEFAULT_HOME: Final = Path(".splitup")
NETWORK_FILE: Final = "network.json"

RpcUrlField = Annotated[str, Field(pattern=r"^(https?|wss?)://\S+$", max_length=2048)]
_PATH_FIELDS: Final = ("deployment", "user_keystore", "user_passphrase_file", "cache")


class NetworkConfig(BaseModel):
    """Where the chain, the gateway and the committee are, and whose key acts."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    rpc_url: RpcUrlField
    deployment: Path  # JSON with the contracts' addresses (splitup.chain.deployment)
    gateway_url: EndpointField
    user_keystore: Path | None = None
    user_passphrase_file: Path | None = None
    members: tuple[EndpointField, ...] = Field(default=(), max_length=limits.MAX_COMMITTEE)
    cache: Path | None = None  # for what a model leaves to its users to compute
    allow_loopback: bool = False  # whether nodes may be on this machine or a private network

    @classmethod
    def load(cls, path: Path | None = None, **flags: str | Path | None) -> Self:
        """Read the network's file and lay environment and flags over it.

        ``path`` is a file, or a directory that holds ``network.json``; without it ``$SPLITUP_HOME``
        and then ``./.splitup`` are tried. ``flags`` are fields by name, None meaning "not given";
        the environment is ``SPLITUP_`` and the field in capitals. Raises ConfigurationError.
        """
        values = _read_values(path)
        values.update(_get_environment(os.environ))
        values.update({name: str(flag) for name, flag in flags.items() if flag is not None})
        try:
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            raise _explain(error, path) from None

    @property
    def cache_directory(self) -> Path:
        """Return where tasks and weights are kept; by default where the XDG rules say."""
        return self.cache or (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitup"
        )

    def load_user(self) -> Identity:
        """Open the user's key file; raise ConfigurationError when there is none or it is bad."""
        if self.user_keystore is None or self.user_passphrase_file is None:
            raise ConfigurationError(
                "no key is configured; pass --keystore FILE and --passphrase-file FILE"
            )
        return load_identity(self.user_keystore, self.user_passphrase_file)


def find_network_file(path: Path | None = None) -> Path:
    """Return the file that ``path``, ``$SPLITUP_HOME`` or ``./.splitup`` names; maybe absent."""
    chosen = path or Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)
    if chosen.is_dir() or chosen.suffix not in (".json", ".toml"):
        return chosen / NETWORK_FILE
    return chosen


def _read_values(path: Path | None) -> dict[str, Any]:
    file = find_network_file(path)
    if not file.exists():
        if path is not None:
            raise ConfigurationError(f"there is no network file {file}; start one with: splitup up")
        return {}  # flags and environment may say everything
    try:
        text = file.read_text("utf-8")
        values = tomllib.loads(text) if file.suffix == ".toml" else parse_json(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the network file {file} cannot be read ({error}); mend it, or write it anew with: "
            "splitup up"
        ) from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"the network file {file} does not hold an object of fields")
    for name in _PATH_FIELDS:
        if isinstance(values.get(name), str):
            values[name] = str(file.parent.absolute() / values[name])
    return values


def _get_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = ("rpc_url", "gateway_url", *_PATH_FIELDS)
    found = {name: environment.get(f"SPLITUP_{name.upper()}") for name in names}
    return {name: value for name, value in found.items() if value}


def _explain(error: ValidationError, path: Path | None) -> ConfigurationError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    file = find_network_file(path)
    if first["type"] == "missing" and not file.exists():
        return ConfigurationError(
            f"no network is configured (there is no {file}); start one with: splitup up, "
            f"point {HOME_VARIABLE} to its directory, or pass --{name.replace('_', '-')}"
        )
    return ConfigurationError(
        f"network setting '{name}' is not usable: {first['msg']}; "
        f"correct it in {file}, in SPLITUP_{name.upper()} or on the command line"
    )
