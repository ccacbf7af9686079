"""The decorator of all commands: flags, output, errors and exit codes."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.core import event_loop
from splitup.core.errors import InvalidInput, Unavailable


@dataclass(frozen=True, slots=True)
class Inner:
    size: Annotated[int, typer.Option("--size", help="A size.")]
    name: Annotated[str, typer.Option("--name")] = "a"


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    deep: Annotated[bool, typer.Option("--deep")] = False


def invoke(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_fields_of_nested_options_are_flags() -> None:
    found: list[Outer] = []

    @as_command
    async def command(options: Outer, *, output: Output) -> None:
        """Say something."""
        await asyncio.sleep(0)
        found.append(options)
        output.out.print("done")

    done = invoke(command, "--size", "3", "--deep")
    assert (done.exit_code, done.stdout, found) == (0, "done\n", [Outer(Inner(3), True)])
    assert "Missing option" in invoke(command).output
    shown = invoke(command, "--help").output
    assert "Say something." in shown and "--json" not in shown


def test_ctrl_c_before_a_command_begins_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    @as_command
    async def command() -> None:
        """Do nothing."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(event_loop, "run", interrupt)
    assert invoke(command).exit_code == 130
    gc.collect()  # pytest fails a test that leaves a coroutine which was never awaited


def test_a_result_is_json_or_text() -> None:
    @as_command
    def command(*, output: JsonOutput) -> None:
        output.give({"a": 1}, lambda: output.out.print("one"))

    assert invoke(command).stdout == "one\n"
    assert json.loads(invoke(command, "--json").stdout) == {"a": 1}


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InvalidInput("no such file"), 2, "error: no such file\n"),
        (Unavailable("the chain is gone"), 1, "error: the chain is gone\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: BaseException, code: int, said: str
) -> None:
    @as_command(interrupted="stopped")
    async def command(*, output: JsonOutput) -> None:
        raise error

    done = invoke(command)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", said)
    if code != 130:
        printed = json.loads(invoke(command, "--json").stdout)
        assert printed == {"error": said.removeprefix("error: ").rstrip()}


def test_a_program_that_logs_prints_no_warning_beside_its_log() -> None:
    code = """
import logging, typer
from splitup.cli.command import as_command, start_log

@as_command
def command() -> None:
    logging.getLogger("splitup.a").warning("first")
    start_log(logging.StreamHandler(), logging.INFO)
    logging.getLogger("splitup.a").warning("second\\nthird")

app = typer.Typer()
app.command()(command)
app([])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["first", "WARNING:splitup.a:second\ufffdthird"]


def test_what_several_calls_wait_for_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    screen = Console(file=shown, width=80)
    monkeypatch.setattr(Output, "open", lambda _: Output(False, screen, screen))

    @as_command
    def command() -> None:
        """Ask."""
        for server in ("the chain", "the chain", "the store"):
            logging.getLogger("splitup.chain").warning("%s has not answered", server)

    assert invoke(command).exit_code == 0
    assert shown.getvalue() == "the chain has not answered\nthe store has not answered\n"


def test_a_hint_stands_until_the_result_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal only; what a result prints on stdout begins on an empty line."""
    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(Output, "open", lambda _: Output(False, screen, screen))

    @as_command(hint="asking the chain")
    def command(*, output: JsonOutput) -> None:
        """Ask."""
        output.give({}, lambda: output.out.print("some nodes"))

    assert invoke(command).exit_code == 0
    assert shown.getvalue() == "\r\x1b[2Kasking the chain\r\x1b[2Ksome nodes\n"
