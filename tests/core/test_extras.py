"""Extras are found when they are installed, and the market's programs work without them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splitup.core import extras, source_tree
from splitup.core.errors import ConfigurationError
from splitup.core.extras import require
from splitup.core.source_tree import compose_package_install

WITHOUT = """
import sys
class Deleted:
    def find_spec(self, name, path=None, target=None):
        if name.partition("_")[2] in ("edge", "gateway", "private", "speculation"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Deleted())
from splitup.core.extras import find_extras
assert find_extras() == {}, find_extras()
import splitup.cli.commands.demo, splitup.cli.commands.generate
import splitup.client.network, splitup.devnet.network
import splitup.demo.run, splitup_node.node, splitup_oracle.member.service
import splitup_deploy.cli.register
from splitup.cli.verbs import app
app(["--help"], standalone_mode=False)
"""


@pytest.fixture(autouse=True)
def _look_again() -> None:
    extras.find_extras.cache_clear()


def test_the_four_extras_are_installed() -> None:
    assert set(extras.find_extras()) == {"edge", "gateway", "private", "speculation"}


def test_the_programs_work_without_extras() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " demo " in done.stdout and "Commands of extras" not in done.stdout


def test_an_extra_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "tests.core.no_such_library_inside:EXTRA", extras._GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [broken])
    assert extras.find_extras() == {}, "its folder was deleted"
    extras.find_extras.cache_clear()

    def load(self: EntryPoint) -> None:
        raise ModuleNotFoundError("No module named 'grpc'", name="grpc")

    monkeypatch.setattr(EntryPoint, "load", load)
    with pytest.raises(ModuleNotFoundError, match="grpc"):
        extras.find_extras()


def test_what_is_not_installed_is_named_with_the_way_to_install_it() -> None:
    require("json")
    with pytest.raises(ConfigurationError) as raised:
        require("json", "segnolike", "pillowlike")
    expected = f"not installed: segnolike, pillowlike; run: {compose_package_install('serve')}"
    assert str(raised.value) == expected


@pytest.mark.parametrize("extra", ["", "edge"])
@pytest.mark.parametrize("tree", [None, Path("/clones/splitup")])
def test_no_command_installs_the_package_of_that_name_from_pypi(
    extra: str, tree: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PyPI it is somebody else's."""
    monkeypatch.setattr(source_tree, "find_source_tree", lambda: tree)
    *_, package = shlex.split(source_tree.compose_package_install(extra))
    assert package.startswith("/clones/splitup" if tree else "splitup-….whl")
    assert package.endswith(f"[{extra}]" if extra else package)


def test_no_guide_installs_the_package_of_that_name_from_pypi() -> None:
    root = source_tree.find_source_tree()
    assert root is not None
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "extras").rglob("*.md")]
    wrong = re.compile(r"install (-\S+ )*'?splitup[\[' `]")
    assert [page.name for page in pages if wrong.search(page.read_text())] == []


@pytest.mark.parametrize("command", ["serve", "keys list", "relay --to 127.0.0.1:1"])
def test_commands_that_lack_a_package_say_so(command: str) -> None:
    """In a process where the packages of [serve] cannot be found."""
    code = """
import importlib.util, sys
find = importlib.util.find_spec
hidden = {"llguidance", "PIL", "segno", "sqlalchemy"}
importlib.util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)
from splitup.cli.app import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"run: {compose_package_install('serve')}" in done.stderr


def test_a_command_of_an_extra_has_help() -> None:
    from splitup.cli.verbs import app

    done = CliRunner().invoke(app, ["edge", "--help"])
    assert done.exit_code == 0 and "splitup edge" in done.output
