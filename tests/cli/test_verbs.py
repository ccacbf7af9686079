"""The command line as a whole: every verb has help, and help is fast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from splitup_deploy.cli.commands import COMMANDS as DEPLOY_COMMANDS
from splitup_node.cli.app import COMMANDS as NODE_COMMANDS
from typer.testing import CliRunner

from splitup.cli.verbs import VERBS, app
from splitup.core.extras import Command, find_commands

RUNNER = CliRunner()
# each takes a tenth of a second or more to import, and no help text needs it
SLOW = {"web3", "eth_account", "aiohttp", "boto3", "botocore", "tokenizers", "tinygrad", "py_ecc"}


ALL = {**VERBS, **find_commands("splitup")}


@pytest.mark.parametrize("verb", ALL)
def test_every_verb_has_a_command_with_help(verb: str) -> None:
    assert callable(getattr(import_module(ALL[verb].module), ALL[verb].function))
    done = RUNNER.invoke(app, [verb, "--help"])
    assert (done.exit_code, done.output.splitlines()[0].split()[:3]) == (
        0,
        ["Usage:", "splitup", verb],
    )


@pytest.mark.parametrize(
    ("package", "commands"),
    [
        ("splitup.cli.commands", VERBS),
        ("splitup_node.cli", NODE_COMMANDS),
        ("splitup_deploy.cli", DEPLOY_COMMANDS),
    ],
)
def test_every_function_of_a_command_is_registered(
    package: str, commands: dict[str, Command]
) -> None:
    folder = Path(import_module(package).__path__[0])
    functions = {
        (f"{package}.{path.stem}", name)
        for path in folder.glob("*.py")
        for name in re.findall(r"\n\n@as_command.*\n(?:async )?def (\w+)\(", path.read_text())
    }
    assert functions == {(command.module, command.function) for command in commands.values()}


def test_every_verb_is_listed() -> None:
    listed = RUNNER.invoke(app, ["--help"]).output
    assert all(f"  {verb} " in listed for verb in ALL)


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        "import splitup\n"
        "from splitup.cli.verbs import VERBS\n"
        "from splitup.core.extras import find_commands\n"
        "for verb in {**VERBS, **find_commands('splitup')}.values(): import_module(verb.module)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not SLOW & set(done.stdout.split())


def test_version_and_unknown_verbs() -> None:
    assert RUNNER.invoke(app, ["--version"]).output == f"splitup {version('splitup')}\n"
    done = RUNNER.invoke(app, ["genrate"])
    assert done.exit_code == 2
    assert "No such command 'genrate'. Did you mean 'generate'?" in done.output
    assert "No such command 'xyz'.\n" in RUNNER.invoke(app, ["xyz"]).output


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_ctrl_c_while_loading_is_quiet(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runpy; "
    code += (
        "sys.argv = ['splitup', 'status']; runpy.run_module('splitup.cli.app', None, '__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_completion_is_offered() -> None:
    assert "--install-completion" in RUNNER.invoke(app, ["--help"]).output
    command = [sys.executable, "-m", "splitup.cli.app"]
    environment = {**os.environ, "_SPLITUP_COMPLETE": "complete_bash", "COMP_WORDS": "splitup do"}
    done = subprocess.run(
        command,
        env={**environment, "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert {"down", "doctor"} == set(done.stdout.split()), done.stderr
