"""``splitup-node init``: a key, its passphrase and a commented configuration, all or nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from splitup.config import NetworkConfig
from splitup.storage.private_files import create_party
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
    """Write node.toml, keystore.json and passphrase into ``directory``; see ``create_party``.

    Raises ConfigurationError also when a value is not usable.
    """
    path = directory / "node.toml"
    text = format_config(
        path,
        {
            "rpc_url": network.rpc_url,
            "deployment": os.path.abspath(network.deployment),
            "gateway_urls": network.gateway_urls,
            "keystore": "keystore.json",
            "passphrase_file": "passphrase",
            "data_dir": "data",
            "listen": listen,
            "endpoint": endpoint,
            "vram": vram,
            "allow_loopback": allow_loopback,
        },
    )

    def check(draft: Path) -> None:
        check_settings(NodeConfig.load(draft, from_flags=True), from_flags=True)

    identity = create_party(directory, path.name, text, passphrase=passphrase, check=check)
    return CreatedNode(path, identity.address, NodeConfig.load(path).vram_gb)
