from __future__ import annotations

import aiohttp
import pytest

from splitup.net.endpoints import EndpointRefused, check_ip, open_peer_session
from splitup.net.http import make_app, serve_app


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111"])
def test_public_addresses_are_fine(address: str) -> None:
    check_ip(address, allow_loopback=False)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.1", "100.64.0.1", "fd12::1", "::ffff:10.0.0.1"],
)
def test_a13_private_addresses_need_permission(address: str) -> None:
    check_ip(address, allow_loopback=True)
    with pytest.raises(EndpointRefused, match="allow_loopback"):
        check_ip(address, allow_loopback=False)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "2002:a9fe:a9fe::1",
        "100.100.100.200",
        "fd00:ec2::254",
        "fe80::1%eth0",
        "0.0.0.0",
        "::",
        "224.0.0.1",
    ],
)
def test_a13_metadata_and_link_local_addresses_are_never_connected_to(address: str) -> None:
    with pytest.raises(EndpointRefused, match="never connected to"):
        check_ip(address, allow_loopback=True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a13_the_check_is_made_where_the_socket_is_made(host: str) -> None:
    server = await serve_app(make_app(), "127.0.0.1", 0)
    try:
        async with open_peer_session(allow_loopback=True) as session:
            assert (await session.get(f"http://{host}:{server.port}/")).status == 404
        async with open_peer_session(allow_loopback=False) as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"http://{host}:{server.port}/")
    finally:
        await server.close()
