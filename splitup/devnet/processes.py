"""Child processes of a devnet: started with a log each, stopped by their own process id.

Every child is a session of its own, so that Ctrl-C reaches only the supervisor, which stops them
in order. On Linux the kernel also stops the children of a supervisor that was killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup.core.errors import ConfigurationError, Unavailable
from splitup.core.files import follow_no_link
from splitup.core.source_tree import compose_package_install

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
_TAIL_BYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class DevnetProcess:
    """A running process of the network."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_running(self) -> bool:
        return self.process.poll() is None

    def check_running(self) -> None:
        """Raise Unavailable with the end of the log when the process has ended."""
        if not self.is_running():
            raise Unavailable(self.describe_end())

    def describe_end(self) -> str:
        """Return how an ended process ended, and the end of its log."""
        return f"{self.describe_exit()}, which ends with:\n{read_tail(self.log)}"

    def describe_exit(self) -> str:
        """Return how an ended process ended, and where its log is."""
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}, see {self.log}"

    def request_stop(self) -> None:
        """Send SIGTERM, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the process: SIGTERM, and SIGKILL when it has not gone after ``timeout_s``."""
        self.request_stop()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def spawn(
    name: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> DevnetProcess:
    """Start a process whose output goes to ``log`` (appended); by default as this one runs.

    Call it from a thread that outlives the child: at its end the kernel stops the child.
    Raises ConfigurationError when the program cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=follow_no_link) as output:
        output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} start {name}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
                preexec_fn=make_death_pact(),
            )
        except OSError as error:
            raise ConfigurationError(
                f"{command[0]} cannot be started ({error.strerror}); install SplitUp again: "
                f"{compose_package_install()}"
            ) from None
    return DevnetProcess(name, process, log)


async def run_program(*command: str | Path) -> dict[str, Any]:
    """Run a program to its end and return the JSON object it prints; raise Unavailable."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=make_death_pact(),
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        said = (err or out).decode(errors="replace").strip()
        raise Unavailable(f"{Path(command[0]).name} failed: {said[-800:]}")
    value: dict[str, Any] = json.loads(out)
    return value


def find_program(name: str) -> Path:
    """Return the path of one of SplitUp's programs, which pip puts beside this interpreter."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigurationError(
            f"the program {path} is missing; install SplitUp again: {compose_package_install()}"
        )
    return path


def read_tail(log: Path, lines: int = 12, *, start: int = 0) -> str:
    """Return the last lines of a log from byte ``start`` on, indented; it may be missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    tail = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"    {line}" for line in tail) or "    (the log is empty)"


def make_death_pact() -> Callable[[], None] | None:
    """Return what a process runs between fork and exec (``preexec_fn``) to end with this one.

    The kernel sends it SIGTERM when the thread that started it ends, however this process dies;
    exec keeps that. None where the kernel cannot: only Linux can.
    """
    return None if _LIBC is None else functools.partial(_die_with, os.getpid())


def _die_with(parent: int) -> None:
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew of the wish
        os.kill(os.getpid(), signal.SIGKILL)
