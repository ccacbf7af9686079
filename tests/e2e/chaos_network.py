"""A devnet whose parties reach each other, the chain and the store through other ports.

``chaos_network.py DIR NODES VRAM_BYTES MEMBERS DEVICE``: ``DIR/proxies.json`` has the store's own
port, and for each port the one that others use. Whatever ends is started again, the store too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from splitup.devnet import files, funding, network
from splitup.devnet.files import DevnetLayout
from splitup.devnet.funding import DEVNET_PARAMETERS
from splitup.devnet.network import Devnet, DevnetOptions, run_devnet
from splitup.devnet.s3_server import ObjectServer, start_object_server
from splitup.devnet.state import make_endpoint

DIRECTORY = Path(sys.argv[1])
PORTS = json.loads((DIRECTORY / "proxies.json").read_text())
STORE = PORTS["store"]


def make_proxied_endpoint(port: int) -> str:
    """Return the URL by which others reach what listens on a port."""
    return make_endpoint(PORTS["proxies"].get(str(port), port))


def start_proxied_store(folder: Path) -> ObjectServer:
    """Start the store on its own port, which others reach through another one."""
    server = start_object_server(folder, s3_port=STORE)
    return replace(server, endpoint_url=make_proxied_endpoint(STORE))


def write_gateway_file(layout: DevnetLayout, index: int) -> Path:
    """Write a gateway's file with the URL that requests to it are signed for."""
    path = files.write_gateway_file(layout, index)
    url = make_proxied_endpoint(layout.state.gateway_ports[index])
    with path.open("a") as file:
        file.write(f"public_url = {json.dumps(url)}\n")
    return path


class ChaosDevnet(Devnet):
    """A devnet that starts its store again."""

    def _check_essential(self) -> None:
        for group in self._groups:
            if group[0].name == "objects" and not group[0].is_running():
                group[0] = start_proxied_store(self.directory / "objects")
                self._write_runtime(ready=True)
        super()._check_essential()


if __name__ == "__main__":
    for module in (files, funding, network):
        module.make_endpoint = make_proxied_endpoint  # type: ignore[attr-defined]
    network.files = SimpleNamespace(**{**vars(files), "write_gateway_file": write_gateway_file})  # type: ignore[attr-defined, assignment]
    network.start_object_server = start_proxied_store  # type: ignore[attr-defined, assignment]
    network.Devnet = ChaosDevnet  # type: ignore[misc]
    options = DevnetOptions(
        DIRECTORY,
        int(sys.argv[2]),
        int(sys.argv[3]),
        DEVNET_PARAMETERS,
        int(sys.argv[4]),
    )
    asyncio.run(run_devnet(options, print, lambda health: print(health.describe()), restart=True))
