"""A raw TCP relay: every connection to one address is passed on to another, byte for byte.

It lets a phone on the local network reach a server that listens on this machine's loopback alone.
Whatever speaks TCP passes, WebSockets too. One side's end of data is passed on while the other side
still sends (half-close). A side that reads slowly slows the other one down: a connection holds
some 256 KB at most. With TLS, which browsers demand, it is the relay that speaks it; TLS in
asyncio has no half-close, so that there the end of either side ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import socket
import ssl
import struct
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

from splitup.core.errors import ConfigurationError, InvalidInput
from splitup.net.admission import get_group

_log = logging.getLogger("splitup.tcp_relay")

CONNECT_S: Final = 5.0  # to the target, and for a TLS handshake
CERTIFICATE_DAYS: Final = 30
BACKLOG: Final = 128
_PIECE_BYTES: Final = 64 * 1024
_DOCUMENTATION: Final = ("192.0.2.1", 9)  # RFC 5737; a UDP socket that connects sends nothing


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in "HOST:PORT" or "[IPv6]:PORT"; raise InvalidInput."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 65_536):
            raise InvalidInput(f"'{text:.100}' is no address; write HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TcpRelay:
    """Listens at one address and passes connections on to another. Use ``async with``."""

    def __init__(
        self,
        listen: HostPort,
        target: HostPort,
        *,
        connections: int = 256,
        per_address: int = 64,
        idle_s: float = 600.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Pass on so many connections at once, also of one address, until one is silent."""
        self._listen = listen
        self._target = target
        self._most, self._most_of_one, self._idle_s = connections, per_address, idle_s
        self._tls = tls
        self._open: Counter[str] = Counter()  # connections by the other side's host
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen; raise ConfigurationError when the address is taken or is not this machine's."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                self._listen.host, self._listen.port, type=socket.SOCK_STREAM
            )
            self._socket = socket.create_server(
                found[0][4], family=found[0][0], backlog=BACKLOG, reuse_port=False
            )
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {self._listen}: {error}") from None
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._accepting.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._accepting, *self._tasks, return_exceptions=True)
        self._socket.close()

    @property
    def port(self) -> int:
        """The real port when 0 was asked for."""
        return int(self._socket.getsockname()[1])

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return self._open.total()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor is left, or the other side has gone
                _log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            host = get_group(address)  # who has one address of IPv6 has 2^64
            if self._open.total() >= self._most or self._open[host] >= self._most_of_one:
                connection.close()
                continue
            self._open[host] += 1
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(self._forget, host))

    def _forget(self, host: str, _: asyncio.Task[None]) -> None:
        self._open[host] -= 1
        if not self._open[host]:
            del self._open[host]

    async def _serve(self, connection: socket.socket) -> None:
        near = far = None
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                near = await _open_streams(connection, self._tls)
                far = await asyncio.open_connection(
                    self._target.host, self._target.port, limit=_PIECE_BYTES
                )
            async with asyncio.timeout(self._idle_s) as idle, asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(near[0], far[1], idle))
                group.create_task(self._pass_on(far[0], near[1], idle))
            await _close(near[1], far[1])
        except* OSError as errors:  # timeouts, too
            if near is not None and far is None:
                _log.warning("%s cannot be reached: %s", self._target, errors.exceptions[0])
        finally:
            for streams in (near, far):
                if streams is not None:
                    _abort(streams[1])
            if near is None:
                connection.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: asyncio.Timeout
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
            idle.reschedule(loop.time() + self._idle_s)
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()


async def _open_streams(
    connection: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_PIECE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        connection,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else CONNECT_S,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _close(*writers: asyncio.StreamWriter) -> None:
    """Close connections after what is still to be sent; give up after a while."""
    for writer in writers:
        writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_S):
            for writer in writers:
                await writer.wait_closed()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Reset a connection that is still open: an error must not look like the end of the data."""
    if not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
    writer.transport.abort()


# ---- a certificate made on the spot ------------------------------------------------------------


def make_certificate(hosts: list[str]) -> tuple[ssl.SSLContext, str]:
    """Make a key and a certificate for names and addresses; neither is stored.

    Returns what speaks TLS with them, and the certificate's SHA-256 fingerprint.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SplitUp relay")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # a phone's clock may be slow
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.IPAddress(ipaddress.ip_address(host))
                    if _is_ip(host)
                    else x509.DNSName(host)
                    for host in dict.fromkeys(hosts)
                ]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as folder:  # the ssl module reads keys from files alone
        path = Path(folder) / "relay.pem"
        path.touch(mode=0o600)
        path.write_bytes(pem)
        context.load_cert_chain(path)
    return context, certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def find_local_address() -> str:
    """Return the address by which the local network reaches this machine, else 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_DOCUMENTATION)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
