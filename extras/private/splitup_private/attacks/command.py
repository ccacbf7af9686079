"""``splitup-deploy privacy``: attack what users of a private model would send to nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from splitup_deploy.cli.options import CutOptions, SourceArgument
from splitup_deploy.cli.steps import compile_model

from splitup.cli.command import JsonOutput, as_command
from splitup.core.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyOptions:
    """Which model to attack, and with what."""

    model: SourceArgument
    text: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Text like that of the model's users, UTF-8; 21,000 tokens show the whole curve.",
        ),
    ]
    private: Annotated[
        str,
        typer.Option(metavar="K,…", help="Blocks at each end that users run."),
    ] = "0,1,2"
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="As for 'register'."),
    ] = None
    chunk: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="As for 'register'."),
    ] = None
    tokens: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=4096, help="Tokens to recover with the weights."),
    ] = 64
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="File for 'register --privacy'."),
    ] = None


@as_command
def command(options: PrivacyOptions, *, output: JsonOutput) -> None:
    """Measure how much of a text nodes can reconstruct when users keep the first and last blocks.

    Attacks the very split: with the model's weights, and without them after learning from pairs of
    a token and its activations; on what users send, and on what nodes send back. Takes about a
    minute for a small model.
    """
    from splitup_deploy.showing.progress import show_status, write_file

    from splitup_private.attacks.measure import measure_split
    from splitup_private.attacks.report import make_file, parse_blocks, render_curves, render_splits

    try:
        text = options.text.read_text("utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot read '{options.text}': {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"'{options.text}' is no UTF-8 text: {error}") from None
    splits = []
    for blocks in parse_blocks(options.private):
        cut = CutOptions(context=options.context, chunk=options.chunk, private=blocks)
        compiled = compile_model(output, options.model, "1TB", cut)
        with show_status(output.log, "attacking") as say:
            splits.append(measure_split(compiled, blocks, text, inverted=options.tokens, say=say))
    if options.file is not None:
        write_file(options.file, json.dumps(make_file(splits), indent=1) + "\n")
    if output.as_json:
        output.print_json(make_file(splits))
    else:
        output.out.print(render_splits(splits), soft_wrap=False)
        output.out.print(render_curves(splits), soft_wrap=False)
