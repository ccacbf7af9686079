"""The page of all APIs, compared with the fields that their requests have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from splitup_gateway.apis import ollama
from splitup_gateway.replies import TEXTS, list_fields

PAGE = Path(__file__).resolve().parents[5] / "docs/spec/dialects.md"
UNCHANGED = "changes nothing here"


def read_table() -> tuple[list[str], dict[str, list[str]]]:
    """Return the routes, and the cells of each row by its name."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cell.strip("`") for cell in rows[0][1:]], {row[0]: row[1:] for row in rows[2:]}


@pytest.mark.parametrize("route", TEXTS)
def test_the_table_names_each_field_once(route: str) -> None:
    routes, rows = read_table()
    column, kind = routes.index(route), TEXTS[route]
    named = [name for row in rows.values() for name in re.findall("`([^`]+)`", row[column])]
    options = {f"options.{name}" for name in (*ollama.TAKEN, "num_predict")}
    wanted = set(kind.model_fields) | kind.harmless
    if "options" in wanted:
        wanted = (wanted - {"options"}) | options
    assert sorted(named) == sorted(wanted)
    unchanged = set(re.findall("`([^`]+)`", rows[UNCHANGED][column]))
    assert unchanged - {"keep_alive"} == kind.harmless


def test_the_page_names_the_options_that_change_nothing() -> None:
    text = PAGE.read_text("utf-8")
    assert all(f"`{name}`" in text for name in ollama.COMPUTING)


def test_every_route_that_answers_tells_its_fields() -> None:
    fields = list_fields()
    assert {"truncate", "user"} <= set(fields["/v1/embeddings"])
    assert {"system", "thinking", "metadata"} <= set(fields["/v1/messages"])
