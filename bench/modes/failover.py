"""Kill nodes (SIGKILL) during a generation: the tokens stay the same; how long is the pause?"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Final

from bench.modes.network import run_network
from bench.report import Bar, Report, say
from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.devnet.network import Devnet
from tests.texts import Disturb, Text, generate_text, read_account

TOKENS: Final = 1_000
CONTEXT: Final = 1_024
DEADLINE_S: Final = 240
NODES: Final = 7  # three die
NODE_VRAM_BYTES: Final = 100_000_000  # every node holds every task


async def run(quick: bool) -> Report:
    """Generate undisturbed, then with one node killed, then with two."""
    pauses = Pauses()
    async with run_network(NODES, NODE_VRAM_BYTES, context=CONTEXT) as (devnet, net):
        expected = await generate(net, lambda session, count: None)
        middle = len(expected.tokens) // 2
        killed: set[str] = set()

        def kill_one(session: Session, count: int) -> None:
            pauses.note_token()
            if count == middle:
                kill(devnet, session, killed)

        def kill_two(session: Session, count: int) -> None:
            if count in (middle // 2, middle + middle // 2):
                kill(devnet, session, killed)

        logging.getLogger(Session.__module__).addHandler(pauses)
        try:
            one = await generate(net, kill_one)
        finally:
            logging.getLogger(Session.__module__).removeHandler(pauses)
        two = None if quick else await generate(net, kill_two)
    bars = [make_bar("pause when one node is killed", one, expected)]
    is_equal = one.tokens == expected.tokens
    bars.append(
        Bar(
            "… from the takeover to the next token",
            round(pauses.replay_s, 3) if is_equal and pauses.replay_s else None,
            "s",
            at_most=0.3,
        )
    )
    if two is not None:
        bars.append(make_bar("pause when two are, one after the other", two, expected))
    figures = {"tokens": len(expected.tokens), "undisturbed_gap_s": round(expected.gap_s, 2)}
    return Report(bars, figures)


class Pauses(logging.Handler):
    """Measures the time from a takeover, which the session logs, to the next token."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.replay_s = 0.0
        self._taken_over_at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._taken_over_at = self._taken_over_at or time.monotonic()

    def note_token(self) -> None:
        """Note a token; the first one after a takeover ends the replay."""
        if self._taken_over_at is not None and not self.replay_s:
            self.replay_s = time.monotonic() - self._taken_over_at


def make_bar(name: str, found: Text, expected: Text) -> Bar:
    """Return the bar of one disturbed generation; without a figure if its tokens differ."""
    is_equal = found.tokens == expected.tokens
    return Bar(
        name,
        round(found.gap_s, 2) if is_equal else None,
        "s",
        at_most=0.6,
        beside={
            "tokens equal to an undisturbed run": is_equal,
            "takeovers": found.session.takeovers,
            "longest pause undisturbed, s": round(expected.gap_s, 2),
        },
    )


def kill(devnet: Devnet, session: Session, killed: set[str]) -> None:
    """Kill a node that runs a task of the session."""
    accounts = {read_account(devnet.directory / child.name): child for child in devnet.children}
    child = next(accounts[node] for node in session.executors if accounts[node].name not in killed)
    say(f"killing {child.name}")
    killed.add(child.name)
    os.kill(child.pid, signal.SIGKILL)


async def generate(net: SplitUp, disturb: Disturb) -> Text:
    """Generate, and wait until it is settled, so that the next one finds the nodes free."""
    done = await generate_text(net, disturb, deadline_s=DEADLINE_S, max_tokens=TOKENS)
    await net.receipt(done.session.execution_id)
    return done
