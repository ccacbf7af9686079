"""Writes the configuration files of a devnet's parties, in the formats of real operators."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup.config import NETWORK_FILE, find_cache_directory
from splitup.devnet.funding import Parties, Party, get_member_port
from splitup.devnet.s3_server import ObjectServer
from splitup.devnet.state import DevnetState, make_endpoint, write_json
from splitup.storage.private_files import write_private

# party -> (program, command)
PROGRAMS: Final = {
    "gateway": ("splitup-oracle", "gateway"),
    "member": ("splitup-oracle", "run"),
    "node": ("splitup-node", "run"),
}


_METRICS: Final = "127.0.0.1:0"  # a free port, which each party's log names


@dataclass(frozen=True, slots=True)
class DevnetLayout:
    """The values that the files contain."""

    directory: Path
    state: DevnetState
    parties: Parties
    rpc_url: str
    objects: ObjectServer

    @property
    def deployment(self) -> Path:
        return self.directory / "deployment.json"

    @property
    def gateway_urls(self) -> list[str]:
        return [make_endpoint(port) for port in self.state.gateway_ports]


def write_network_file(layout: DevnetLayout) -> None:
    """Write ``network.json``, by which the user's programs find this network."""
    user = layout.parties.user
    write_json(
        layout.directory / NETWORK_FILE,
        {
            "rpc_url": layout.rpc_url,
            "deployment": layout.deployment.name,
            "gateway_urls": layout.gateway_urls,
            "members": [make_endpoint(port) for port in layout.state.member_ports],
            "user_keystore": str(user.keystore.relative_to(layout.directory)),
            "user_passphrase_file": str(user.passphrase_file.relative_to(layout.directory)),
            "allow_loopback": True,
        },
    )


def write_gateway_file(layout: DevnetLayout, index: int) -> Path:
    """Write a gateway's ``gateway.toml``."""
    folder = layout.directory / f"gateway-{index}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return _write_toml(
        folder / "gateway.toml",
        {
            "rpc_url": layout.rpc_url,
            "deployment": str(layout.deployment),
            "s3_endpoint": layout.objects.endpoint_url,
            "bucket": layout.objects.bucket,
            "credentials": str(layout.objects.credentials_path),
            "listen_host": "127.0.0.1",
            "listen_port": layout.state.gateway_ports[index],
            "data_dir": str(folder),
            "metrics": _METRICS,
            "join_gateway_urls": layout.gateway_urls,
            "join_rpc_url": layout.rpc_url,
            "open_models": True,
            "open_uploads": True,
        },
    )


def _describe_party(layout: DevnetLayout, party: Party) -> dict[str, Any]:
    """Return the fields that members' and nodes' files share."""
    return {
        "rpc_url": layout.rpc_url,
        "deployment": str(layout.deployment),
        "gateway_urls": layout.gateway_urls,
        "keystore": str(party.keystore),
        "passphrase_file": str(party.passphrase_file),
        "data_dir": str(party.directory),
        # one user's, of all parties; the next network starts warm
        "kernel_cache": str(find_cache_directory() / "kernels"),
        "metrics": _METRICS,
        "allow_loopback": True,
    }


def write_member_file(layout: DevnetLayout, party: Party) -> Path:
    """Write a committee member's ``oracle.toml``."""
    return _write_toml(
        party.directory / "oracle.toml",
        {
            **_describe_party(layout, party),
            "listen_host": "127.0.0.1",
            "listen_port": get_member_port(party, layout.state),
        },
    )


def write_node_file(layout: DevnetLayout, index: int) -> Path:
    """Write a node's ``node.toml``."""
    party, port = layout.parties.nodes[index], layout.state.node_ports[index]
    return _write_toml(
        party.directory / "node.toml",
        {
            **_describe_party(layout, party),
            "listen": f"127.0.0.1:{port}",
            "endpoint": make_endpoint(port),
            "vram": f"{layout.state.vram_bytes}B",
            # tinygrad reads the device from this variable
            "devices": [os.environ["DEV"]] if os.environ.get("DEV") else [],
        },
    )


def _write_toml(path: Path, values: Mapping[str, str | int | bool | list[str]]) -> Path:
    # strings, lists of strings, integers and booleans have the same syntax in JSON and TOML
    write_private(path, "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path
