from __future__ import annotations

from importlib.metadata import version

from splitup_oracle.cli.app import app
from typer.testing import CliRunner


def test_version_and_completion() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"splitup-oracle {version('splitup')}\n"
    assert "--install-completion" in runner.invoke(app, ["--help"]).stdout
