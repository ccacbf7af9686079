"""SIGKILL of nodes in the middle of a generation: the same tokens, and how long the pause is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from splitup.client.connection import SplitUp
from splitup.client.generation import generate_tokens
from splitup.client.session import Session
from splitup.decode.sampler import Sampler
from splitup.demo.run import MODEL
from splitup.devnet.network import Devnet
from tests.bench.network import run_network
from tests.bench.report import Bar, Report, say
from tests.texts import go_on

PROMPT: Final = "library for"
TOKENS: Final = 250  # what the example's context leaves after the prompt
NODES: Final = 7  # three die
NODE_VRAM_BYTES: Final = 100_000_000  # every node holds every task

Disturb = Callable[[Session, int], None]  # (session, tokens so far)


async def run(quick: bool) -> Report:
    """Generate undisturbed, then with one node killed, then with two."""
    async with run_network(NODES, NODE_VRAM_BYTES) as (devnet, net):
        expected = await generate(net, lambda session, count: None)
        middle = len(expected["tokens"]) // 2
        killed: set[str] = set()

        def kill_one(session: Session, count: int) -> None:
            if count == middle:
                kill(devnet, session, killed)

        def kill_two(session: Session, count: int) -> None:
            if count in (middle // 2, middle + middle // 2):
                kill(devnet, session, killed)

        one = await generate(net, kill_one)
        two = None if quick else await generate(net, kill_two)
    bars = [make_bar("pause when one node is killed", one, expected)]
    if two is not None:
        bars.append(make_bar("pause when two are, one after the other", two, expected))
    figures = {"tokens": len(expected["tokens"]), "undisturbed_gap_s": expected["gap_s"]}
    return Report(bars, figures)


def make_bar(name: str, found: dict[str, Any], expected: dict[str, Any]) -> Bar:
    """Return the bar of one disturbed generation; other tokens count as no measurement."""
    is_equal = found["tokens"] == expected["tokens"]
    return Bar(
        name,
        found["gap_s"] if is_equal else None,
        "s",
        at_most=3.0,
        beside={
            "tokens equal to an undisturbed run": is_equal,
            "takeovers": found["takeovers"],
            "longest pause undisturbed, s": expected["gap_s"],
        },
    )


def kill(devnet: Devnet, session: Session, killed: set[str]) -> None:
    """Kill a node that runs a task now."""
    accounts = {find_account(devnet.directory / child.name): child for child in devnet.children}
    child = next(accounts[node] for node in session.executors if accounts[node].name not in killed)
    say(f"killing {child.name}")
    killed.add(child.name)
    os.kill(child.pid, signal.SIGKILL)


def find_account(directory: Path) -> str:
    """Return whose directory it is, "" when nobody's."""
    keystore = directory / "keystore.json"
    if not keystore.exists():
        return ""
    return "0x" + json.loads(keystore.read_text())["address"].lower().removeprefix("0x")


async def generate(net: SplitUp, disturb: Disturb) -> dict[str, Any]:
    """Generate; return the tokens and the longest pause between two."""
    decoder, tokenizer = await net.make_decoder(
        MODEL, PROMPT, max_tokens=TOKENS, sampler=Sampler(0.8, 7)
    )
    go_on(decoder)
    tokens, gap_s, at = [], 0.0, None
    async with net.session(MODEL, steps=decoder.max_steps, deadline_s=60) as session:
        async for token in generate_tokens(session, decoder, tokenizer):
            now = time.monotonic()
            gap_s, at = max(gap_s, now - (at or now)), now
            tokens.append(token.id)
            disturb(session, len(tokens))
    await net.receipt(session.execution_id)
    return {"tokens": tokens, "gap_s": round(gap_s, 2), "takeovers": session.takeovers}
