"""What commands print stays as it is: names and fingerprints that others chose are no markup."""

from __future__ import annotations

import pytest
from rich.table import Table

from splitup.cli.console import Output, print_table

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


def test_a_narrow_terminal_cuts_no_cell_of_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    table = Table("node", "endpoint", "why")
    cells = ["0x" + "ab" * 20, "127.0.0.1:21891", "what a sentence says " * 5]
    table.add_row(*cells)
    print_table(Output.open().out, table)
    printed = capsys.readouterr().out.splitlines()
    assert any(all(cell.strip() in line for cell in cells) for line in printed)
