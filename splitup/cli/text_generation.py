"""``splitup generate``: a text as it comes, and an end that pays for what was done.

The first Ctrl-C ends the execution: nodes finish and are paid for the steps they were sent, the
rest comes back. The second leaves without waiting to see that.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.client.generation import DecoderName, Token, check_decoder
from splitup.client.inputs import format_usdc
from splitup.client.outcome import Receipt
from splitup.core.errors import SplitUpError
from splitup.decode.lookahead import LookaheadOptions

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the user typed."""

    model: str
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    top_k: int
    top_p: float
    stop: tuple[str, ...]
    decoder: DecoderName
    lookahead: LookaheadOptions | None
    max_price_usdc: str | None
    deadline_s: float
    config: Path | None


def read_lookahead(
    decoder: DecoderName, window: int | None, ngram: int | None, guesses: int | None
) -> LookaheadOptions | None:
    """Return the options that were typed, None without any; what is left out has its default.

    Raises InvalidInput for impossible ones, and for another decoder.
    """
    typed = {"columns": window, "length": ngram, "guesses": guesses}
    given = {name: value for name, value in typed.items() if value is not None}
    options = LookaheadOptions(**given) if given else None
    check_decoder(decoder, options)
    return options


@dataclass(slots=True)
class Generated:
    """What came of it; times are seconds since the execution was open."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    execution_id: str = ""
    opened_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    is_interrupted: bool = False
    receipt: Receipt | None = None  # of an interrupted execution

    @property
    def tokens_per_s(self) -> float:
        """Return the rate after the first token, 0.0 while there is none."""
        span_s = self.last_s - self.first_s
        return (len(self.tokens) - 1) / span_s if span_s > 0 else 0.0

    def note(self, token: Token, now_s: float) -> None:
        """Take a token that came at ``now_s``."""
        self.last_s = now_s - self.opened_s
        if not self.tokens:
            self.first_s = self.last_s
        self.tokens.append(token.id)
        self.text += token.text

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "execution_id": self.execution_id,
            "first_token_s": round(self.first_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "interrupted": self.is_interrupted,
        }

    def describe(self) -> str:
        """Return how fast it was, and on another line what it cost or how to find out."""
        if not self.execution_id:
            return "interrupted before the execution began"
        count = len(self.tokens)
        words = f"{count} token{'s' * (count != 1)}"
        if self.tokens:
            words += f", the first after {self.first_s:.2f} s"
        if self.tokens_per_s:
            words += f", then {self.tokens_per_s:.1f} tokens/s"
        if self.receipt is not None:
            return f"{words}\n{describe_receipt(self.receipt)}"
        return f"{words}\nwhat it cost: splitup receipt {self.execution_id}"


def describe_receipt(receipt: Receipt) -> str:
    """Return one clause about how an execution was closed."""
    return (
        f"{receipt.status} in block {receipt.block_number}: "
        f"{format_usdc(receipt.paid_micro_usdc)} paid, "
        f"{format_usdc(receipt.fee_micro_usdc)} fee, "
        f"{format_usdc(receipt.refunded_micro_usdc)} back"
    )


async def run_generate(options: GenerateOptions, write: Write, say: Write) -> Generated:
    """Generate, handing the prompt and what follows to ``write``; ``say`` is for the user alone.

    The prompt is written once the execution is open: what fails before leaves no text behind.

    Raises what ``SplitUp.generate`` raises, KeyboardInterrupt for a second Ctrl-C.
    """
    done = Generated()
    interrupted = asyncio.Event()

    def on_session(session: Session) -> None:
        done.execution_id = session.execution_id
        done.opened_s = time.monotonic()
        write(options.prompt)

    with _catch_interrupts(interrupted):
        async with SplitUp.connect(options.config) as net:
            tokens = net.generate(
                options.model,
                options.prompt,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                seed=options.seed,
                top_k=options.top_k,
                top_p=options.top_p,
                stop=options.stop,
                decoder=options.decoder,
                lookahead=options.lookahead,
                max_price_usdc=options.max_price_usdc,
                deadline_s=options.deadline_s,
                on_session=on_session,
            )
            while (token := await _next(tokens, interrupted)) is not None:
                done.note(token, time.monotonic())
                write(token.text)
            done.is_interrupted = interrupted.is_set()
            interrupted.set()  # what is left is waiting: the next Ctrl-C leaves
            await tokens.aclose()
            if done.is_interrupted and done.execution_id:
                say("\ninterrupted; the nodes are paid for what they did (Ctrl-C: do not wait)")
                await net.drain()
                with contextlib.suppress(SplitUpError):  # then: splitup receipt
                    done.receipt = await net.receipt(done.execution_id)
    return done


async def _next(tokens: AsyncGenerator[Token, None], interrupted: asyncio.Event) -> Token | None:
    """Return the next token, None at the end and after Ctrl-C."""
    coming = asyncio.ensure_future(anext(tokens, None))
    stopping = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not interrupted.is_set():
            return await coming
        coming.cancel()  # where it waits is inside the session, which ends by it
        with contextlib.suppress(asyncio.CancelledError):
            await coming
        return None
    finally:
        stopping.cancel()
        if not coming.done():
            coming.cancel()


@contextlib.contextmanager
def _catch_interrupts(interrupted: asyncio.Event) -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    twice = False

    def on_interrupt() -> None:
        nonlocal twice
        if interrupted.is_set() and task is not None:
            twice = True
            task.cancel()
        interrupted.set()

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except NotImplementedError:  # Windows: the first Ctrl-C is the last
        yield
        return
    try:
        yield
    except asyncio.CancelledError:
        if twice:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
