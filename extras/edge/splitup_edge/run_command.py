"""``splitup edge run``: a text from an exported model, without a network."""

from __future__ import annotations

import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.commands.generate import (
    DecoderOptions,
    DiffusionFlags,
    Generated,
    SamplingOptions,
    TextOptions,
)
from splitup.cli.console import Output
from splitup.cli.options import read_text

if TYPE_CHECKING:
    from splitup.client.text.generation import DecoderName


@as_command
async def command(
    action: Annotated[Literal["run"], typer.Argument(help="run: continue a text.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What 'splitup-deploy export' wrote.")
    ],
    text: TextOptions,
    sampling: SamplingOptions,
    decoder: DecoderOptions,
    diffusion: DiffusionFlags,
    *,
    output: JsonOutput,
) -> None:
    """Continue a text with a model in a file. Needs the extra [edge].

    The tokens are those that a network would give with the same flags.
    """
    done = await generate(output, file, text, sampling, decoder, diffusion)
    if output.as_json:
        output.print_json(
            {
                "text": done.text,
                "tokens": done.tokens,
                "first_token_s": round(done.first_s, 3),
                "tokens_per_s": round(done.tokens_per_s, 1),
            }
        )


async def generate(
    output: Output,
    file: Path,
    text: TextOptions,
    sampling: SamplingOptions,
    flags: DecoderOptions,
    diffusion: DiffusionFlags,
) -> Generated:
    """Generate; write the prompt and the tokens to ``output`` unless it wants JSON.

    Raises InvalidModel for a damaged file, InvalidInput for a text that it has no room for.
    """
    from splitup.client.text.drafting import make_blocks
    from splitup.client.text.generation import encode_prompt, generate_tokens, make_decoder
    from splitup.client.text.tokenizer import ModelTokenizer
    from splitup.decode.prompt import TextRequest
    from splitup.decode.stop import StopFilter
    from splitup_edge.confined_program import EdgeTexts

    prompt = read_text(text.prompt)
    lookahead, blocks, ends = flags.read_lookahead(), diffusion.read(), StopFilter(text.stop or ())
    with (
        closing(EdgeTexts(file)) as model,
        closing(ModelTokenizer(model.tokenizer, f"'{file}'")) as tokenizer,
    ):
        done, info = Generated(opened_s=time.monotonic()), model.manifest.text
        request = TextRequest(
            prompt=tuple(encode_prompt(tokenizer, prompt)),
            sampler=sampling.read(),
            max_tokens=text.max_tokens,
            eos_ids=frozenset(info.eos_ids),
            vocab=info.vocab,
            context=info.context,
            chunk=model.manifest.chunk,
            blocks=make_blocks(info.diffusion),
        )
        name = cast("DecoderName | None", flags.decoder)  # which it checks
        machine = make_decoder(name, request, lookahead, diffusion=blocks)
        if not output.as_json:
            output.write_text(prompt)
        texts = generate_tokens(model, machine, tokenizer, ends=ends)
        async with aclosing(texts) as tokens:
            async for token in tokens:
                done.note(token, time.monotonic())
                if not output.as_json:
                    output.write_text(token.text)
    output.end_text()
    output.say(done.describe())
    return done
