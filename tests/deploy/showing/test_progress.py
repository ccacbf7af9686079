"""What stands on stderr while a model is compiled and stored, where no bar can be shown."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from splitup_deploy.showing.progress import HashBar, UploadBar, show_status, write_file

from splitup.core.errors import InvalidInput


def test_each_phase_is_a_plain_line_off_a_terminal() -> None:
    console = Console(file=StringIO())
    with HashBar(console, "model") as bar:
        bar.start("weights", 100)
        bar.advance(100)
    with show_status(console, "completing the manifest") as say:
        say("task 1")
    with UploadBar(console) as upload:
        upload.start(1_500_000)
        upload.advance(1_500_000)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "compiling model",
        "hashing weights",
        "completing the manifest",
        "storing 1.5 MB",
    ]


def test_s110_a_part_of_a_file_follows_no_link(tmp_path: Path) -> None:
    other, file = tmp_path / "other", tmp_path / "out.json"
    other.write_text("mine")
    (tmp_path / f".out.json.{os.getpid()}").symlink_to(other)
    with pytest.raises(InvalidInput, match="cannot write"):
        write_file(file, "theirs")
    assert other.read_text() == "mine"
    write_file(file, "theirs")
    assert file.read_text() == "theirs" and other.read_text() == "mine"
