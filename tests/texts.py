"""Texts of a certain length, for tests and benchmarks of what happens in the middle of one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.client.text.generation import generate_tokens
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.step import Decoder
from splitup.demo.models import MODEL

PROMPT: Final = "library for"
TOKENS: Final = 250  # what the example's context leaves after the prompt

Disturb = Callable[[Session, int], None]  # (session, tokens so far)


@dataclass(frozen=True, slots=True)
class Text:
    """What a generation gave."""

    tokens: list[int]
    gap_s: float  # the longest between two tokens
    session: Session


def go_on(decoder: Decoder) -> None:
    """Let a text go on where the model would end it, up to the number of tokens asked for."""
    assert isinstance(decoder, SequentialDecoder)
    decoder.request = replace(decoder.request, eos_ids=frozenset())


async def generate_text(
    net: SplitUp, disturb: Disturb, *, deadline_s: float, max_tokens: int = TOKENS
) -> Text:
    """Let the example model write so many tokens, and ``disturb`` after each."""
    decoder, tokenizer = await net.make_decoder(
        MODEL, PROMPT, max_tokens=max_tokens, sampler=Sampler(0.8, 7)
    )
    go_on(decoder)
    tokens, gap_s, at = [], 0.0, None
    async with net.session(MODEL, steps=decoder.max_steps, deadline_s=deadline_s) as session:
        async for token in generate_tokens(session, decoder, tokenizer):
            now = time.monotonic()
            gap_s, at = max(gap_s, now - (at or now)), now
            tokens.append(token.id)
            disturb(session, len(tokens))
    return Text(tokens, gap_s, session)


def read_account(directory: Path) -> str:
    """Return whose directory it is, by its keystore; "" when nobody's."""
    keystore = directory / "keystore.json"
    if not keystore.exists():
        return ""
    address: str = json.loads(keystore.read_text())["address"]
    return "0x" + address.lower().removeprefix("0x")
