"""The specification names what the code has, with its values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from splitup.core import limits, tuning
from splitup.messages import plans, snapshots
from splitup.protocol.committee import peer_messages

SPEC = (Path(__file__).resolve().parents[3] / "docs" / "spec" / "committee.md").read_text()

CONSTANTS = {**vars(limits), **vars(tuning)}


def list_rows(section: str) -> list[tuple[str, str]]:
    """Return the first two columns of a section's table."""
    text = SPEC.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE)


@pytest.mark.parametrize(("name", "value"), list_rows("Constants"))
def test_constants_have_the_stated_values(name: str, value: str) -> None:
    assert CONSTANTS[name] == float(value)


@pytest.mark.parametrize(("name", "fields"), list_rows("Messages"))
def test_messages_have_the_stated_fields(name: str, fields: str) -> None:
    homes = (peer_messages, snapshots, plans)
    message = next(getattr(home, name) for home in homes if hasattr(home, name))
    assert list(message.model_fields) == re.findall(r"`(\w+)`", fields)


def test_every_constant_in_the_text_exists() -> None:
    named = set(re.findall(r"\b[A-Z]{3,}(?:_[A-Z]+)+\b", SPEC)) - {"SHA_256"}
    assert len(list_rows("Constants")) >= 15
    assert {name for name in named if name not in CONSTANTS} == set()


def test_every_message_of_snapshots_and_plans_is_specified() -> None:
    stated = {name for name, _ in list_rows("Messages")}
    layers = ("Epoch", "Observation", "Snapshot", "Plan", "Equivocation")
    kinds = {kind.__name__ for kind in peer_messages._KINDS.values()}
    assert {name for name in kinds if name.startswith(layers)} <= stated
