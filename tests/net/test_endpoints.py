from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core.errors import PeerFault, Unavailable
from splitup.core.http_session import Redirected
from splitup.crypto.keys import generate_identity
from splitup.net.endpoints import EndpointRefused, check_ip, open_peer_session
from splitup.net.http import SignedClient
from splitup.net.http_server import Server, make_app, serve_app
from splitup.net.links import LinkPool
from tests.builders import wait_open


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2606:4700::5efe:808:808"],
)
def test_public_addresses_are_fine(address: str) -> None:
    check_ip(address, allow_loopback=False)


# IANA's registries of special-purpose addresses (2025-10), and of multicast and reserved blocks:
# what is not "globally reachable", or leads elsewhere than its address says.
NOT_PUBLIC = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
    *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    *("::/96", "::1/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/32"),
    *("2001:2::/48", "2001:10::/28", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16"),
    *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
)
# How IPv6 writes an IPv4 address that a host, a tunnel or a translator then connects to.
EMBEDDED = (
    "::",
    "::ffff:0:0",
    "64:ff9b::",
    "64:ff9b:1::",
    "fe80::5efe:0:0",
    "2606:4700::200:5efe:0:0",
)
NETWORKS = [ipaddress.ip_network(text) for text in NOT_PUBLIC]
IPV4 = [network for network in NETWORKS if network.version == 4]


@st.composite
def make_address_inside(draw: st.DrawFn) -> str:
    """Return an address that is not public, or an IPv6 address that leads to one of IPv4."""
    network = draw(st.sampled_from(NETWORKS))
    number = int(network[0]) + draw(st.integers(0, network.num_addresses - 1))
    if network.version == 6:
        return str(ipaddress.IPv6Address(number))
    forms = [number << 80 | 0x2002 << 112, 0x20010000 << 96 | number ^ 0xFFFF_FFFF]
    forms += [int(ipaddress.IPv6Address(form)) | number for form in EMBEDDED]
    texts = [str(ipaddress.IPv4Address(number))]
    texts += [str(ipaddress.IPv6Address(form)) for form in forms]
    return draw(st.sampled_from(texts))


@settings(max_examples=500)
@given(make_address_inside())
def test_s23_no_address_of_another_network_is_public(text: str) -> None:
    with pytest.raises(EndpointRefused):
        check_ip(text, allow_loopback=False)


@settings(max_examples=500)
@given(st.integers(0, 2**128 - 1), st.booleans())
def test_s23_of_ipv6_only_what_iana_has_allotted_is_connected_to(
    number: int, allow_loopback: bool
) -> None:
    address = ipaddress.IPv6Address(number)
    lead = ("2000::/3", "64:ff9b::/96", *(("fc00::/7", "::1/128") if allow_loopback else ()))
    if not any(address in ipaddress.IPv6Network(text) for text in lead):
        with pytest.raises(EndpointRefused):
            check_ip(str(address), allow_loopback=allow_loopback)


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_s23_a_public_address_of_ipv4_is_so_in_every_form(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    is_public = not any(address in network for network in IPV4) and str(address) != "168.63.129.16"
    for prefix in ("", "::ffff:", "64:ff9b::"):
        try:
            check_ip(f"{prefix}{address}", allow_loopback=False)
        except EndpointRefused:
            assert not is_public
        else:
            assert is_public


@pytest.mark.parametrize(
    "address",
    [
        *(
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::7f00:1",
            "::127.0.0.1",
            "fec0::1",
            "2001:0:1:2:3:4:5:6",
        ),
        *(
            "168.63.129.16",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "64:ff9b::6464:64c8",
            "255.255.255.255",
        ),
        *("192.0.2.1", "198.18.0.1", "2001:db8::1", "3fff::1", "100::1", "::ffff:0.0.0.0"),
    ],
)
def test_s23_addresses_that_are_neither_public_nor_local_are_never_connected_to(
    address: str,
) -> None:
    with pytest.raises(EndpointRefused, match="never connected to"):
        check_ip(address, allow_loopback=True)


def test_s23_a_translated_private_address_needs_permission() -> None:
    check_ip("64:ff9b::a00:1", allow_loopback=True)
    with pytest.raises(EndpointRefused, match="allow_loopback"):
        check_ip("64:ff9b::a00:1", allow_loopback=False)


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


# ---- hostile names ------------------------------------------------------------------------------


@dataclass
class Names:
    """A resolver that an attacker controls: it returns ``answers``, one after the other."""

    answers: list[list[str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]


@pytest.fixture
def names() -> Names:
    return Names()


@dataclass
class Inside:
    """A server in the operator's own network; ``seen`` are the requests that it received."""

    server: Server
    seen: list[str]

    def url(self, host: str) -> str:
        return f"http://{host}:{self.server.port}"


@pytest_asyncio.fixture
async def inside(names: Names, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Inside]:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({})

    app = make_app()
    app.router.add_get("/{path:.*}", answer)
    server = await serve_app(app, "127.0.0.1", 0)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    yield Inside(server, seen)
    await server.close()


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::ffff:127.0.0.1"],
        ["2002:7f00:1::"],
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["::ffff:169.254.169.254"],
        ["fe80::1", "127.0.0.1"],
        ["0.0.0.0", "::"],
    ],
)
async def test_a13_names_that_lead_inside_are_not_followed(
    names: Names, inside: Inside, addresses: list[str]
) -> None:
    names.answers = [addresses]
    url = inside.url("node.example")
    async with SignedClient(allow_loopback=False) as http:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await http.get_json(f"{url}/v1/ping")
    pool = LinkPool(generate_identity(), lambda link, data: None)
    link = pool.open("0x" + "11" * 20, url)
    with pytest.raises(Unavailable, match="did not accept within"):
        await wait_open(link, 0.1)
    await pool.close(flush_s=0)
    assert set(names.asked) == {"node.example"} and inside.seen == []


async def test_a13_of_several_addresses_only_the_permitted_are_tried(
    names: Names, inside: Inside
) -> None:
    names.answers = [["169.254.169.254", "::ffff:169.254.169.254", "127.0.0.1"]]
    async with SignedClient(allow_loopback=True) as http:
        assert await http.get_json(f"{inside.url('node.example')}/v1/ping") == {}
    assert inside.seen == ["/v1/ping"]


async def test_a13_a_name_that_is_bound_anew_is_checked_anew(names: Names, inside: Inside) -> None:
    names.answers = [["127.0.0.1"], ["169.254.169.254"]]
    url = f"{inside.url('node.example')}/v1/ping"
    for expected in ("answer", "refusal"):  # a new session has neither connection nor cache
        async with SignedClient(allow_loopback=True) as http:
            if expected == "answer":
                assert await http.get_json(url) == {}
            else:
                with pytest.raises(Unavailable, match="never connected to"):
                    await http.get_json(url)
    assert inside.seen == ["/v1/ping"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::ffff:127.0.0.1]", "[::1]", "[::ffff:7f00:1]", "[2002:7f00:1::]"]
)
async def test_a13_literal_addresses_are_checked_like_names(inside: Inside, host: str) -> None:
    async with SignedClient(allow_loopback=False) as http:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await http.get_json(f"{inside.url(host)}/v1/ping")
    assert inside.seen == []


async def test_a13_redirects_are_not_followed(inside: Inside) -> None:
    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(inside.url("127.0.0.1") + "/secret")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", redirect)
    server = await serve_app(app, "127.0.0.1", 0)
    async with SignedClient(allow_loopback=True) as http:
        with pytest.raises(PeerFault, match="307"):
            await http.get_json(f"{server.url}/v1/ping")
        with pytest.raises(PeerFault, match="307"):
            await http.post_json(f"{server.url}/v1/plan", {})
        with pytest.raises(Redirected):
            await http.session.ws_connect(f"{server.url}/v1/data")
    pool = LinkPool(generate_identity(), lambda link, data: None, allow_loopback=True)
    link = pool.open("0x" + "11" * 20, server.url)
    with pytest.raises(Unavailable, match="did not accept within"):
        await wait_open(link, 0.1)
    await pool.close(flush_s=0)
    await server.close()
    assert inside.seen == []
