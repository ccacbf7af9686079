"""Text generation over a session: the prompt in steps, then tokens, sampled on the client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol, get_args

from splitup.client.images.image_prompts import PromptImages, find_images, place_rows
from splitup.client.outcome import Array
from splitup.client.text.drafting import Drafting, Speculation, make_blocks
from splitup.client.text.grammar import Grammars
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import InvalidInput
from splitup.decode.block_diffusion import BlockDiffusionDecoder, DiffusionOptions
from splitup.decode.cache_contents import CacheContents
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import TokenChooser
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.lookahead import LookaheadOptions, make_lookahead_decoder
from splitup.decode.step import Decoder, make_arrays
from splitup.decode.stop import StopFilter
from splitup.graph.manifest import Manifest, TextInfo

DecoderName = Literal["sequential", "lookahead", "speculative", "diffusion"]
DECODERS: Final[tuple[DecoderName, ...]] = get_args(DecoderName)
OnStep = Callable[[dict[str, Array], Array], None]  # (inputs by name, logits [R, vocab])


class WritesText(Protocol):
    """What says how a model writes text: its manifest, or an exported model's own description."""

    @property
    def text(self) -> TextInfo | None:
        """Return the settings of text generation."""


class StepRunner(Protocol):
    """What takes the steps of a text: a session, on a network, behind a server or in a file."""

    @property
    def manifest(self) -> WritesText:
        """Return how the model writes text."""

    def submit(self, inputs: Mapping[str, Array]) -> asyncio.Future[dict[str, Array]]:
        """Take one step; the future gives its outputs by name."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; ``text`` is empty when the last of its character comes later."""

    id: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TextModel:
    """A registered model that generates text; ``name`` is what the user called it by."""

    name: str
    manifest: Manifest
    info: TextInfo
    tokenizer: ModelTokenizer
    grammars: Grammars
    chunk: int

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation; raise InvalidInput if the model holds none."""
        chat, tokenizer = self.info.chat, self.tokenizer
        if chat is None:
            raise InvalidInput(f"model {self.name} has no chat template")
        text = await tokenizer.run(
            partial(tokenizer.render_chat, chat, messages, context=self.info.context)
        )
        return await tokenizer.run(partial(tokenizer.encode, text, add_special_tokens=False))

    def make_request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampler: TokenChooser,
        cached: int = 0,
        images: int = 0,
    ) -> TextRequest:
        """Return what a decoder takes; raise InvalidInput when the model has no room for it.

        ``images`` is the number of images, whose tokens the prompt has.
        """
        return TextRequest(
            prompt=tuple(prompt),
            sampler=sampler,
            max_tokens=max_tokens,
            eos_ids=frozenset(self.info.eos_ids),
            vocab=self.info.vocab,
            context=self.info.context,
            chunk=self.chunk,
            cached=cached,
            blocks=make_blocks(self.info.diffusion),
            images=find_images(prompt, self.info.images, images),
        )


def get_text_info(manifest: Manifest, model: str) -> TextInfo:
    """Return the model's text settings; raise InvalidInput for a model that writes no text."""
    if manifest.is_encoder:
        made, use = "scores of pairs of texts", "splitup serve, which ranks texts"
        if manifest.kind == "text-embedding":
            made, use = "embeddings", f"splitup embed {model} --input TEXT"
        raise InvalidInput(f"model {model} gives {made} and writes no text; ask it with: {use}")
    if manifest.text is None:
        raise InvalidInput(
            f"model {model} is not a text model; run it with: "
            f"splitup run {model} --input NAME=FILE.npy"
        )
    return manifest.text


def get_chunk(manifest: Manifest) -> int:
    """Return the largest number of rows of one step; raise InvalidInput for a model without."""
    for port in manifest.user_inputs:
        if port.name == "tokens":
            return port.shape[0]
    raise InvalidInput("the model has no input 'tokens'; it cannot generate text")


def encode_prompt(tokenizer: ModelTokenizer, prompt: str | Sequence[int]) -> list[int]:
    """Return the prompt's tokens; a sequence of token ids is taken as it is. Blocks."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return [int(token) for token in prompt]


def check_decoder(
    name: str | None,
    lookahead: LookaheadOptions | None,
    draft: str | None = None,
    diffusion: DiffusionOptions | None = None,
) -> None:
    """Raise InvalidInput for a decoder that does not exist, or options of another one.

    None is the model's own decoder, "sequential" or "diffusion".
    """
    if name is not None and name not in DECODERS:
        raise InvalidInput(f"there is no decoder '{name}'; use one of {', '.join(DECODERS)}")
    called = name or "sequential"
    if lookahead is not None and name != "lookahead":
        raise InvalidInput(f"the decoder '{called}' has no window; 'lookahead' has one")
    if draft is not None and name != "speculative":
        raise InvalidInput(f"the decoder '{called}' has no draft model; 'speculative' takes one")
    if diffusion is not None and name not in (None, "diffusion"):
        raise InvalidInput(f"the decoder '{called}' writes no blocks; 'diffusion' does")


def make_decoder(
    name: DecoderName | None,
    request: TextRequest,
    lookahead: LookaheadOptions | None = None,
    speculation: Speculation | None = None,
    diffusion: DiffusionOptions | None = None,
) -> Decoder:
    """Return the decoder of this name; by default the model's own.

    All of them generate the same tokens, except "diffusion", which is for models that write blocks
    of tokens: these have no other. Raises InvalidInput for another model, and for lookahead options
    that the model's steps have no room for; without options lookahead adapts to the room there is.
    Without ``speculation`` the speculative decoder drafts from the text alone.
    """
    if name is None:
        name = "sequential" if request.blocks is None else "diffusion"
    check_decoder(name, lookahead, diffusion=diffusion)
    if name == "sequential":
        return SequentialDecoder(request)
    if request.images:
        raise InvalidInput(f"the decoder '{name}' reads no images; 'sequential' does")
    if name == "speculative":
        return (speculation or Speculation()).make_decoder(request)
    if name == "diffusion":
        return BlockDiffusionDecoder(request, diffusion)
    if lookahead is not None:
        lookahead.check_chunk(request.chunk)
    return make_lookahead_decoder(request, lookahead)


def make_cache_contents(manifest: WritesText) -> CacheContents:
    """Return the contents of the cache of a session that starts: none."""
    if (text := manifest.text) is None:
        return CacheContents()
    size = 1 if text.diffusion is None else text.diffusion.block_size
    return CacheContents(
        is_recurrent=text.is_recurrent, steps_back=text.steps_back, block_size=size
    )


async def generate_tokens(
    session: StepRunner,
    decoder: Decoder,
    tokenizer: ModelTokenizer,
    *,
    ends: StopFilter | None = None,
    contents: CacheContents | None = None,
    on_step: OnStep | None = None,
    drafting: Drafting | None = None,
    images: PromptImages | None = None,
    told: int = 0,
) -> AsyncGenerator[Token, None]:
    """Drive the decoder over the session; yields tokens as they become certain.

    Steps are submitted as soon as the decoder has them and their logits taken in order, so that
    prompt steps overlap in the pipeline of nodes. The text ends where ``ends`` says. ``contents``
    are those of the session's cache: give the same ones to every generation on one session.
    ``on_step`` sees every step's inputs and logits. ``drafting`` is closed at the end.
    ``images`` are those of the request's prompt. Its last ``told`` tokens are of the text already:
    what follows them is what would have followed.
    """
    ends = ends or StopFilter(())
    if contents is None:
        contents = make_cache_contents(session.manifest)
    prompt = decoder.request.prompt
    stream = tokenizer.open_stream(prompt[: len(prompt) - told])
    if told:  # the last may be a part of a character
        await tokenizer.run(partial(stream.extend, prompt[-told:], is_end=False))
    try:
        async with aclosing(
            _decode(session, decoder, contents, on_step, drafting, images)
        ) as found:
            async for tokens, is_end in found:
                extend = partial(stream.extend, tokens, is_end=is_end)
                for token, part in await tokenizer.run(extend) if tokens or is_end else []:
                    if not ends.found:
                        for known, text in ends.push(token, part):
                            yield Token(known, text)
                if ends.found:
                    return
        for known, text in ends.flush():
            yield Token(known, text)
    finally:
        if drafting is not None:
            await drafting.close()


async def _decode(
    session: StepRunner,
    decoder: Decoder,
    contents: CacheContents,
    on_step: OnStep | None,
    drafting: Drafting | None,
    images: PromptImages | None,
) -> AsyncGenerator[tuple[list[int], bool], None]:
    """Yield the tokens that each step makes certain, and whether none follow."""
    sampler = decoder.request.sampler
    chunk, text = decoder.request.chunk, session.manifest.text
    in_flight: deque[tuple[dict[str, Array], asyncio.Future[dict[str, Array]]]] = deque()
    number, vocabulary, loop = 0, 0, asyncio.get_running_loop()
    while not decoder.finished:
        position = None
        while (step := decoder.next_step()) is not None:
            contents.feed(step if images is None else images.mark(step))
            arrays = make_arrays(step, chunk)
            if text is not None and text.images is not None:
                arrays["images"] = place_rows(step, images, text.images)
            in_flight.append((arrays, session.submit(arrays)))
            position = step.positions[step.outputs[0]]
        if vocabulary and position is not None:
            loop.call_soon(sampler.prepare, position, vocabulary)
        if drafting is not None and await drafting.advance(in_flight[0][1] if in_flight else None):
            continue  # the drafts may have made a step
        arrays, future = in_flight.popleft()
        await sampler.ready()  # while the nodes compute
        logits = (await future)["logits"]
        vocabulary = logits.shape[-1]
        if on_step is not None:
            on_step(arrays, logits)
        tokens = list(decoder.receive_logits(number, logits))
        number += 1
        yield tokens, decoder.finished
