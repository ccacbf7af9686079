"""The files of a devnet's directory that outlive its processes, and the lock of its supervisor.

``devnet.json`` holds the ports of all parties, the number of nodes and their VRAM. ``mnemonic``
(0600) is the seed of Anvil's test accounts. ``lock`` is held by the running supervisor and contains
its process id; ``runtime.json`` lists the processes that it started.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitup.core import limits
from splitup.core.errors import ConfigurationError
from splitup.core.files import find_holder, take_lock, write_whole
from splitup.devnet.ports import find_free_ports, hold_port, is_port_free
from splitup.storage.private_files import explain_write

OBJECTS: Final = "objects"  # the object store's directory
GATEWAYS: Final = 2  # each can serve when the other is down
DEFAULT_MEMBERS: Final = 4  # f = 1: the smallest committee that survives a faulty member
MAX_NODES: Final = 64  # one machine; each node is two processes
_VERSION: Final = 2


class DevnetState(BaseModel):
    """The shape of a devnet, fixed at its first start."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", defer_build=True)

    version: int = Field(default=_VERSION, ge=_VERSION, le=_VERSION)
    nodes: int = Field(ge=1, le=MAX_NODES)
    vram_bytes: int = Field(ge=1)
    genesis_time_s: int = Field(ge=1)  # of the chain's first block
    chain_port: int = Field(ge=1, le=65_535)
    gateway_ports: tuple[int, ...] = Field(min_length=GATEWAYS, max_length=GATEWAYS)
    member_ports: tuple[int, ...] = Field(
        min_length=DEFAULT_MEMBERS, max_length=limits.MAX_COMMITTEE
    )
    node_ports: tuple[int, ...] = Field(max_length=MAX_NODES)

    @classmethod
    def create(cls, *, nodes: int, vram_bytes: int, members: int = DEFAULT_MEMBERS) -> Self:
        """Choose free ports for a network of ``nodes`` nodes under ``members`` = 3f+1 members."""
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigurationError(f"--nodes is {nodes}; give a number from 1 to {MAX_NODES}")
        if not DEFAULT_MEMBERS <= members <= limits.MAX_COMMITTEE or members % 3 != 1:
            raise ConfigurationError(
                f"--members is {members}; a committee has 3f + 1 members, of whom f may fail: "
                f"give 4, 7, 10 … or {limits.MAX_COMMITTEE}"
            )
        ports = find_free_ports(1 + GATEWAYS + members + nodes)
        return cls(
            nodes=nodes,
            vram_bytes=vram_bytes,
            genesis_time_s=int(time.time()),
            chain_port=ports[0],
            gateway_ports=tuple(ports[1 : 1 + GATEWAYS]),
            member_ports=tuple(ports[1 + GATEWAYS : 1 + GATEWAYS + members]),
            node_ports=tuple(ports[1 + GATEWAYS + members :]),
        )

    @property
    def members(self) -> int:
        return len(self.member_ports)

    def resize(self, nodes: int) -> Self:
        """Return the same network with ``nodes`` nodes; nodes that exist keep their ports."""
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigurationError(f"--nodes is {nodes}; give a number from 1 to {MAX_NODES}")
        missing = max(0, nodes - len(self.node_ports))
        ports = (*self.node_ports, *find_free_ports(missing))
        return self.model_copy(update={"nodes": nodes, "node_ports": ports})

    def save(self, directory: Path) -> None:
        write_json(directory / "devnet.json", self.model_dump(mode="json"))

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """Read the state of an earlier start, None when there was none."""
        file = directory / "devnet.json"
        try:
            return cls.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            raise ConfigurationError(
                f"{file} is damaged or of another version; start a new network with another --dir"
            ) from None

    def named_ports(self) -> list[tuple[str, int]]:
        """Return every port in use with the name of its owner."""
        members = [(f"member-{i}", port) for i, port in enumerate(self.member_ports)]
        nodes = [(f"node-{i}", port) for i, port in enumerate(self.node_ports[: self.nodes])]
        gateways = [(f"gateway-{i}", port) for i, port in enumerate(self.gateway_ports)]
        return [("chain", self.chain_port), *gateways, *members, *nodes]

    def check_ports(self, directory: Path) -> None:
        """Raise ConfigurationError naming the first port that somebody else has taken."""
        for name, port in self.named_ports():
            if not is_port_free(port):
                raise ConfigurationError(
                    f"port {port}, which this network's {name} uses, is taken by another program; "
                    f"stop that program, or start a second network with: splitup up --dir OTHER "
                    f"({directory} stays as it is)"
                )
            hold_port(port)  # also while its server restarts


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process as ``runtime.json`` lists it."""

    name: str
    pid: int
    log: str


class Lock:
    """The lock of a directory's network; held until ``release`` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; raise ConfigurationError naming the process that holds it."""
        make_directory(self._directory)
        with explain_write(self._directory, "--dir"):
            self._descriptor = take_lock(self._directory)
        if self._descriptor is None:
            raise ConfigurationError(
                f"the network in {self._directory} is running already "
                f"(process {find_holder(self._directory)}); "
                f"stop it with: splitup down --dir {self._directory}"
            )

    def release(self) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


def make_endpoint(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def get_key_files(directory: Path, name: str) -> tuple[Path, Path]:
    """Return a party's keystore and the file of its passphrase."""
    return directory / name / "keystore.json", directory / name / "passphrase"


def make_directory(directory: Path) -> None:
    """Make a network's directory if it is missing; raise ConfigurationError when that fails."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return
        problem = "no right to write there"
    except OSError as error:
        problem = error.strerror or str(error)
    raise ConfigurationError(
        f"{directory} cannot hold a network ({problem}); choose another with --dir"
    )


@dataclass(frozen=True, slots=True)
class Runtime:
    """The notes of a supervisor about its processes; valid while it holds the directory's lock."""

    ready: bool
    processes: tuple[RunningProcess, ...]
    supervisor: int = 0  # process id of the writer: an earlier one's notes may be there still


def write_runtime(directory: Path, runtime: Runtime) -> None:
    """Write ``runtime.json``."""
    write_json(directory / "runtime.json", asdict(runtime))


def read_runtime(directory: Path) -> Runtime:
    """Return what the supervisor wrote last, or an empty runtime."""
    try:
        value = json.loads((directory / "runtime.json").read_text())
        rows = [
            RunningProcess(str(r["name"]), int(r["pid"]), str(r["log"])) for r in value["processes"]
        ]
        return Runtime(bool(value["ready"]), tuple(rows), int(value["supervisor"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Runtime(False, ())


def is_ready(directory: Path, supervisor: int) -> bool:
    """Return whether the network that this process runs is ready."""
    runtime = read_runtime(directory)
    return (
        runtime.ready and runtime.supervisor == supervisor and find_holder(directory) == supervisor
    )


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` in one step, so that a reader never sees half a file."""
    write_whole(path, json.dumps(value, indent=2) + "\n")
