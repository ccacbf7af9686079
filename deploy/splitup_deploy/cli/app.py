"""splitup-deploy: compile a model, put it on the network, look at it.

Data goes to stdout, everything else to stderr. Exit codes: 0 done (also when there was nothing to
do), 1 the network or the chain failed or refused, 2 the input cannot be used, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from splitup.chain.client import Chain
from splitup.chain.deployment import Deployment
from splitup.cli.console import EXIT_CODES, Output, run_command
from splitup.config import NetworkConfig
from splitup.core import limits
from splitup.core.errors import ConfigurationError, InvalidInput
from splitup.crypto.keys import Identity
from splitup.graph.manifest import Manifest, load_manifest
from splitup.storage.gateway_client import GatewayClient
from splitup_deploy.calibration.calibrate import calibrate_model, encode_prompt, render_report
from splitup_deploy.calibration.tolerances import (
    attach_tolerances,
    attach_vectors,
    load_tolerances,
    makes_vectors,
)
from splitup_deploy.cutting.build import CompiledModel, build, parse_dims, parse_sizes
from splitup_deploy.cutting.partition import Balance
from splitup_deploy.frontends import Sizes
from splitup_deploy.frontends.weight_sources import watch_hashing
from splitup_deploy.publishing.register import (
    RegisteredModel,
    Registration,
    check_name,
    check_ready,
    fetch_model_by_name,
    fetch_models,
    register,
)
from splitup_deploy.showing.profile import Profile, compute_profile
from splitup_deploy.showing.progress import (
    HashBar,
    Picture,
    UploadBar,
    show_model,
    show_registration,
    write_file,
    write_picture,
)
from splitup_deploy.showing.report import render_models

app = typer.Typer(
    name="splitup-deploy",
    help="Compile a model into tasks, register it, and look at registered ones.\n\n" + EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_T = TypeVar("_T")
_run = partial(
    run_command, interrupted="interrupted; run the command again to go on where it stopped"
)

ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="Network file or directory (default: $SPLITUP_HOME, .splitup).",
    ),
]
RpcFlag = Annotated[
    str | None, typer.Option("--rpc-url", metavar="URL", help="The chain's RPC endpoint.")
]
DeploymentFlag = Annotated[
    Path | None,
    typer.Option("--deployment", metavar="FILE", help="File with the contracts' addresses."),
]
GatewayFlag = Annotated[
    str | None,
    typer.Option("--gateway", metavar="URLS", help="Storage gateways' URLs, with commas."),
]
KeystoreFlag = Annotated[
    Path | None, typer.Option("--keystore", metavar="FILE", help="Your key file.")
]
PassphraseFlag = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="File that holds its passphrase."),
]
_TARGET_HELP = (
    "Memory a task may need: 12GB, 900MB, 6GiB; or of a mixed fleet's cards, which take turns: "
    "8GB,12GB,24GB."
)
TargetFlag = Annotated[str | None, typer.Option("--target-vram", metavar="SIZE", help=_TARGET_HELP)]
BalanceFlag = Annotated[
    Balance,
    typer.Option("--balance", help="Shortest step of one user, or most steps a second of many."),
]
MaxTasksFlag = Annotated[
    int | None,
    typer.Option(
        "--max-tasks",
        metavar="N",
        min=1,
        help=f"The most tasks to cut into (default: {limits.MAX_TASKS}).",
    ),
]
PrivateFlag = Annotated[
    int | None,
    typer.Option(
        "--private",
        metavar="K",
        min=0,
        help="Blocks at each end that users run themselves, with embedding and head "
        "(default: nodes run all).",
    ),
]
ContextFlag = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        min=1,
        help="Tokens a sequence may have (default: as many as the model was trained for).",
    ),
]
ChunkFlag = Annotated[
    int | None,
    typer.Option("--chunk", metavar="N", min=1, help="The most tokens of one step (default: 64)."),
]
DimsFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="Size of an ONNX file's symbolic dimension, NAME=SIZE; repeatable.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command("register", short_help="Compile a model, store its parts, register it.")
def register_command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Hugging Face directory, *.onnx, *.gguf, or module:function (tinygrad).",
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name under which users find it.")
    ],
    target_vram: Annotated[str, typer.Option("--target-vram", metavar="SIZE", help=_TARGET_HELP)],
    context: ContextFlag = None,
    chunk: ChunkFlag = None,
    dims: DimsFlag = None,
    balance: BalanceFlag = "latency",
    max_tasks: MaxTasksFlag = None,
    private: PrivateFlag = None,
    tolerance: Annotated[
        Path | None,
        typer.Option(
            "--tolerance",
            metavar="FILE",
            help="What 'splitup-deploy calibrate' found for this cut.",
        ),
    ] = None,
    reference: Annotated[
        bool | None,
        typer.Option(
            "--reference/--no-reference",
            help="Run every task here once, so that nodes can try themselves against it. By "
            "default only where it does not change the model's id: on a CPU, x86-64 with AVX2.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compile and show, store and register nothing.")
    ] = False,
    config: ConfigFlag = None,
    rpc_url: RpcFlag = None,
    deployment: DeploymentFlag = None,
    gateway: GatewayFlag = None,
    keystore: KeystoreFlag = None,
    passphrase_file: PassphraseFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Compile a model, store its parts, and register it with one transaction at the end."""
    output = Output.open(as_json)

    def run() -> None:
        check_name(name)
        sizes = Sizes(context, chunk, parse_dims(dims or []))
        cutting = Cutting(parse_sizes(target_vram), sizes, balance, max_tasks, private)
        if dry_run:
            compiled = _compile(output, model, cutting)
            show_model(output, _profile(compiled, cutting), name, compiled.is_complete)
            return
        network = NetworkConfig.load(
            config,
            rpc_url=rpc_url,
            deployment=deployment,
            gateway_urls=gateway,
            user_keystore=keystore,
            user_passphrase_file=passphrase_file,
        )
        identity = network.load_user()

        async def check(chain: Chain, client: GatewayClient) -> None:
            await check_ready(chain, name)
            await client.ping()

        asyncio.run(_with_network(network, identity, check))  # before the compiler's minutes
        compiled = _compile(output, model, cutting)
        if not compiled.is_complete:
            raise InvalidInput(
                f"'{model}' has no weights, so it cannot be registered: put them beside "
                "config.json, or look at the cut with --dry-run"
            )

        if tolerance is not None:
            compiled = attach_tolerances(compiled, load_tolerances(tolerance))
        if makes_vectors() if reference is None else reference:
            with output.log.status("computing reference vectors"):
                compiled = attach_vectors(compiled)
        elif reference is None:
            output.log.print(
                "no reference vectors: this machine's would give the model another id than most "
                "machines' (to make them nevertheless: --reference)"
            )

        async def publish(chain: Chain, client: GatewayClient) -> Registration:
            with UploadBar(output.log) as progress:
                return await register(compiled, name, chain, client, progress)

        done = asyncio.run(_with_network(network, identity, publish))
        show_registration(output, _profile(compiled, cutting), done)

    _run(output, run)


@app.command("inspect", short_help="Show how a model is cut, and what each task needs.")
def inspect_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Registered name or id; or, to compile, what 'register --model' takes, or a "
            "config.json.",
        ),
    ],
    target_vram: TargetFlag = None,
    context: ContextFlag = None,
    chunk: ChunkFlag = None,
    dims: DimsFlag = None,
    balance: BalanceFlag = "latency",
    max_tasks: MaxTasksFlag = None,
    private: PrivateFlag = None,
    picture: Annotated[
        Picture, typer.Option("--format", help="How the task graph is drawn.")
    ] = "text",
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Where the drawing goes (default: stdout)."),
    ] = None,
    config: ConfigFlag = None,
    rpc_url: RpcFlag = None,
    deployment: DeploymentFlag = None,
    gateway: GatewayFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a model's task graph with bytes, memory, time and price of every task.

    A directory or config.json without weights is enough to see how a model would be cut.
    """
    output = Output.open(as_json)

    def show(profile: Profile, name: str | None, is_complete: bool = True) -> None:
        if picture == "text" and file is None:
            show_model(output, profile, name, is_complete)
            return
        write_picture(profile, name, picture, file)

    def run() -> None:
        if ":" in model or Path(model).exists():
            if target_vram is None:
                raise InvalidInput(
                    f"to compile {model}, say how much memory a task may need: --target-vram 12GB"
                )
            sizes = Sizes(context, chunk, parse_dims(dims or []))
            cutting = Cutting(parse_sizes(target_vram), sizes, balance, max_tasks, private)
            compiled = _compile(output, model, cutting)
            show(_profile(compiled, cutting), None, compiled.is_complete)
            return
        try:
            network = NetworkConfig.load(
                config, rpc_url=rpc_url, deployment=deployment, gateway_urls=gateway
            )
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{model!r:.80} is no file or directory here, and cannot be looked up: {error}"
            ) from None

        async def fetch(chain: Chain, client: GatewayClient) -> tuple[Manifest, str | None]:
            model_id, found_name = model, None
            if not model.startswith("0x"):
                found = await fetch_model_by_name(chain, model)
                if found is None:
                    raise InvalidInput(
                        f"there is no model {model!r}, neither registered nor as a directory; list "
                        "the registered ones with: splitup-deploy list"
                    )
                model_id, found_name = found.model_id, found.name
            return load_manifest(await client.fetch_manifest(model_id)), found_name

        manifest, found_name = asyncio.run(_with_network(network, None, fetch))
        targets = () if target_vram is None else parse_sizes(target_vram)
        show(compute_profile(manifest, targets_bytes=targets), found_name)

    _run(output, run)


@app.command("calibrate", short_help="Measure how far honest machines are apart.")
def calibrate_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model, as for 'register --model'.")
    ],
    target_vram: Annotated[str, typer.Option("--target-vram", metavar="SIZE", help=_TARGET_HELP)],
    context: ContextFlag = None,
    chunk: ChunkFlag = None,
    dims: DimsFlag = None,
    balance: BalanceFlag = "latency",
    max_tasks: MaxTasksFlag = None,
    private: PrivateFlag = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=2, max=4096, help="Steps to compute.")
    ] = 24,
    prompt: Annotated[
        str,
        typer.Option("--prompt", metavar="TEXT", help="Text to compute; random tokens follow it."),
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="File for 'register --tolerance'."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure how far honest machines are apart and how near the smallest cheats come.

    Computes every task with all code generators of this machine, then with lower precision,
    coarser weights, a skipped layer and a shorter context. Where a line can be drawn between them,
    it becomes the task's tolerance; elsewhere only equal bytes count. Takes minutes.
    """
    output = Output.open(as_json)

    def run() -> None:
        sizes = Sizes(context, chunk, parse_dims(dims or []))
        cutting = Cutting(parse_sizes(target_vram), sizes, balance, max_tasks, private)
        compiled = _compile(output, model, cutting)
        with output.log.status("calibrating") as status, tempfile.TemporaryDirectory() as folder:
            report = calibrate_model(
                compiled,
                Path(folder),
                steps,
                tokens=encode_prompt(compiled, prompt),
                say=status.update,
            )
        if file is not None:
            write_file(file, json.dumps(report.make_file(), indent=1) + "\n")
        if output.as_json:
            output.print_json(report.to_dict())
            return
        output.out.print(render_report(report))
        for variant in report.variants:
            how = f"not used: {variant.problem}" if variant.problem else variant.determinism
            output.log.print(f"{variant.name}: {how}", markup=False, soft_wrap=True)

    _run(output, run)


@app.command("list")
def list_command(
    config: ConfigFlag = None,
    rpc_url: RpcFlag = None,
    deployment: DeploymentFlag = None,
    gateway: GatewayFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List the registered models."""
    output = Output.open(as_json)

    def run() -> None:
        network = NetworkConfig.load(
            config, rpc_url=rpc_url, deployment=deployment, gateway_urls=gateway
        )

        async def fetch(chain: Chain, _client: GatewayClient) -> tuple[RegisteredModel, ...]:
            return await fetch_models(chain)

        models = asyncio.run(_with_network(network, None, fetch))
        if output.as_json:
            output.print_json({"models": [asdict(entry) for entry in models]})
        elif models:
            output.out.print(render_models(models))
        else:
            output.log.print("no model is registered; register one with: splitup-deploy register")

    _run(output, run)


async def _with_network(
    network: NetworkConfig,
    identity: Identity | None,
    act: Callable[[Chain, GatewayClient], Awaitable[_T]],
) -> _T:
    """Connect to chain and gateway, act, disconnect."""
    deployment = Deployment.load(network.deployment)
    private_key = None if identity is None else identity.private_key
    async with (
        await Chain.connect(network.rpc_url, deployment, private_key=private_key) as chain,
        GatewayClient(network.gateway_urls, identity) as client,
    ):
        return await act(chain, client)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a model is to be cut."""

    targets_bytes: tuple[int, ...]
    sizes: Sizes
    balance: Balance
    max_tasks: int | None
    private: int | None = None


def _compile(output: Output, model: str, cutting: Cutting) -> CompiledModel:
    with HashBar(output.log, model) as progress, watch_hashing(progress):
        return build(
            model,
            cutting.targets_bytes,
            sizes=cutting.sizes,
            balance=cutting.balance,
            max_tasks=cutting.max_tasks,
            private=cutting.private,
        )


def _profile(compiled: CompiledModel, cutting: Cutting) -> Profile:
    return compute_profile(compiled.manifest, compiled.times_ps, cutting.targets_bytes)


def main() -> None:
    """Run the command line."""
    app()
