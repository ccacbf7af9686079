"""The commands' options: frozen objects, from whose fields the command line's flags are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from splitup.core import limits
from splitup.core.errors import InvalidInput

if TYPE_CHECKING:
    from splitup.config import NetworkConfig
    from splitup.graph.manifest import Manifest
    from splitup_deploy.cutting.build import CompiledModel

TARGET_HELP = (
    "Memory a task may need: 12GB, 900MB, 6GiB. Several sizes are those of a mixed fleet's cards, "
    "which get tasks in turn: 8GB,12GB,24GB."
)
TargetFlag = Annotated[str, typer.Option(metavar="SIZE", help=TARGET_HELP)]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A registered model: its name (the version used now) or its id."
    ),
]
SOURCE_HELP = "Hugging Face directory, *.onnx, *.gguf, or module:function (tinygrad)."
SourceArgument = Annotated[str, typer.Argument(metavar="MODEL", help=SOURCE_HELP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The model to compile: an argument, or ``--model``, as the first designs wrote it."""

    argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=SOURCE_HELP, show_default=False)
    ] = None
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The same, as an option.")] = (
        None
    )

    def read(self) -> str:
        """Return the model; raise InvalidInput unless it was given once."""
        given = [model for model in (self.argument, self.model) if model is not None]
        if len(given) != 1:
            raise InvalidInput("give one model: as the argument MODEL, or with --model MODEL")
        return given[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Where the network is."""

    config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Network file or directory (default: $SPLITUP_HOME, .splitup)."
        ),
    ] = None
    rpc_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The chain's RPC endpoint.")
    ] = None
    deployment: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the contracts' addresses."),
    ] = None
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URLS", help="Storage gateways' URLs, with commas."),
    ] = None

    def load(self, key: KeyOptions | None = None) -> NetworkConfig:
        """Read the network's file and lay the flags over it. Raises ConfigurationError."""
        from splitup.config import NetworkConfig

        return NetworkConfig.load(
            self.config,
            rpc_url=self.rpc_url,
            deployment=self.deployment,
            gateway_urls=self.gateway,
            user_keystore=None if key is None else key.keystore,
            user_passphrase_file=None if key is None else key.passphrase_file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """Whose key signs."""

    keystore: Annotated[Path | None, typer.Option(metavar="FILE", help="Your key file.")] = None
    passphrase_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File that holds its passphrase."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOptions:
    """How a model is cut into tasks."""

    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens a sequence may have (default: as many as the model was trained for).",
        ),
    ] = None
    chunk: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The most tokens of one step (default: 64)."),
    ] = None
    dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="NAME=SIZE",
            help="Size of an ONNX file's symbolic dimension, NAME=SIZE; repeatable.",
        ),
    ] = None
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="LoRA adapter (a PEFT directory) to merge into a Hugging Face directory.",
        ),
    ] = None
    vision: Annotated[
        bool,
        typer.Option(
            "--vision",
            help="Compile the tower for images, not the one for text: pixels in, embeddings out.",
        ),
    ] = False
    images: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_ID",
            help="Take images as well: the id under which --vision registered the same directory.",
        ),
    ] = None
    without: Annotated[
        Literal["text", "chat"] | None,
        typer.Option(
            help="Go on where the tokenizer or chat template cannot be used: 'text' makes a "
            "function of token ids, 'chat' a text model that takes no chats."
        ),
    ] = None
    cache: Annotated[
        Literal["8bit"] | None,
        typer.Option(
            help="Keep attention's keys and values in eight bits each (default: as many as the "
            "model's own numbers have): about half the memory of a long context."
        ),
    ] = None
    balance: Annotated[
        Literal["latency", "throughput"],
        typer.Option(
            help="Cut for the shortest step of one user, or for the most steps a second of many."
        ),
    ] = "latency"
    max_tasks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help=f"The most tasks to cut into (default: {limits.MAX_TASKS})."
        ),
    ] = None
    private: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="Blocks at each end that users run themselves, with embedding and head "
            "(default: nodes run all).",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """What the manifest says beside the cut; each changes the model's id."""

    price: Annotated[
        str | None,
        typer.Option(
            metavar="USDC",
            help="What a million steps pay the nodes, such as 0.04, divided among the tasks in "
            "proportion to the default prices (default: from operations and memory).",
        ),
    ] = None
    tolerance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What 'splitup-deploy calibrate --output' wrote for this cut."
        ),
    ] = None
    privacy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What 'splitup-deploy privacy --output' wrote for this --private."
        ),
    ] = None
    reference: Annotated[
        bool | None,
        typer.Option(
            "--reference/--no-reference",
            help="Run every task here once, to publish self-test vectors with which nodes check "
            "themselves. By default only on machines that give the common result, and so the "
            "common id: a CPU, x86-64 with AVX2.",
        ),
    ] = None

    def apply(self, compiled: CompiledModel, say: Callable[[str], None]) -> CompiledModel:
        """Put what the flags say into the manifest, and self-test vectors; ``say`` says which."""
        from splitup.client.inputs import parse_price
        from splitup_deploy.calibration.tolerances import (
            attach_tolerances,
            attach_vectors,
            load_tolerances,
            makes_vectors,
        )
        from splitup_deploy.publishing.prices import set_price

        if self.price is not None:
            compiled = set_price(compiled, parse_price(self.price, name="--price"))
        if self.tolerance is not None:
            compiled = attach_tolerances(compiled, load_tolerances(self.tolerance).tasks)
        if self.privacy is not None:
            from splitup_deploy.publishing.privacy import attach_privacy

            compiled = attach_privacy(compiled, self.privacy)
        wants_vectors = makes_vectors() if self.reference is None else self.reference
        return attach_vectors(compiled, say) if wants_vectors else compiled

    def describe_tolerances(self, manifest: Manifest) -> str:
        """Return which devices may serve the completed model verified."""
        from splitup_deploy.calibration.tolerances import describe_tolerances, load_tolerances

        classes = () if self.tolerance is None else load_tolerances(self.tolerance).classes
        return describe_tolerances(manifest, classes)
