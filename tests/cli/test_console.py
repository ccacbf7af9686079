"""What commands print stays as it is: names and fingerprints that others chose are no markup."""

from __future__ import annotations

import pytest
from rich.table import Table

from splitup.cli.console import Output

# Rich reads the first as a style, the second as a style's end, the third and fourth as emoji
TEXT = "[bold]llama[/bold] [/] 0F:AB:12 :cd: 17"


def test_messages_and_results_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output.open()
    output.say(TEXT)
    output.out.print(TEXT)
    table = Table("model")
    table.add_row(TEXT)
    output.out.print(table)
    printed = capsys.readouterr()
    assert printed.err == f"{TEXT}\n"
    assert printed.out.startswith(f"{TEXT}\n") and f" {TEXT} " in printed.out
