"""``oracle.toml``: what one committee member is told. Secrets by path only."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitup.config import RpcUrlField
from splitup.errors import ConfigurationError
from splitup.wire import EndpointField

_PATHS: Final = ("deployment", "keystore", "passphrase_file", "data_dir")


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
    listen_port: Annotated[int, Field(ge=0, le=65_535)]
    gateway_url: EndpointField
    confirmations: Annotated[int, Field(ge=0, le=64)] = 0

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file; raise ConfigurationError naming the setting that is wrong."""
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"the configuration {path} cannot be read ({error}); give another one with --config"
            ) from None
        for name in _PATHS:
            if isinstance(values.get(name), str):
                values[name] = str(path.parent.absolute() / values[name])
        try:
            return cls.model_validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(
                f"setting '{name}' in {path} is not usable: {first['msg']}; correct the file"
            ) from None
