"""Joining a network by the URL of one of its storage gateways: what a node, a user, a member needs.

The network decides where money goes. So what it says comes over TLS, or from this machine or its
private network; and the chain has to hold the contracts that it names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from splitup.chain.client import Chain
from splitup.config import NetworkConfig
from splitup.core.errors import ConfigurationError
from splitup.messages import api
from splitup.messages.network import Deployment, NetworkDescription
from splitup.net.http import SignedClient
from splitup.storage.private_files import explain_write, make_directory


@asynccontextmanager
async def join_network(
    url: str, directory: Path, rpc_url: str = ""
) -> AsyncIterator[tuple[NetworkConfig, Chain]]:
    """Fetch a network's description, check it, and save its deployment.json into ``directory``.

    Yields the configuration and a connection to its chain, at the network's RPC endpoint unless
    ``rpc_url`` names another. The file is taken away when the caller makes no key. Raises
    ConfigurationError for what is unsafe or of another network, and Unavailable.
    """
    url = url.rstrip("/")
    is_local = _is_local(url)
    if not is_local and not url.startswith("https://"):
        raise ConfigurationError(
            f"{url:.200} is not an https:// URL; over plain HTTP anybody on the way could name "
            "other contracts for your money"
        )
    async with SignedClient() as http:
        told = NetworkDescription.from_value(await http.get_json(api.NETWORK.url(url)))
    endpoint = rpc_url or check_rpc_url(url, told, is_local=is_local)
    async with await Chain.connect(endpoint, told.contracts) as chain:
        with _save(told.contracts, directory) as file:
            config = NetworkConfig(
                rpc_url=endpoint,
                deployment=file,
                gateway_urls=told.gateway_urls,
                allow_loopback=is_local,
            )
            yield config, chain


def check_rpc_url(url: str, told: NetworkDescription, *, is_local: bool) -> str:
    """Return the RPC endpoint that a network names; raise ConfigurationError for an unsafe one."""
    if not told.rpc_url:
        raise ConfigurationError(
            f"the network at {url} names no RPC endpoint of its chain "
            f"{told.contracts.chain_id}; give one with --rpc-url"
        )
    if not is_local and not told.rpc_url.startswith("https://"):
        raise ConfigurationError(
            f"the network at {url} names the RPC endpoint {told.rpc_url:.200}, whose answers "
            "anybody on the way could change; give another one with --rpc-url"
        )
    return told.rpc_url


@contextmanager
def _save(deployment: Deployment, directory: Path) -> Iterator[Path]:
    """Write the deployment's file; take it away again when the rest fails before it made a key."""
    file, keystore = directory / "deployment.json", directory / "keystore.json"
    if file.exists():
        if Deployment.load(file) != deployment:
            raise ConfigurationError(f"{file} is of another network; choose another directory")
        yield file
        return
    had_key = keystore.exists()
    with make_directory(directory, "directory"):
        with explain_write(directory, "directory"):
            deployment.save(file)
        try:
            yield file
        except BaseException:
            if had_key or not keystore.exists():
                file.unlink()
            raise


def _is_local(url: str) -> bool:
    """Return whether a URL names this machine, or a private network's."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private and not address.is_unspecified
