"""Hosts for tests: network namespaces with addresses, names and TLS, joined by a switch.

Each host is a thread in a network namespace of its own, with an event loop; what it starts lives in
that namespace. Nothing of it is visible in the machine's own namespace, and it is gone when the
threads end. Addresses are public ones: to programs inside, this is the Internet.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import datetime
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from splitup.devnet.processes import make_death_pact

T = TypeVar("T")

DOMAIN: Final = "example.org"
_NETWORK: Final = "11.0.0"  # public addresses: programs refuse private ones unless told otherwise
_NEW_NETWORK_NAMESPACE: Final = 0x40000000  # CLONE_NEWNET
# a file of names of its own, as every host has, in a mount namespace of its own
_WITH_NAMES: Final = 'mount --bind "$0" /etc/hosts && exec "$@"'
_TLS_PORT: Final = 443
_STOP_S: Final = 20.0


def find_obstacle() -> str:
    """Return why this machine cannot have such hosts, "" if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"'{program}' is missing; install it with: apt-get install {package}"
    done = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, check=False)
    return f"no network namespace can be made: {done.stderr.decode()}" if done.returncode else ""


class Host:
    """One host; its methods may be called from any thread."""

    def __init__(self, name: str, folder: Path, number: int) -> None:
        """Start the host's thread in a new network namespace; ``folder`` is its disk."""
        self.name, self.folder = name, folder
        self.address = f"{_NETWORK}.{number}"
        self.environment: dict[str, str] = {}
        self.processes: list[asyncio.subprocess.Process] = []
        self._names: Path | None = None
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        folder.mkdir(parents=True)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self.thread_id = self._ready.result()

    def _serve(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_NETWORK_NAMESPACE):
            self._ready.set_exception(OSError(ctypes.get_errno(), "unshare"))
            return
        self._ready.set_result(threading.get_native_id())
        self._loop.run_forever()
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin to run a coroutine on this host."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[[], T]) -> T:
        """Run a function on this host, and wait for its result."""

        async def run() -> T:
            return work()

        return self.do(run()).result()

    def configure(self, names: Path, **environment: str) -> None:
        """Set the file of names and the environment of all commands."""
        self._names = names
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        home = str(self.folder)
        self.environment = {**os.environ, "PATH": programs, "HOME": home, **environment}

    def begin(self, command: str) -> concurrent.futures.Future[str]:
        """Begin to run a shell command on this host; the result is its stdout, or its failure."""
        return self.do(self._run(command))

    async def _run(self, command: str) -> str:
        process = await self._spawn(command, asyncio.subprocess.PIPE)
        out, error = await process.communicate()
        if process.returncode:
            text = f"{out.decode()}{error.decode()}"
            raise AssertionError(f"{self.name}: {command} ended with {process.returncode}: {text}")
        return out.decode()

    def serve(self, command: str) -> None:
        """Start a program that runs until the host is stopped; its log is ``NAME.log``."""

        async def start() -> None:
            with (self.folder / f"{self.name}.log").open("ab") as log:
                self.processes.append(await self._spawn(f"exec {command}", log.fileno()))

        self.do(start()).result()

    async def _spawn(self, command: str, output: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "sh", "-c", _WITH_NAMES, str(self._names)),
            *("sh", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=self.folder,
            env=self.environment,
            preexec_fn=make_death_pact(),
        )

    def check_running(self) -> None:
        """Raise AssertionError, with the end of the log, when a program has ended."""
        for process in self.processes:
            if process.returncode is not None:
                raise AssertionError(f"{self.name} ended: {self.read_log()}")

    def read_log(self) -> str:
        """Return the end of the log."""
        path = self.folder / f"{self.name}.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def offer_tls(self, certificate: ssl.SSLContext, port: int) -> None:
        """Accept TLS on this host's address, and pass it on to a port of its loopback."""

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, ssl.SSLError):
                while data := await reader.read(1 << 18):
                    writer.write(data)
                    await writer.drain()
            with contextlib.suppress(OSError, ssl.SSLError, RuntimeError):
                writer.write_eof() if writer.can_write_eof() else writer.close()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inner = await asyncio.open_connection("127.0.0.1", port)
            except OSError:  # the program behind it does not listen yet
                writer.close()
                return
            try:
                await asyncio.gather(pipe(reader, inner[1]), pipe(inner[0], writer))
            finally:
                writer.transport.abort()
                inner[1].transport.abort()

        async def listen() -> None:
            self._servers.append(
                await asyncio.start_server(accept, self.address, _TLS_PORT, ssl=certificate)
            )

        self.do(listen()).result()

    def request_stop(self) -> None:
        """Ask what ``serve`` started to end."""

        def terminate() -> None:
            for process in self.processes:
                if process.returncode is None:
                    process.terminate()

        self.call(terminate)

    def stop_programs(self) -> None:
        """End what ``serve`` started."""

        async def end() -> None:
            for process in self.processes:
                try:
                    await asyncio.wait_for(process.wait(), _STOP_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()
            self.processes.clear()

        self.request_stop()
        self.do(end()).result()

    def stop(self) -> None:
        """End everything that runs here, and the namespace."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _ in range(3):  # aborted transports close their sockets in the loop's next turns
                await asyncio.sleep(0)

        self.stop_programs()
        self.do(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Internet:
    """A switch, and the hosts that are joined by it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._switch = Host("switch", folder / "switch", 0)
        self._authority = _Authority()
        self.authority_file = folder / "authority.pem"
        self.authority_file.write_bytes(self._authority.certificate)
        self._ip(self._switch, "link add bridge type bridge")
        self._ip(self._switch, "link set bridge up")

    def add(self, name: str) -> Host:
        """Return a new host, which reaches all others."""
        number = len(self.hosts) + 1
        host = Host(name, self.folder / name, number)
        self.hosts[name] = host
        peer = f"to-{number}"
        self._ip(host, "link set lo up")
        self._ip(host, f"link add eth0 type veth peer name {peer} netns {self._switch.thread_id}")
        self._ip(self._switch, f"link set {peer} master bridge up")
        self._ip(host, f"address add {host.address}/24 dev eth0")
        self._ip(host, "link set eth0 up")
        return host

    def publish(self, **ports: int) -> None:
        """Give every host its names, and those with a port TLS in front of it."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"{host.address} {name}.{DOMAIN}" for name, host in self.hosts.items()]
        names = self.folder / "hosts"
        names.write_text("\n".join(lines) + "\n")
        for name, host in self.hosts.items():
            port = ports.get(name.replace("-", "_"))
            if port is not None:
                host.offer_tls(self._authority.issue(f"{name}.{DOMAIN}", host.folder), port)
            host.configure(names, SSL_CERT_FILE=str(self.authority_file))

    def stop(self) -> None:
        """Stop all hosts, after all programs were asked to end at once."""
        for host in self.hosts.values():
            host.request_stop()
        for host in [*reversed(self.hosts.values()), self._switch]:
            host.stop()

    def _ip(self, host: Host, arguments: str) -> None:
        def run() -> subprocess.CompletedProcess[str]:
            command = ["ip", *arguments.split()]
            return subprocess.run(command, capture_output=True, text=True, check=False)

        done = host.call(run)
        assert done.returncode == 0, f"ip {arguments}: {done.stderr}"


class _Authority:
    """Issues certificates that everybody here trusts."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the authority")])
        signed = self._build(self._name, self._key.public_key(), is_authority=True, names=())
        self.certificate = signed.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str, folder: Path) -> ssl.SSLContext:
        """Return what a server with this name needs."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signed = self._build(subject, key.public_key(), is_authority=False, names=(name,))
        path = folder / "tls.pem"
        path.write_bytes(
            signed.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context

    def _build(
        self,
        subject: x509.Name,
        public: ec.EllipticCurvePublicKey,
        *,
        is_authority: bool,
        names: tuple[str, ...],
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256())
