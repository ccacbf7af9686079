"""What stands on stderr while a model is compiled and stored, where no bar can be shown."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from splitup_deploy.showing.progress import HashBar, UploadBar, show_status


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
