"""Checks where a peer's endpoint leads: never into the operator's own network.

An endpoint is chosen by a stranger. The check is made when the socket is created, on the address
that it connects to, so that a name that resolves differently the second time, or an IPv4 address
written as IPv6, cannot evade it. Redirects are not followed.

What is not known to lead to the public internet is refused. Of IPv6 only 2000::/3 does, less what
IANA's registry of special-purpose addresses takes from it, and the addresses that a translator
(NAT64) makes of public IPv4 addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from splitup.core import tuning
from splitup.core.http_session import open_session

_AddressInfo = tuple[Any, ...]
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def _parse(*texts: str) -> _Networks:
    return tuple(ipaddress.ip_network(text) for line in texts for text in line.split())


# where clouds serve credentials; not all of them are link-local
_METADATA: Final = _parse(
    "169.254.169.254 100.100.100.200 168.63.129.16", "fd00:ec2::254 fd20:ce::254 fd00:c1::a9fe:a9fe"
)
# of one machine or one operator; 100.64.0.0/10 is of a carrier, RFC 6598
_LOCAL: Final = _parse(
    "127.0.0.0/8 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10", "::1/128 fc00::/7"
)
# IANA's registries of special-purpose addresses, and multicast; Python's ``is_global`` knows most
# of them, by its version. Anycast relays and tunnels are left out: nodes are not there.
_SPECIAL: Final = _parse(
    "0.0.0.0/8 169.254.0.0/16 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24",
    "198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4",
    "2001::/23 2001:db8::/32 2002::/16 3fff::/20",
)
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # all that IANA has allotted
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052
_ISATAP: Final = frozenset((0x0000_5EFE, 0x0200_5EFE))  # RFC 5214, before an IPv4 address


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

    Loopback and private addresses are refused unless ``allow_loopback`` (a network on one machine
    or in one local network), all others always unless they are public.
    """
    for address in _unwrap(ipaddress.ip_address(text.partition("%")[0])):
        is_local = _is_in(address, _LOCAL)
        if _is_in(address, _METADATA) or not (is_local or _is_public(address)):
            raise EndpointRefused(f"the peer's address {text} is never connected to")
        if is_local and not allow_loopback:
            raise EndpointRefused(
                f"the peer's address {text} is on a private network; "
                "set allow_loopback to permit that"
            )


def _unwrap(address: _Ip) -> tuple[_Ip, ...]:
    """Return all addresses that a connection to one may lead to."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    embedded = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.ipv4_mapped is not None or address in _NAT64:
        return (embedded,)
    if int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
        return address, embedded
    return (address,)


def _is_public(address: _Ip) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return address.is_global and not _is_in(address, _SPECIAL)


def _is_in(address: _Ip, networks: _Networks) -> bool:
    return any(address in network for network in networks)


def make_socket_factory(*, allow_loopback: bool) -> Callable[[_AddressInfo], socket.socket]:
    """Return a socket factory for aiohttp that checks the resolved address of every connection."""

    def make_socket(info: _AddressInfo) -> socket.socket:
        family, kind, protocol, _, address = info
        check_ip(address[0], allow_loopback=allow_loopback)
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made

    return make_socket


def open_peer_session(*, allow_loopback: bool) -> aiohttp.ClientSession:
    """Return a session for connections to peers; each request sets its own time limit."""
    return open_session(
        connector=aiohttp.TCPConnector(
            limit=tuning.MAX_LINKS,
            socket_factory=make_socket_factory(allow_loopback=allow_loopback),
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=tuning.HTTP_CONNECT_S),
    )
