"""The configuration of a program: one frozen object; flags override environment, then file.

``splitup up`` writes ``network.json`` into its directory (``./.splitup`` unless told otherwise).
Any other network is the same file, written by hand as JSON or TOML; relative paths in it are
relative to the file. Secrets are never in it, only the paths of the files that hold them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.errors import ConfigurationError
from splitup.messages.base import EndpointField
from splitup.messages.network import RpcUrlField

if TYPE_CHECKING:
    from splitup.crypto.keys import Identity

HOME_VARIABLE: Final = "SPLITUP_HOME"
DEFAULT_HOME: Final = Path(".splitup")
NETWORK_FILE: Final = "network.json"
NODE_STATUS_FILE: Final = "status.json"  # in a node's data directory


def _split_commas(value: object) -> object:
    """Return a tuple for "a,b", the form in flags and the environment, and for a list."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return tuple(value) if isinstance(value, list) else value


# gateways of one bucket: each can serve; the next one is asked when one does not answer
GatewayUrlsField = Annotated[
    tuple[EndpointField, ...],
    BeforeValidator(_split_commas),
    Field(min_length=1, max_length=limits.MAX_GATEWAYS),
]
# memory of a node; a smaller number probably lacks its unit
MemoryField = Annotated[ByteSize, Field(ge=limits.MIN_NODE_BYTES)]
# "HOST:PORT" where Prometheus reads; "" opens no listener
MetricsField = Annotated[str, Field(pattern=r"^((\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):[0-9]{1,5})?$")]
_Config = TypeVar("_Config", bound=BaseModel)
_PATH_FIELDS: Final = ("deployment", "user_keystore", "user_passphrase_file", "cache")


class NetworkConfig(BaseModel):
    """Where the chain, the gateways and the committee are, and whose key acts."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", defer_build=True)

    rpc_url: RpcUrlField
    deployment: Path  # JSON with the contracts' addresses (splitup.messages.network)
    gateway_urls: GatewayUrlsField
    user_keystore: Path | None = None
    user_passphrase_file: Path | None = None
    members: tuple[EndpointField, ...] = Field(default=(), max_length=limits.MAX_COMMITTEE)
    cache: Path | None = None  # for the tasks that a model leaves to its users
    allow_loopback: bool = False  # whether nodes may be on this machine or a private network

    @classmethod
    def load(cls, path: Path | None = None, **flags: str | Path | None) -> Self:
        """Read the network's file; environment and flags override its values.

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
        """Return the directory of cached tasks and weights, by default that of the XDG standard."""
        return self.cache or find_cache_directory()

    def load_user(self) -> Identity:
        """Open the user's key file; raise ConfigurationError when there is none or it is bad."""
        if self.user_keystore is None or self.user_passphrase_file is None:
            raise ConfigurationError(
                "no key is configured; name its files in SPLITUP_USER_KEYSTORE and "
                "SPLITUP_USER_PASSPHRASE_FILE, or in the network's file"
            )
        from splitup.crypto.keystore import load_identity  # slow to import, and help needs no key

        return load_identity(self.user_keystore, self.user_passphrase_file)


# what pydantic would say in words that are no user's
_PROBLEMS: Final = {
    "missing": "is missing",
    "extra_forbidden": "is no setting",
    "byte_size": "is invalid: give a size such as 8GB",
}


def load_toml(
    model: type[_Config], path: Path, *, advice: str, from_flags: bool = False
) -> _Config:
    """Read the TOML file of a program that runs for long; Path fields are relative to the file.

    Raises ConfigurationError naming the file, and the setting that is wrong. ``advice`` says what
    to do when there is no file. ``from_flags``: the file was written from flags just now, and it is
    these that the user can correct.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"there is no configuration {path}; {advice}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the configuration {path} cannot be read ({error}); correct it"
        ) from None
    paths = [
        name for name, info in model.model_fields.items() if info.annotation in (Path, Path | None)
    ]
    values = _resolve_paths(values, paths, path)
    try:  # through JSON, from which strict models accept paths and tuples
        return model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        first = max(errors, key=lambda one: one["type"] == "extra_forbidden")  # a misspelt name
        name = ".".join(str(part) for part in first["loc"][:1])
        fallback = f"is invalid: {first['msg'].removeprefix('Value error, ')}"
        problem = _PROBLEMS.get(first["type"], fallback)
        if from_flags:
            raise ConfigurationError(f"--{name.replace('_', '-')} {problem}") from None
        raise ConfigurationError(
            f"'{name}' in {path} {problem}; correct the file and start again"
        ) from None


def _resolve_paths(values: dict[str, Any], names: Iterable[str], file: Path) -> dict[str, Any]:
    """Return the values with relative paths made absolute; "" stands for no path."""
    folder = file.parent.absolute()
    paths = {name: values[name] for name in names if isinstance(values.get(name), str)}
    return values | {name: str(folder / path) if path else None for name, path in paths.items()}


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
            raise ConfigurationError(
                f"there is no network file {file}; start a network with: splitup up --dir "
                f"{file.parent}"
            )
        return {}  # flags and environment may set everything
    try:
        text = file.read_text("utf-8")
        values = tomllib.loads(text) if file.suffix == ".toml" else parse_json(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the network file {file} cannot be read ({error}); correct it, or, for a network "
            f"of your own, write it again with: splitup up --dir {file.parent}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"the network file {file} does not hold an object of fields")
    values = _resolve_paths(values, _PATH_FIELDS, file)
    if path is None and not os.environ.get(HOME_VARIABLE):
        _check_keys(values, file)
    return values


def _check_keys(values: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigurationError for a file in the current folder that names keys elsewhere.

    Whoever made that folder could have a user's key sign for a contract and a chain of theirs.
    """
    for name in ("user_keystore", "user_passphrase_file"):
        key = values.get(name)
        if key and not Path(key).resolve().is_relative_to(file.parent.resolve()):
            raise ConfigurationError(
                f"{file} is just what lies in this folder, and its '{name}' is elsewhere: {key}; "
                f"if you trust this file, run: export {HOME_VARIABLE}={file.parent.absolute()}"
            )


def _get_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = ("rpc_url", "gateway_urls", *_PATH_FIELDS)
    found = {name: environment.get(f"SPLITUP_{name.upper()}") for name in names}
    return {name: value for name, value in found.items() if value}


def _explain(error: ValidationError, path: Path | None) -> ConfigurationError:
    first = error.errors()[0]
    name = str(first["loc"][0])
    file = find_network_file(path)
    if first["type"] == "missing" and not file.exists():
        return ConfigurationError(
            f"no network is configured (there is no {file}); start one with: splitup up, "
            f"or point {HOME_VARIABLE} to the file or directory of another"
        )
    if first["type"] == "extra_forbidden":
        return ConfigurationError(f"'{name}' in {file} is no setting; delete it there")
    return ConfigurationError(
        f"network setting '{name}' is not usable: {first['msg']}; "
        f"correct it in {file}, in SPLITUP_{name.upper()} or on the command line"
    )


def find_cache_directory() -> Path:
    """Return this user's directory of what can be made again (XDG Base Directory standard)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitup"
