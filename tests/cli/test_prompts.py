"""What commands ask at a terminal, and how the question is left."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ASKS = """
from pathlib import Path
import typer
from splitup.cli.command import as_command
from splitup.cli.console import Output, ask_passphrase

@as_command
async def command(*, output: Output) -> None:
    output.out.print(repr(ask_passphrase("account", Path("home/network.json"))))

typer.run(command)
"""


class Terminal:
    """A command whose coroutine asks for a passphrase, at a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master

    def read_until(self, text: str) -> str:
        said = b""
        while text.encode() not in said:
            said += os.read(self._master, 4096)
        return said.decode()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


@contextmanager
def open_terminal() -> Iterator[Terminal]:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", ASKS]
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            terminal = Terminal(process, master)
            asked = terminal.read_until("random one): ").replace("\r\n", "")
            assert "home/passphrase" in asked and "home/network.json" in asked
            yield terminal
        finally:
            process.kill()
            os.close(master)


def test_one_ctrl_c_leaves_the_question_of_a_coroutine() -> None:
    with open_terminal() as terminal:
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("interrupted")
        assert terminal.process.wait() == 130


def test_without_a_terminal_nothing_is_asked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKS], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "''\n", "")


def test_the_end_of_the_input_leaves_it_too() -> None:
    with open_terminal() as terminal:
        terminal.type("\x04")
        terminal.read_until("interrupted")
        assert terminal.process.wait() == 130


@pytest.mark.parametrize("passphrase", ["", "correct horse"])
def test_a_passphrase_is_typed_twice_and_an_empty_one_once(passphrase: str) -> None:
    with open_terminal() as terminal:
        for typed in ("one", "another"):
            terminal.type(f"{typed}\n")
            said = terminal.read_until(": ")
        assert "not the same" in said
        terminal.type(f"{passphrase}\n")
        if passphrase:
            terminal.read_until("The same again: ")
            terminal.type(f"{passphrase}\n")
        terminal.read_until(repr(passphrase))
        assert terminal.process.wait() == 0
