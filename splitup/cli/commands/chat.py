"""``splitup chat``: a conversation with a model, line by line."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from splitup.cli.command import as_command
from splitup.cli.commands.generate import SamplingOptions
from splitup.cli.console import Output
from splitup.cli.options import ConfigFlag, VerifyFlag

if TYPE_CHECKING:
    from splitup.client.leases import LeasePool
    from splitup.client.text.generation import TextModel
    from splitup.decode.sampler import Sampler

_STEPS: Final = 4_096  # that an execution pays for ahead; unused ones are given back
_OWNER: Final = "chat"  # whose lease it is: nobody else uses this pool


@as_command
async def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or id of a registered chat model.")
    ],
    sampling: SamplingOptions,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told first.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens of one answer.")
    ] = 1_024,
    verify: VerifyFlag = None,
    config: ConfigFlag = None,
    *,
    output: Output,
) -> None:
    """Talk to a model: each line is a message, the end of the input (Ctrl-D) ends it.

    The conversation stays on its nodes between two messages, so that only what is new is fed and
    paid.
    """
    from splitup.client.connection import SplitUp
    from splitup.client.inputs import format_usdc
    from splitup.client.leases import LeaseOptions, LeasePool
    from splitup.core.errors import InvalidInput

    sampler = sampling.read()
    async with SplitUp.connect(config) as net:
        text = await net.fetch_text_model(model)
        if text.info.chat is None:
            raise InvalidInput(
                f"model {model} continues texts and answers no messages; use: splitup generate"
            )
        if text.manifest.client is not None:
            raise InvalidInput(f"model {model} leaves tasks to this machine; use: splitup generate")
        messages = [] if system is None else [{"role": "system", "content": system}]
        # opened by the first message: an execution without steps stays locked to its deadline
        options = LeaseOptions(most=1, warm=0, steps=_STEPS, verify=verify)
        pool = LeasePool(net, model, options)
        pool.open()
        steps = asked = 0
        try:
            while (line := await _read_line(output)) is not None:
                messages.append({"role": "user", "content": line})
                prompt = await text.encode_chat(messages)
                asked += 1
                answer, taken = await _answer(output, pool, text, prompt, sampler, max_tokens)
                messages.append({"role": "assistant", "content": answer})
                steps += taken
        finally:
            output.end_text()
            await pool.close()
            price = format_usdc(text.manifest.cost_micro_usdc(steps))
            if steps:
                output.say(f"{steps} steps, {price} and the committee's fee")
            elif asked:  # nodes settle what has steps
                minutes = options.seconds / 60
                output.say(
                    f"0 steps; what was locked, but for the price of the reserved stake, comes "
                    f"back after {minutes:g} minutes, with: splitup withdraw"
                )


async def _read_line(output: Output) -> str | None:
    """Return the next message that is not empty, None at the end of the input."""
    while True:
        if sys.stdin.isatty():
            output.out.print("> ", end="")
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return None
        if text := line.strip():
            return text


async def _answer(
    output: Output,
    pool: LeasePool,
    model: TextModel,
    prompt: list[int],
    sampler: Sampler,
    max_tokens: int,
) -> tuple[str, int]:
    """Write the answer to a conversation as it comes; return it, and the steps it took."""
    from splitup.client.text.generation import generate_tokens, make_decoder
    from splitup.core.errors import InvalidInput

    room = model.info.context - len(prompt) + 1
    if room < 1:
        raise InvalidInput(
            f"the conversation has {len(prompt)} tokens, and model {model.name} reads "
            f"{model.info.context}; begin another one"
        )
    make_request = partial(
        model.make_request, prompt, max_tokens=min(max_tokens, room), sampler=sampler
    )
    steps, text = make_decoder(None, make_request()).max_steps, ""
    async with pool.borrow(_OWNER, prompt, steps) as lease:
        before, contents = lease.session.steps, lease.contents
        decoder = make_decoder(None, make_request(cached=contents.count_common(prompt)))
        async for token in generate_tokens(
            lease.session, decoder, model.tokenizer, contents=contents
        ):
            output.write_text(token.text)
            text += token.text
        output.end_text()
        return text, lease.session.steps - before
