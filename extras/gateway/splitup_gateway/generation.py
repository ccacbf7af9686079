"""One text for one request: borrows a lease, generates, and says what it cost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from splitup.client.execution.session import Session
from splitup.client.images.image_prompts import PromptImages
from splitup.client.leases import Lease, LeasePool
from splitup.client.queueing import Totals
from splitup.client.text.drafting import Speculation
from splitup.client.text.generation import TextModel, Token, generate_tokens, make_decoder
from splitup.client.text.grammar import Grammar
from splitup.core.errors import ExecutionFailed, Implausible, SplitUpError
from splitup.decode.adjusted_sampler import AdjustedSampler, Adjustments, Choice
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler, TokenChooser
from splitup.decode.stop import StopFilter
from splitup.graph.manifest import Manifest
from splitup.net.metrics import make_histogram
from splitup_gateway.charges import Charge

_log = logging.getLogger("splitup.serve")

FIRST_TOKEN: Final = make_histogram(
    "splitup_serve_first_token_seconds",
    "Time from a request for a text to its first token.",
    (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15),
)
FinishReason = Literal["stop", "length"]
Speculate: TypeAlias = Callable[[], Awaitable[Speculation]]  # what the next text drafts with
DEFAULT_CHAT_TOKENS: Final = 1_024  # when a chat names no limit; less where the model has less room
ATTEMPTS: Final = 2  # on different leases


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What one text is to be."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    sampler: Sampler
    adjustments: Adjustments
    grammar: Grammar | None = None
    images: tuple[bytes, ...] = ()  # files
    marked: tuple[int, ...] = ()  # the prompt as ``mark_images`` gives it, if it has images
    told: tuple[int, ...] = ()  # tokens that its reader has already; the rest follows

    @property
    def cache_key(self) -> tuple[int, ...]:
        """What comes first as a cache knows it: equal ones fill it with the same rows."""
        return (self.marked or self.prompt) + self.told

    def make_request(
        self, model: TextModel, sampler: TokenChooser | None = None, cached: int = 0
    ) -> TextRequest:
        """Return what a decoder takes; raise InvalidInput when the model has no room for it."""
        return model.make_request(
            self.prompt + self.told,
            max_tokens=self.max_tokens - len(self.told),
            sampler=sampler or self.sampler,
            cached=cached,
            images=len(self.images),
        )


@dataclass(slots=True)
class Report:
    """What a text took so far, with every token; complete once its generation has ended."""

    prompt: tuple[int, ...]
    cached_tokens: int = 0  # leading ones of the prompt, which were not fed again
    completion_tokens: int = 0  # all that were sampled, also what a stop string or the end took
    reasoning_tokens: int = 0  # those of them that are a thought
    finish_reason: FinishReason = "length"
    stop: str | None = None  # the string that ended it
    execution_ids: list[str] = field(default_factory=list)  # of all attempts
    first_step: int = 0  # of the first execution
    fed_tokens: int = 0  # by steps whose logits are there
    loading: Collection[str] = ()  # nodes that load the model's tasks now
    steps: int = 0  # of all attempts, as are the next
    cost_micro_usdc: int = 0
    # of the tower for images, in executions of its own
    image_execution_ids: list[str] = field(default_factory=list)
    image_steps: int = 0
    image_cost_micro_usdc: int = 0

    @property
    def total_micro_usdc(self) -> int:
        """The cost of the text and of its images."""
        return self.cost_micro_usdc + self.image_cost_micro_usdc

    def begin(self, session: Session) -> None:
        """Note the execution of an attempt."""
        if not self.execution_ids:
            self.first_step = session.steps
        self.execution_ids.append(session.execution_id)
        self.loading = session.loading

    def save(self) -> dict[str, Any]:
        """Return what it says of the text, in JSON's types."""
        return {name: getattr(self, name) for name in _SAVED}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Say what was saved."""
        for name in _SAVED:
            setattr(self, name, saved[name])

    def describe_progress(self) -> str:
        """Return how far it is before its first token."""
        if not self.execution_ids:
            return "waiting for nodes"
        if self.loading:
            return f"{len(self.loading)} nodes are loading the model"
        fed = min(self.cached_tokens + self.fed_tokens, len(self.prompt))
        return f"fed {fed} of {len(self.prompt)} tokens"

    def add_steps(self, steps: int, manifest: Manifest) -> None:
        """Add the steps of an attempt, also of one that failed: nodes computed them."""
        self.steps += steps
        self.cost_micro_usdc = manifest.cost_micro_usdc(self.steps)  # which rounds once


_SAVED: Final = tuple(
    one.name for one in fields(Report) if one.name not in ("prompt", "fed_tokens", "loading")
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A generated token; ``choice`` is None unless its probability was asked for."""

    token: Token
    choice: Choice | None
    names: Mapping[int, str] = field(default_factory=dict)  # texts of the tokens of ``choice``

    def save(self) -> list[Any]:
        """Return it in JSON's types."""
        choice = self.choice and [self.choice.token, self.choice.logprob, self.choice.top]
        return [self.token.id, self.token.text, choice, [*self.names.items()]]

    @classmethod
    def restore(cls, saved: Sequence[Any]) -> Piece:
        """Return what was saved."""
        token, text, chosen, names = saved
        choice = None
        if chosen is not None:
            top = tuple((int(each), float(value)) for each, value in chosen[2])
            choice = Choice(chosen[0], chosen[1], top)
        return cls(Token(token, text), choice, dict(names))


def check_options(model: TextModel, options: GenerationOptions) -> None:
    """Raise InvalidInput for stop strings or biases that a text cannot have.

    What fails later has opened an execution, which its key does not pay.
    """
    StopFilter(options.stop)
    AdjustedSampler(options.sampler, options.adjustments, model.info.vocab)


def count_steps(model: TextModel, options: GenerationOptions) -> int:
    """Return the most steps that a text may take, when nothing of its prompt is cached."""
    if len(options.told) >= options.max_tokens:
        return 0
    return make_decoder(None, options.make_request(model)).max_steps


# returns the images of a request at their places in a prompt, as far as they are not cached
PlaceImages: TypeAlias = Callable[
    [GenerationOptions, Sequence[range], int, Report], Awaitable[PromptImages]
]


async def generate_text(
    pool: LeasePool,
    model: TextModel,
    options: GenerationOptions,
    report: Report,
    charge: Charge,
    speculate: Speculate | None = None,
    images: PlaceImages | None = None,
) -> AsyncGenerator[Piece, None]:
    """Yield the tokens of a text, and fill in ``report``; ``charge`` says for whom it is.

    With ``speculate`` they are the same tokens in fewer steps; ``images`` are those of its request,
    which are read one token at a time. A lease that fails is replaced once, and the text goes on
    there, if ``charge`` covers the steps that are run again; so is one whose outputs cannot be
    right, which serves nobody any more. Raises InvalidInput, Throttled, ExecutionFailed,
    Implausible and what opening a lease raises.
    """
    began, told = time.monotonic(), [*options.told]
    try:
        if report.stop is not None or len(options.told) >= options.max_tokens:
            report.finish_reason = "length" if report.stop is None else "stop"
            return  # only its end was not told
        for attempt in range(1, ATTEMPTS + 1):
            most = count_steps(model, options)
            async with charge.borrow(pool, options.cache_key, most) as lease:
                cost = report.cost_micro_usdc
                report.begin(lease.session)
                found = _generate(
                    lease, model, options, report, charge.principal, speculate, images
                )
                try:
                    async with contextlib.aclosing(found):
                        async for piece in found:
                            if not told:
                                FIRST_TOKEN.observe(time.monotonic() - began)
                            told.append(piece.token.id)
                            yield piece
                    return
                except (ExecutionFailed, Implausible) as error:
                    if isinstance(error, Implausible):
                        lease.spoil(error)
                    # blocks of tokens are written in any order, and cannot be begun in the middle
                    is_whole = bool(told) and model.info.diffusion is not None
                    lost = report.cost_micro_usdc - cost
                    if is_whole or attempt == ATTEMPTS or not await charge.cover(lost):
                        raise
                    options = replace(options, told=tuple(told))
    finally:
        add_to_totals(pool.totals, report)


def add_to_totals(totals: Totals, report: Report) -> None:
    """Count a text that has ended, or the texts of one request for embeddings."""
    totals.texts += 1
    totals.prompt_tokens += len(report.prompt)
    totals.cached_tokens += report.cached_tokens
    totals.completion_tokens += report.completion_tokens
    totals.cost_micro_usdc += report.cost_micro_usdc


async def _generate(
    lease: Lease,
    model: TextModel,
    options: GenerationOptions,
    report: Report,
    principal: str,
    speculate: Speculate | None,
    images: PlaceImages | None,
) -> AsyncGenerator[Piece, None]:
    sampler: Sampler | AdjustedSampler = options.sampler
    choices: list[Choice] = []
    allowed = None
    if options.grammar is not None:
        allowed = await model.grammars.open(options.grammar, principal)
        for told in options.told:
            allowed.accept(told)
    if allowed is not None or not options.adjustments.is_empty:
        adjusted = AdjustedSampler(options.sampler, options.adjustments, model.info.vocab, allowed)
        adjusted.follow(options.prompt, options.told)
        sampler, choices = adjusted, adjusted.choices
    cached = lease.contents.count_common(options.cache_key)
    request = options.make_request(model, sampler, cached)
    placed = None
    if images is not None and options.images:
        placed = await images(options, request.images, cached, report)
    ends = StopFilter(options.stop, len(options.told))
    report.fed_tokens = 0
    if not options.told:
        report.cached_tokens = cached

    def count_fed(arrays: Mapping[str, Any], _: object) -> None:
        report.fed_tokens += len(arrays["tokens"])

    counted, last = lease.session.steps, (options.prompt + options.told)[-1]

    def count() -> None:
        nonlocal counted
        report.completion_tokens = ends.taken
        report.add_steps(lease.session.steps - counted, model.manifest)
        counted = lease.session.steps

    decoder, drafting = make_decoder(None, request), None
    if speculate is not None and allowed is None and placed is None:  # these go token by token
        try:
            speculation = await speculate()
        except SplitUpError as error:
            _log.warning("a text is decoded without drafts: %s", error)
        else:
            decoder = make_decoder("speculative", request, speculation=speculation)
            drafting = speculation.start(decoder)
    tokens = generate_tokens(
        lease.session,
        decoder,
        model.tokenizer,
        ends=ends,
        contents=lease.contents,
        on_step=count_fed,
        drafting=drafting,
        images=placed,
        told=len(options.told),
    )
    try:
        async with contextlib.aclosing(tokens):
            place = 0
            async for token in tokens:
                count()
                report.stop = ends.found
                if place < len(choices):
                    choice = choices[place]
                    names = await model.tokenizer.run(partial(_name_tokens, model, choice, last))
                    yield Piece(token, choice, names)
                else:
                    yield Piece(token, None)
                last, place = token.id, place + 1
    finally:
        count()
    if ends.found is None and ends.taken < options.max_tokens:
        report.completion_tokens += 1  # the end token
    if ends.found is not None or ends.taken < options.max_tokens:
        report.finish_reason, report.stop = "stop", ends.found


def _name_tokens(model: TextModel, choice: Choice, last: int) -> dict[int, str]:
    """Return the texts of a choice's tokens after the token ``last``."""
    decode = partial(model.tokenizer.decode, after=[last], skip_special_tokens=False)
    return {token: decode([token]) for token in {choice.token, *(token for token, _ in choice.top)}}
