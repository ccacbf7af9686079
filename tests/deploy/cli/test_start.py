"""How the program starts: quickly, without a device, and quiet when it is interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from splitup_deploy.cli.options import SourceOptions

from splitup.core.errors import InvalidInput
from tests.deploy.llamas import TINY
from tests.parameters import some_of

HEAVY = ("numpy", "splitup.config", "tinygrad", "eth_account", "tokenizers", "rich.progress")
LIST_LOADED = f"""
import sys
from splitup_deploy.cli.app import main
try:
    main()
finally:
    print("loaded:", *(name for name in {HEAVY!r} if name in sys.modules))
"""
INTERRUPT = """
import sys
module = sys.argv.pop(1)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from splitup_deploy.cli.app import main
main()
"""


def run(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )


VERBS = ["", "register", "inspect", "calibrate", "list", "usage"]


@pytest.mark.parametrize("verb", some_of(VERBS, "", "register"))  # the others import no more
def test_help_loads_nothing_heavy(verb: str) -> None:
    done = run(LIST_LOADED, *([verb] if verb else []), "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout and done.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize(
    "verb", some_of(["inspect", "register --dry-run --name x --model"], "inspect")
)
def test_a_dry_run_loads_no_chain_client(verb: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    done = run(LIST_LOADED, *verb.split(), str(tmp_path), "--target-vram", "1GB", "--json")
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert loaded[0] == "loaded:" and "tinygrad" in loaded and "eth_account" not in loaded


def test_a_model_is_given_once() -> None:
    assert SourceOptions(argument="m").read() == SourceOptions(model="m").read() == "m"
    for options in (SourceOptions(), SourceOptions(argument="m", model="m")):
        with pytest.raises(InvalidInput, match="give one model"):
            options.read()


def test_version() -> None:
    done = run("from splitup_deploy.cli.app import main; main()", "--version")
    assert done.returncode == 0 and done.stdout.startswith("splitup-deploy ")


def test_the_command_needs_no_device_and_no_compiler() -> None:
    """On a fresh machine tinygrad finds none, and would say so while it is imported."""
    nowhere = {"PATH": "/nonexistent", "CC": "/nonexistent/clang", "HOME": "/nonexistent"}
    done = run(
        "import splitup_deploy.frontends; from splitup_deploy.cli.app import main; main()",
        "--help",
        env=nowhere,
    )
    assert done.returncode == 0, done.stderr
    assert "--install-completion" in done.stdout


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_an_interruption_while_it_loads_is_quiet(module: str) -> None:
    done = run(INTERRUPT, module, "inspect", ".", "--target-vram", "1GB")
    assert done.returncode == 130
    assert done.stdout == "" and done.stderr in ("", "interrupted\n")
