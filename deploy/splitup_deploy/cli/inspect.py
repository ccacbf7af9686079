"""``splitup-deploy inspect``: show how a model is cut, registered or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.core.errors import ConfigurationError, InvalidInput, Unavailable
from splitup_deploy.cli.options import TARGET_HELP, CutOptions, ManifestOptions, NetworkOptions
from splitup_deploy.cli.steps import compile_model, open_network

if TYPE_CHECKING:
    from splitup_deploy.showing.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """Which model to show, and how."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Registered name or id; or, to compile, what 'register' takes, or a config.json.",
        ),
    ]
    target_vram: Annotated[str | None, typer.Option(metavar="SIZE", help=TARGET_HELP)] = None
    cut: CutOptions
    manifest: ManifestOptions
    format: Annotated[
        Literal["text", "mermaid", "dot"],
        typer.Option(help="Text, or the task graph for Mermaid or Graphviz."),
    ] = "text"
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Where the graph goes (default: stdout)."),
    ] = None
    network: NetworkOptions


@as_command
def command(options: InspectOptions, *, output: JsonOutput) -> None:
    """Show a model's task graph with bytes, memory, time and price of every task.

    A directory or config.json without weights is enough to preview how a model would be cut. With
    weights, the id is the one that 'register' gives with the same flags. Where --target-vram or
    --context allows no good cut, it says which would.
    """
    from splitup.core import event_loop

    if ":" in options.model or Path(options.model).exists():
        profile, is_complete = _compile(options, output)
        _show(options, output, profile, None, is_complete)
    else:
        try:
            profile, name = event_loop.run(_fetch(options))
        except (ConfigurationError, Unavailable) as error:
            raise type(error)(
                f"{options.model!r:.80} is no file or directory here, and cannot be looked up: "
                f"{error}"
            ) from None
        if options.format == "text" and not output.as_json:
            output.say(
                "times are estimated from each task's weights, state and operations; 'register', "
                "which reads the graph, may have shown others"
            )
        _show(options, output, profile, name, True)


def _compile(options: InspectOptions, output: Output) -> tuple[Profile, bool]:
    """Return the profile of a model that is compiled, and whether it has weights and so an id."""
    from splitup_deploy.cutting.build import parse_sizes
    from splitup_deploy.showing.profile import compute_profile
    from splitup_deploy.showing.progress import show_status

    if options.target_vram is None:
        raise InvalidInput(
            f"to compile {options.model}, say how much memory a task may need: --target-vram 12GB"
        )
    compiled = compile_model(output, options.model, options.target_vram, options.cut)
    if compiled.is_complete and options.format == "text":  # a drawing does not show the id
        with show_status(output.log, "completing the manifest") as say:
            compiled = options.manifest.apply(compiled, say)
    targets = parse_sizes(options.target_vram)
    profile = compute_profile(compiled.manifest, compiled.times_ps, targets)
    return profile, compiled.is_complete


async def _fetch(options: InspectOptions) -> tuple[Profile, str]:
    """Return the profile of a registered model, and the name it was registered under."""
    from splitup.chain.registered_models import find_model
    from splitup.graph.manifest_rules import load_manifest
    from splitup_deploy.cutting.build import parse_sizes
    from splitup_deploy.showing.profile import compute_profile

    async with open_network(options.network.load()) as (chain, client):
        try:
            found = await find_model(chain, options.model)
        except InvalidInput as error:
            raise InvalidInput(f"{error}; nor is there such a file or directory") from None
        if (options.cut, options.manifest) != (CutOptions(), ManifestOptions()):
            raise InvalidInput(
                f"{found.name} is registered, so it is cut already; of the options for compiling, "
                "give at most --target-vram"
            )
        manifest = load_manifest(await client.fetch_manifest(found.model_id))
    targets = () if options.target_vram is None else parse_sizes(options.target_vram)
    return compute_profile(manifest, targets_bytes=targets), found.name


def _show(
    options: InspectOptions, output: Output, profile: Profile, name: str | None, is_complete: bool
) -> None:
    from splitup_deploy.showing.drawing import draw_dot, draw_mermaid
    from splitup_deploy.showing.progress import show_model, write_file

    if options.format == "text":
        if options.file is not None:
            raise InvalidInput("--output takes a drawing: add --format mermaid or --format dot")
        show_model(output, profile, name, is_complete)
        return
    text = draw_mermaid(profile) if options.format == "mermaid" else draw_dot(profile)
    if options.file is None:
        typer.echo(text, nl=False)
    else:
        write_file(options.file, text)
