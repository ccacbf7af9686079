"""The words of a question choose an adapter, on the machine that asks it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from private_tests.adapters.weights import make_random
from splitup_private.adapters.choice import choose_adapter
from splitup_private.adapters.client import _find
from splitup_private.adapters.messages import AdapterInfo, AdapterList
from splitup_private.adapters.weights import load_adapter

from splitup.core.errors import InvalidInput, InvalidModel

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "packages-4m-python-docs"


def describe(name: str, *keywords: str) -> AdapterInfo:
    return make_random(8, 2, name=name).info.model_copy(update={"keywords": keywords})


LAW = describe("law", "court", "statute of limitations", "§", "Gesetz")
BANK = describe("bank", "account", "savings account", "ACCOUNT", "straße", "οδός")
NONE = describe("none")


QUESTIONS = [
    ("What is a savings account?", "bank"),
    ("WHAT DOES THE COURT SAY?", "law"),
    ("Is the statute\n of   limitations over?", "law"),
    ("In welcher STRASSE?", "bank"),  # case folding: ß is ss
    ("the \N{FULLWIDTH LATIN SMALL LETTER C}ourt", "law"),  # compatibility forms
    ("a court, and my account", "law"),  # of equal ones the first
    ("a court, and my savings account", "bank"),  # more of its keywords
    ("courtesy accounts", None),  # parts of words
    ("limitations of statute", None),
    ("§", None),  # no word
    ("", None),
]


@pytest.mark.parametrize(("question", "name"), QUESTIONS)
def test_most_keywords_win(question: str, name: str | None) -> None:
    found = choose_adapter([NONE, LAW, BANK], question)
    assert (found.name if found else None) == name
    assert choose_adapter([], question) is None


def test_s128_no_adapters_name_passes_for_anothers_digest() -> None:
    other = BANK.model_copy(update={"name": LAW.adapter, "adapter": "1" * 64})
    listed = AdapterList(library="", adapters=(other, LAW))
    assert _find(listed, LAW.adapter, "host") == LAW
    with pytest.raises(InvalidInput, match=f"host has no adapter '{LAW.adapter}'"):
        _find(AdapterList(library="", adapters=(other,)), LAW.adapter, "host")
    assert _find(listed, "law", "host") == LAW


def test_keywords_are_in_the_adapters_description(tmp_path: Path) -> None:
    example = load_adapter(EXAMPLE)
    assert choose_adapter([example.info], "a Python function") is example.info
    assert AdapterInfo.parse(example.info.canonical_bytes()) == example.info
    config = json.loads((EXAMPLE / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").symlink_to(EXAMPLE / "adapter_model.safetensors")
    for keywords in ("python", [""], [7], ["x" * 65], ["x"] * 65, None):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"keywords": keywords}))
        with pytest.raises(InvalidModel, match="'keywords' are"):
            load_adapter(tmp_path)
    del config["keywords"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    plain = load_adapter(tmp_path).info
    assert plain.keywords == () and plain.adapter == example.info.adapter, "no part of the digest"
