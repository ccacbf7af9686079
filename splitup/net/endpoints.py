"""Checks where a peer's endpoint leads: never into the operator's own network.

An endpoint is chosen by a stranger. The check is made when the socket is created, on the address
that it connects to, so that a name that resolves differently the second time, or an IPv4 address
written as IPv6, cannot evade it. Redirects are not followed.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from splitup.core import tuning

_AddressInfo = tuple[Any, ...]
_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")  # carrier-grade NAT, RFC 6598
_METADATA: Final = frozenset(  # where clouds serve credentials; not all of them are link-local
    ipaddress.ip_address(text) for text in ("169.254.169.254", "100.100.100.200", "fd00:ec2::254")
)


class EndpointRefused(OSError):
    """A peer's endpoint leads to an address that is not allowed for peers."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EACCES, message)


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own, which no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_ip(text: str, *, allow_loopback: bool) -> None:
    """Raise EndpointRefused unless this address is allowed for peers.

    Link-local, metadata, multicast and unspecified addresses are always refused, loopback and
    private ones unless ``allow_loopback`` (a network on one machine or in one local network).
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    for candidate in (address, mapped):
        if candidate is None:
            continue
        if (
            candidate in _METADATA
            or candidate.is_link_local
            or candidate.is_multicast
            or candidate.is_unspecified
        ):
            raise EndpointRefused(f"the peer's address {text} is never connected to")
        local = (
            candidate.is_private
            or candidate.is_loopback
            or (isinstance(candidate, ipaddress.IPv4Address) and candidate in _SHARED)
        )
        if local and not allow_loopback:
            raise EndpointRefused(
                f"the peer's address {text} is on a private network; "
                "set allow_loopback to permit that"
            )


def make_socket_factory(*, allow_loopback: bool) -> Callable[[_AddressInfo], socket.socket]:
    """Return a socket factory for aiohttp that checks the resolved address of every connection."""

    def make_socket(info: _AddressInfo) -> socket.socket:
        family, kind, protocol, _, address = info
        check_ip(address[0], allow_loopback=allow_loopback)
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    return make_socket


async def _refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    # aiohttp follows redirects of WebSocket handshakes and has no option against it
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise aiohttp.ClientConnectionError(f"{request.url} redirects elsewhere")
    return response


def open_peer_session(*, allow_loopback: bool) -> aiohttp.ClientSession:
    """Return a session for connections to peers; each request sets its own time limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=tuning.MAX_LINKS,
            socket_factory=make_socket_factory(allow_loopback=allow_loopback),
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=tuning.HTTP_CONNECT_S),
        middlewares=(_refuse_redirects,),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )
