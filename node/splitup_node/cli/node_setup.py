"""``splitup-node init``: a key, its passphrase and a commented configuration, all or nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from splitup.config import NetworkConfig
from splitup.core.errors import ConfigurationError
from splitup.crypto.keystore import create_identity, create_passphrase
from splitup.storage.private_files import write_private
from splitup_node.config import NodeConfig, format_config
from splitup_node.preflight import check_settings


@dataclass(frozen=True, slots=True)
class CreatedNode:
    """What ``create_node`` made."""

    config_path: Path
    address: str
    vram_gb: int


def create_node(
    directory: Path,
    network: NetworkConfig,
    *,
    vram: str,
    listen: str,
    endpoint: str,
    allow_loopback: bool,
    passphrase: str = "",
) -> CreatedNode:
    """Write node.toml, keystore.json and passphrase into ``directory``.

    Without a ``passphrase`` the key gets a random one.
    Raises ConfigurationError when one of them exists or a value is not usable; nothing is written
    then.
    """
    path = directory / "node.toml"
    keystore, passphrase_file = directory / "keystore.json", directory / "passphrase"
    for file in (path, keystore, passphrase_file):
        if file.exists():
            raise ConfigurationError(
                f"{file} exists already; use it, or choose another --data-dir for a second node"
            )
    text = format_config(
        path,
        {
            "rpc_url": network.rpc_url,
            "deployment": os.path.abspath(network.deployment),
            "gateway_urls": network.gateway_urls,
            "keystore": keystore.name,
            "passphrase_file": passphrase_file.name,
            "data_dir": "data",
            "listen": listen,
            "endpoint": endpoint,
            "vram": vram,
            "allow_loopback": allow_loopback,
        },
    )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = directory / ".node.toml"
        write_private(draft, text)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to {directory} ({error.strerror}); choose another --data-dir"
        ) from None
    try:
        config = NodeConfig.load(draft, from_flags=True)
        check_settings(config, from_flags=True)
        create_passphrase(passphrase_file, passphrase)
        identity = create_identity(keystore, passphrase_file)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return CreatedNode(path, identity.address, config.vram_gb)
