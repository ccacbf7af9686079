"""What ``splitup generate`` says at its end."""

from __future__ import annotations

import pytest

from splitup.cli.text_generation import Generated, read_lookahead
from splitup.client.generation import Token
from splitup.client.outcome import Receipt
from splitup.core.errors import InvalidInput
from splitup.decode.lookahead import LookaheadOptions

ID = "0x" + "ab" * 32


def test_speed_counts_from_the_first_token() -> None:
    done = Generated(execution_id=ID, opened_s=10.0)
    for number, now_s in enumerate((12.0, 12.5, 13.0)):
        done.note(Token(number, f" {number}"), now_s)
    assert (done.text, done.tokens, done.first_s, done.tokens_per_s) == (" 0 1 2", [0, 1, 2], 2, 2)
    assert done.describe() == (
        f"3 tokens, the first after 2.00 s, then 2.0 tokens/s\nwhat it cost: splitup receipt {ID}"
    )
    assert done.to_dict()["tokens_per_s"] == 2.0


def test_an_interrupted_generation_says_what_was_paid() -> None:
    done = Generated(execution_id=ID, is_interrupted=True)
    assert done.describe().startswith("0 tokens\n")
    done.receipt = Receipt(ID, "settled", 1, (), (), 2_000_000, 20_000, 5_000_000, "", 7, "")
    assert done.describe() == (
        "0 tokens\nsettled in block 7: 2 USDC paid, 0.02 USDC fee, 5 USDC back"
    )
    assert Generated(is_interrupted=True).describe() == "interrupted before the execution began"


def test_lookahead_has_the_options_that_were_typed() -> None:
    assert read_lookahead("sequential", None, None, None) is None
    assert read_lookahead("lookahead", None, None, None) is None, "what there is room for"
    assert read_lookahead("lookahead", None, 3, None) == LookaheadOptions(length=3)
    assert read_lookahead("lookahead", 0, 5, 2) == LookaheadOptions(0, 5, 2)
    with pytest.raises(InvalidInput, match="has no window"):
        read_lookahead("sequential", None, None, 2)
