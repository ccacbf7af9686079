"""Measure, for numbers of blocks that the user keeps, how much of a text attacks recover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from splitup_deploy.calibration.calibrate_model import open_tokenizer
from splitup_deploy.cutting.build import CompiledModel
from splitup_deploy.publishing.privacy import make_key

from splitup.core.errors import InvalidInput
from splitup.decode.step import make_causal_step
from splitup.graph.manifest import PrivacyMeasure
from splitup_private.attacks.attacks import TokenDecoder, Tokens, invert
from splitup_private.attacks.split_model import AttackedModel, AttackedText, Rows

PAIRS: Final = (300, 900, 3_000, 10_000, 20_000)
_TESTED: Final = 1_000  # tokens that no attack has learnt from
_SEQUENCE: Final = 256  # tokens of one text
_GUESSES: Final = 256  # tokens that the attack with the weights tries first
_KNOWN: Final = 1_000  # texts, at most, one of which a node recognises by its length
_BPS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Split:
    """What attacks found when the user keeps ``blocks`` at each end."""

    blocks: int
    client_bytes: int  # memory of the tasks that the user runs
    key: str  # of the tasks that the user runs, as ``make_key`` gives it
    found: PrivacyMeasure
    known: int  # paragraphs of the text, one of which is sent
    by_length_bps: int  # how often a node that has all of them names the right one by its length


def measure_split(
    compiled: CompiledModel,
    blocks: int,
    text: str,
    *,
    inverted: int,
    say: Callable[[str], None] = lambda _: None,
) -> Split:
    """Attack one way to split a model, on a text like those that its users write.

    ``inverted`` is the number of tokens that the attack with the weights recovers. Takes minutes.
    Raises InvalidInput for a text that is too short.
    """
    model = AttackedModel(compiled)
    info = compiled.manifest.text
    if info is None:
        raise InvalidInput("the model reads no text")
    with open_tokenizer(compiled) as tokenizer:
        tokens = tokenizer.encode(text)[: PAIRS[-1] + _TESTED]
    if len(tokens) < PAIRS[0] + _TESTED:
        raise InvalidInput(
            f"the text has {len(tokens)} tokens; give one of {PAIRS[0] + _TESTED} or more, and of "
            f"{PAIRS[-1] + _TESTED} to see what many pairs are worth"
        )
    say(f"{blocks} blocks: computing {len(tokens)} tokens")
    sent, returned, guessed = compute_crossing(model, tokens, min(_SEQUENCE, info.context))
    array = np.array(tokens, np.int64)
    split = len(tokens) - _TESTED
    counts = [count for count in PAIRS if count < split] + [split]
    say(f"{blocks} blocks: learning from pairs")
    learnt = [(n, TokenDecoder(sent[:n], array[:n])) for n in counts]
    curve = tuple((n, _count(decoder, sent[split:], array[split:])) for n, decoder in learnt)
    back = _count(TokenDecoder(returned[:split], array[:split]), returned[split:], array[split:])
    say(f"{blocks} blocks: inverting {inverted} tokens")
    wanted = array[split : split + min(inverted, info.context)]
    # texts are computed anew from their first token on, so what is sent differs
    guesses = learnt[-1][1].rank(sent[split : split + len(wanted)], _GUESSES)
    right = invert(model, wanted.tolist(), info.vocab, guesses)
    client = model.client
    return Split(
        blocks,
        sum(task.vram_bytes for task in client.tasks),
        make_key(compiled),
        PrivacyMeasure(
            tested=len(wanted),
            with_weights_bps=_BPS * right // len(wanted),
            pairs=curve,
            returned_bps=back,
            next_token_bps=_BPS * int((guessed[:-1] == array[1:]).sum()) // (len(array) - 1),
        ),
        *recognise_lengths(compiled, text, info.context),
    )


def recognise_lengths(compiled: CompiledModel, text: str, context: int) -> tuple[int, int]:
    """Return how many paragraphs there are, and how often the length of one tells which, in bps.

    Of n paragraphs of one length a node names the right one once in n times.
    """
    paragraphs = list(dict.fromkeys(filter(str.strip, text.split("\n\n"))))[:_KNOWN]
    with open_tokenizer(compiled) as tokenizer:
        lengths = [len(tokenizer.encode(paragraph)) for paragraph in paragraphs]
    sent = [length for length in lengths if length <= context]
    return len(sent), _BPS * len(set(sent)) // max(1, len(sent))


def compute_crossing(
    model: AttackedModel, tokens: Sequence[int], length: int
) -> tuple[Rows, Rows, Tokens]:
    """Return what is sent and returned for every token, and which token is likeliest after it.

    Every ``length`` tokens are a text of their own.
    """
    sent, returned, guessed = [], [], []
    for begin in range(0, len(tokens), length):
        text, part = AttackedText(model), tokens[begin : begin + length]
        for start in range(0, len(part), model.chunk):
            fed = part[start : start + model.chunk]
            crossing = text.feed(make_causal_step(fed, start, range(len(fed))))
            sent.append(crossing.sent)
            returned.append(crossing.returned)
            guessed.append(crossing.logits.argmax(axis=1))
    return np.concatenate(sent), np.concatenate(returned), np.concatenate(guessed)


def _count(decoder: TokenDecoder, activations: Rows, tokens: Tokens) -> int:
    return _BPS * decoder.count_right(activations, tokens) // len(tokens)
