"""What commands print stays as it is: names and fingerprints that others chose are no markup."""

from __future__ import annotations

import json
import os
import pty
import select
import sys

import pytest
from rich.table import Table

from splitup.cli.console import Output, print_table
from tests.builders import HANG_S

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


OBEYED = "red\x1b[31m title\x1b]0;mine\x07 above\x9b1A half\ud800\tend\r"
SHOWN = "red\N{REPLACEMENT CHARACTER}[31m title"


def test_s65_a_terminal_obeys_nobody_but_the_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output.open()
    output.say(OBEYED)
    output.out.print(OBEYED)
    table = Table("model", box=None)
    table.add_row(OBEYED)
    print_table(output.out, table)
    output.print_json({"name": OBEYED})
    printed = capsys.readouterr()
    *lines, document = printed.out.splitlines()
    assert json.loads(document) == {"name": OBEYED}
    assert all(SHOWN in line for line in (printed.err, lines[0], lines[2]))
    assert not set(printed.err + printed.out) & set("\x1b\x07\x9b\ud800\r")
    output.write_text("a program may want these: \x1b[1m")
    assert "\x1b[1m" in capsys.readouterr().out
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        output = Output.open()
        output.write_text(OBEYED + "\n")
        output.update(OBEYED)
        terminal.flush()
        shown = ""
        while shown.count(SHOWN) < 2 and select.select([ours], [], [], HANG_S)[0]:
            shown += os.read(ours, 4096).decode()  # a terminal gives what it has, in pieces
    os.close(ours)
    assert shown.count(SHOWN) == 2
    assert "\x1b[31m" not in shown and not set(shown) & set("\x07\x9b")


def test_a_long_line_stays_one_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output.open().out.print("cost 0.000545 USDC " * 9)
    assert capsys.readouterr().out == "cost 0.000545 USDC " * 9 + "\n"
