"""What ``splitup generate`` prints around its text."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from typing import cast

import pytest
import typer
from rich.console import Console

from splitup.cli.command import run_command
from splitup.cli.commands.generate import DecoderOptions, DiffusionFlags, Generated
from splitup.cli.commands.receipt import describe_cost
from splitup.cli.console import Output
from splitup.cli.cost import wait_for_cost
from splitup.client.connection import SplitUp
from splitup.client.execution.session import describe_fault
from splitup.client.market.receipts import Receipt
from splitup.client.text.generation import Token
from splitup.core.errors import InvalidInput, Unavailable
from splitup.decode.block_diffusion import DiffusionOptions
from splitup.decode.speculation.lookahead import LookaheadOptions

ID = "0x" + "ab" * 32


def test_speed_counts_from_the_first_token() -> None:
    done = Generated(execution_id=ID, opened_s=10.0)
    for number, now_s in enumerate((12.0, 12.5, 13.0)):
        done.note(Token(number, f" {number}"), now_s)
    assert (done.text, done.tokens, done.first_s, done.tokens_per_s) == (" 0 1 2", [0, 1, 2], 2, 2)
    assert done.describe() == ("3 tokens, the first after 2.00 s, then 2.0 tokens/s")
    assert done.to_dict()["tokens_per_s"] == 2.0


def test_a_text_that_ends_at_once_points_to_chats() -> None:
    assert "ask a chat model with: splitup chat" in Generated(execution_id=ID).describe()


def test_an_interrupted_generation_without_tokens() -> None:
    assert Generated(execution_id=ID, is_interrupted=True).describe() == "0 tokens"
    assert Generated(is_interrupted=True).describe() == (
        "interrupted before the execution began; nothing was paid, and what was locked comes back "
        "with: splitup withdraw"
    )


def test_cost_is_what_was_paid_and_what_came_back() -> None:
    settled = Receipt(ID, "settled", 1, (), (), 2_000_000, 20_000, 5_000_000, "", 7, "", ID, 800)
    assert describe_cost(settled) == (
        "cost: 2.02 USDC (2 USDC to the nodes, 0.02 USDC fee); 5 USDC came back"
    )
    refunded = Receipt(ID, "refunded", 0, (), (), 0, 0, 5_000_000, "", 7, "", ID, 800)
    assert describe_cost(refunded) == "cost: nothing; 5 USDC came back"
    planned = replace(refunded, fee_micro_usdc=38)
    assert describe_cost(planned) == (
        "cost: 0.000038 USDC for the stake that was reserved; 5 USDC came back"
    )


def test_lookahead_has_the_options_that_were_typed() -> None:
    assert DecoderOptions().read_lookahead() is None
    assert DecoderOptions("lookahead").read_lookahead() is None, "by default what there is room for"
    assert DecoderOptions("lookahead", ngram=3).read_lookahead() == LookaheadOptions(length=3)
    assert DecoderOptions("lookahead", 0, 5, 2).read_lookahead() == LookaheadOptions(0, 5, 2)
    with pytest.raises(InvalidInput, match="has no window"):
        DecoderOptions(guesses=2).read_lookahead()
    with pytest.raises(InvalidInput, match="has no draft model; 'speculative' takes one"):
        DecoderOptions("lookahead", draft="small").read_lookahead()
    with pytest.raises(InvalidInput, match="there is no decoder 'fast'"):
        DecoderOptions("fast").read_lookahead()


def test_blocks_have_the_options_that_were_typed() -> None:
    assert DiffusionFlags().read() is None
    assert DiffusionFlags(threshold=0.5).read() == DiffusionOptions(threshold=0.5)
    typed = DiffusionFlags(8, None, "margin", 2)
    assert typed.read() == DiffusionOptions(8, confidence="margin", iterations=2)
    assert DiffusionFlags(ahead=1).read() == DiffusionOptions(ahead=1)
    with pytest.raises(InvalidInput, match="--threshold or --iterations, not both"):
        DiffusionFlags(threshold=0.5, iterations=2).read()
    with pytest.raises(InvalidInput, match="no confidence 'luck'"):
        DiffusionFlags(confidence="luck").read()


def make_output(is_terminal: bool) -> tuple[Output, io.StringIO]:
    """Return an output whose stdout is captured by pytest and whose stderr is the returned file."""
    err = io.StringIO()
    out = Console(force_terminal=is_terminal)
    return Output(False, out, Console(file=err, force_terminal=is_terminal, width=80)), err


def test_an_error_comes_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    output, err = make_output(is_terminal=False)

    def run() -> None:
        output.write_text("half a sent")
        raise Unavailable("the chain is gone")

    with pytest.raises(typer.Exit) as left:
        run_command(output, run)
    assert left.value.exit_code == 1
    assert capsys.readouterr().out == "half a sent\n", "text alone is on stdout"
    assert err.getvalue() == "error: the chain is gone\n"


def test_a_warning_leaves_streamed_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output, err = make_output(is_terminal=True)

    def run() -> None:
        output.write_text("one ")
        logging.getLogger("splitup.client").warning("node %s is slow", "A")
        output.write_text("two\n")
        logging.getLogger("splitup.client").warning("node B, too")

    run_command(output, run)
    assert capsys.readouterr().out == "one two\n"
    assert err.getvalue() == "\nnode A is slow\nnode B, too\n"


def test_interrupting_text_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    output, err = make_output(is_terminal=False)

    def run() -> None:
        output.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as left:
        run_command(output, run)
    assert (left.value.exit_code, capsys.readouterr().out) == (130, "half\n")
    assert err.getvalue() == "interrupted\n"


def test_progress_is_drawn_in_place_on_a_terminal_only() -> None:
    output, err = make_output(is_terminal=True)
    for text in ("1/2 nodes", "2/2 nodes"):
        output.update(text)
    output.say("ready")
    erase = "\r\x1b[2K"
    assert err.getvalue() == f"{erase}1/2 nodes{erase}2/2 nodes{erase}ready\n"
    output, err = make_output(is_terminal=False)
    for text in ("1/2 nodes", "1/2 nodes", "2/2 nodes"):
        output.update(text)
    output.hint("waiting for a person")
    output.say("ready")
    assert err.getvalue() == "1/2 nodes\n2/2 nodes\nready\n"


class Settling:
    """A connection whose execution is not settled yet."""

    async def drain(self) -> None:
        pass

    async def receipt(self, execution_id: str, *, timeout_s: float) -> Receipt:
        raise Unavailable(f"execution {execution_id} was not settled within {timeout_s:g} s")


async def test_before_the_settlement_the_cost_is_what_was_paid_and_may_come_back() -> None:
    output, _ = make_output(is_terminal=False)
    cost = await wait_for_cost(output, cast(SplitUp, Settling()), ID, 250_000)
    assert cost.to_dict() == {"cost_micro_usdc": None, "locked_micro_usdc": 250_000}
    assert cost.text == (
        "cost: at most 0.25 USDC, which is paid; what the nodes do not earn comes back when it is "
        f"settled: splitup receipt {ID}"
    )


def test_a_replaced_node_is_named_with_its_fault() -> None:
    assert describe_fault("A", "it did not deliver in time") == "node A did not deliver in time"
    assert describe_fault("A", "out of memory") == "node A: out of memory"
