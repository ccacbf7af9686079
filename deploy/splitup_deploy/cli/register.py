"""``splitup-deploy register``: compile a model, store its parts, register it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.core.errors import InvalidInput
from splitup_deploy.cli.options import (
    CutOptions,
    KeyOptions,
    ManifestOptions,
    NetworkOptions,
    SourceOptions,
    TargetFlag,
)
from splitup_deploy.cli.steps import compile_model, open_network

if TYPE_CHECKING:
    from splitup_deploy.cutting.build import CompiledModel
    from splitup_deploy.publishing.registration import Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterOptions:
    """What to register, as whom, and where."""

    source: SourceOptions
    name: Annotated[str, typer.Option(metavar="NAME", help="Name under which users find it.")]
    target_vram: TargetFlag
    cut: CutOptions
    manifest: ManifestOptions
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Compile and show the cut, or say which target or context allows one; store and "
            "register nothing.",
        ),
    ] = False
    network: NetworkOptions
    key: KeyOptions


@as_command(interrupted="interrupted; run the command again to go on where it stopped")
def command(options: RegisterOptions, *, output: JsonOutput) -> None:
    """Compile a model, store its parts, and register it with one transaction at the end."""
    from splitup.chain.registered_models import check_name
    from splitup.core import event_loop
    from splitup_deploy.cutting.build import parse_sizes
    from splitup_deploy.showing.profile import compute_profile
    from splitup_deploy.showing.progress import (
        UploadBar,
        show_model,
        show_registration,
        show_status,
    )

    model = options.source.read()
    check_name(options.name)
    targets = parse_sizes(options.target_vram)
    if options.dry_run:
        compiled = _compile(model, options, output)
        profile = compute_profile(compiled.manifest, compiled.times_ps, targets)
        show_model(output, profile, options.name, compiled.is_complete)
        return
    from splitup_deploy.publishing.registration import check_ready, publish

    network = options.network.load(options.key)
    identity = network.load_user()

    async def check() -> None:
        async with open_network(network, identity) as (chain, client):
            await check_ready(chain, options.name)
            await client.ping()

    with show_status(output.log, "asking the chain and the storage"):
        event_loop.run(check())  # before the compiler's minutes, during which no loop runs
    compiled = _compile(model, options, output)

    async def send() -> Registration:
        with UploadBar(output.log) as progress:
            async with open_network(network, identity) as (chain, client):
                return await publish(compiled, options.name, chain, client, progress)

    done = event_loop.run(send())
    profile = compute_profile(compiled.manifest, compiled.times_ps, targets)
    show_registration(output, profile, done)


def _compile(model: str, options: RegisterOptions, output: Output) -> CompiledModel:
    """Return what is registered, or with --dry-run shown: the same bytes and the same id."""
    from splitup_deploy.showing.progress import show_status

    compiled = compile_model(output, model, options.target_vram, options.cut, refuses_waste=True)
    if not compiled.is_complete:
        if options.dry_run:
            return compiled
        raise InvalidInput(
            f"'{model}' has no weights, so it cannot be registered: put them beside "
            "config.json, or look at the cut with --dry-run"
        )
    with show_status(output.log, "completing the manifest") as say:
        complete = options.manifest.apply(compiled, say)
    output.say(options.manifest.describe_tolerances(complete.manifest))
    if not complete.has_vectors and options.manifest.reference is None:
        output.say(
            "no self-test vectors: this machine's results would give the model another id than "
            "most machines' (to publish them nevertheless: --reference)"
        )
    return complete
