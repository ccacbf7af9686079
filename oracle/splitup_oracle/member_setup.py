"""``splitup-oracle join``: a member's key and ``oracle.toml``, all or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from splitup.config import NetworkConfig
from splitup.core.errors import ConfigurationError
from splitup.storage.private_files import create_party
from splitup_oracle.config import OracleConfig

CONFIG_NAME: Final = "oracle.toml"


@dataclass(frozen=True, slots=True)
class CreatedMember:
    """What the owner of the network needs to appoint a member, and where its files are."""

    config: str
    account: str
    signing_key: str
    endpoint: str

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return asdict(self)

    def compose_entry(self) -> str:
        """Return the member's entry for the owner's ``network.toml``."""
        names = "account", "signing_key", "endpoint"
        lines = (f"{name} = {json.dumps(getattr(self, name))}\n" for name in names)
        return "\n[[members]]\n" + "".join(lines)


def create_member(
    directory: Path,
    network: NetworkConfig,
    *,
    endpoint: str,
    listen: str,
    passphrase: Callable[[], str] = str,
) -> CreatedMember:
    """Write oracle.toml, keystore.json and passphrase into ``directory``; see ``create_party``.

    Raises ConfigurationError also when a value cannot be used.
    """
    if not endpoint.startswith("https://") and not network.allow_loopback:
        raise ConfigurationError(f"--endpoint {endpoint:.200} is not an https:// URL")
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"--listen is {listen!r}; give HOST:PORT")
    values = {
        "rpc_url": network.rpc_url,
        "deployment": network.deployment.name,  # in the same directory
        "gateway_urls": list(network.gateway_urls),
        "keystore": "keystore.json",
        "passphrase_file": "passphrase",
        "data_dir": "data",
        "listen_host": host.strip("[]"),
        "listen_port": int(port),
        "allow_loopback": network.allow_loopback,
    }
    # strings, lists of strings, integers and booleans have the same syntax in JSON and TOML
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    head = "# A committee member. Relative paths are relative to this file.\n"
    identity = create_party(
        directory, CONFIG_NAME, head + text, passphrase=passphrase, check=OracleConfig.load
    )
    return CreatedMember(
        str(directory / CONFIG_NAME), identity.address, identity.signing_key_hex, endpoint
    )
