"""``splitup serve`` before a real network, and its keys."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from typer.testing import CliRunner

from splitup.cli.verbs import app
from splitup.devnet.processes import find_program
from tests.builders import HANG_S
from tests.e2e.conftest import MODEL, Network


@contextlib.contextmanager
def run_server(network: Network, *flags: str, model: str = MODEL) -> Iterator[str]:
    """Run ``splitup serve``; give its base URL."""
    command = [find_program("splitup"), "serve", model, "--port", "0", *flags]
    with subprocess.Popen(
        [*command, "--config", network.directory], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"base URL: (\S+)", line)
            assert found, line + process.stderr.read()
            yield found[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()


def run_keys(database: str, *arguments: str) -> dict[str, Any]:
    """Run ``splitup keys`` on a database in this process; return its JSON object."""
    done = CliRunner().invoke(app, ["keys", *arguments, "--keys", database, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found
