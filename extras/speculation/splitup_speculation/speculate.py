"""``splitup speculate``: a text from a target worker, with drafts of a draft worker."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.commands.generate import Generated, SamplingOptions, TextOptions
from splitup.cli.console import Output
from splitup.cli.options import ConfigFlag, read_text
from splitup_speculation.flags import SettingsFlag, TlsFlags, make_context

if TYPE_CHECKING:
    from splitup.client.telemetry import CallSpan
    from splitup_speculation.rpc import Tls

CONTEXT = make_context("speculate")


@dataclasses.dataclass(frozen=True, slots=True)
class CallFlags:
    """Which workers are asked, and how long they may take."""

    target: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT[,…]",
            help="Target workers of one model; the next one replaces one that fails.",
        ),
    ]
    draft: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT[,…]",
            help="Draft workers; without any, n-grams of the text are the drafts.",
        ),
    ] = ""
    target_timeout: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Seconds of a step.")
    ] = 30.0
    draft_timeout: Annotated[
        float, typer.Option(metavar="S", min=0.01, help="Seconds of a tree.")
    ] = 5.0
    spans: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every call's times, as JSON lines."),
    ] = None


@dataclasses.dataclass(frozen=True, slots=True)
class PenaltyFlags:
    """What makes tokens that the text has already less likely."""

    repetition_penalty: Annotated[
        float,
        typer.Option(
            metavar="P", help="Divide logits of tokens that the prompt or the text has; 1 for none."
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        typer.Option(metavar="P", help="Subtract this each time a token was chosen."),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        typer.Option(metavar="P", help="Subtract this once if a token was chosen."),
    ] = 0.0


@as_command(hint="loading")
async def command(
    calls: CallFlags,
    text: TextOptions,
    sampling: SamplingOptions,
    penalties: PenaltyFlags,
    tls: TlsFlags,
    settings: SettingsFlag = None,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Continue a text by workers that draft and verify. Needs the extra [workers].

    The tokens are those of splitup generate with the same options; penalties are only here.
    """
    done = await _speculate(output, config, calls, text, sampling, penalties, tls.read())
    if output.as_json:
        output.print_json(done)


async def _speculate(
    output: Output,
    config: ConfigFlag,
    calls: CallFlags,
    text: TextOptions,
    sampling: SamplingOptions,
    penalties: PenaltyFlags,
    tls: Tls,
) -> dict[str, Any]:
    """Write the text to ``output`` unless it wants JSON; return what JSON says."""
    from splitup.client.connection import SplitUp
    from splitup.client.telemetry import send_calls
    from splitup.client.text.generation import encode_prompt
    from splitup.decode.adjusted_sampler import Adjustments
    from splitup_speculation import remote

    given = read_text(text.prompt)
    spans: list[CallSpan] = []
    sampler = sampling.read()
    options = remote.CallOptions(calls.target_timeout, calls.draft_timeout, spans.append)
    done = Generated(opened_s=time.monotonic())
    async with AsyncExitStack() as stack:
        target = remote.WorkerGroup("TargetService", calls.target.split(","), tls)
        stack.push_async_callback(target.close)
        drafts = None
        if calls.draft:
            drafts = remote.WorkerGroup("DraftService", calls.draft.split(","), tls)
            stack.push_async_callback(drafts.close)
        net = await stack.enter_async_context(SplitUp.connect(config))
        model, drafts = await remote.find_model(net, target, drafts)
        prompt = await model.tokenizer.run(partial(encode_prompt, model.tokenizer, given))
        if not output.as_json:
            output.write_text(given)
        tokens = remote.generate(
            target,
            drafts,
            model,
            prompt,
            max_tokens=text.max_tokens,
            sampler=sampler,
            adjustments=Adjustments(**dataclasses.asdict(penalties)),
            stop=tuple(text.stop or ()),
            options=options,
        )
        async with aclosing(tokens):
            async for token in tokens:
                done.note(token, time.monotonic())
                if not output.as_json:
                    output.write_text(token.text)
        await send_calls("text", spans)
    if calls.spans is not None:
        lines = [json.dumps(dataclasses.asdict(span)) + "\n" for span in spans]
        await asyncio.to_thread(calls.spans.write_text, "".join(lines), "utf-8")
    output.end_text()
    rounds = sum(span.name.endswith("VerifyDrafts") for span in spans)
    output.say(f"{len(done.tokens)} tokens in {rounds} calls of target workers")
    return {
        "text": done.text,
        "tokens": done.tokens,
        "rounds": rounds,
        "first_token_s": round(done.first_s, 3),
        "tokens_per_s": round(done.tokens_per_s, 1),
    }
