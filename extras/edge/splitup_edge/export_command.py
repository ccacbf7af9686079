"""``splitup-deploy export``: a model as one file for a small device, and what it costs there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.core.errors import InvalidInput, InvalidModel

if TYPE_CHECKING:
    from splitup_edge.export.plan import ExportPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Which model to export, and how."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face directory, or a GGUF file, of a language model."
        ),
    ]
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The file to write; without it, none is."),
    ] = None
    backend: Annotated[
        Literal["xnnpack", "portable", "onnx"],
        typer.Option(
            help="ExecuTorch with XNNPACK's kernels or with its portable ones, or an ONNX file."
        ),
    ] = "xnnpack"
    dtype: Annotated[
        Literal["fp32", "fp16", "int8", "int4"],
        typer.Option(help="How weights are stored; integers multiply by integers."),
    ] = "fp32"
    max_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens a text may have (default: as many as the model was trained for).",
        ),
    ] = None
    block: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Rows of one step (default: 1, or the block of a model that writes blocks).",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compute a text with the file and with our kernels, and compare.",
        ),
    ] = True


@as_command
def command(options: ExportOptions, *, output: JsonOutput) -> None:
    """Export a model for a small device: one file with program, weights and tokenizer.

    Needs the extra [edge], except for ONNX. A config.json without weights, or no
    --output, gives the sizes and writes nothing. Run the file with: splitup edge run FILE.
    """
    from splitup_edge.export.plan import plan_export

    if options.file is not None:
        _check_file(options.file, options.backend, options.dtype)
    has_prefill = options.backend != "onnx"  # an ONNX file holds one graph
    plan = plan_export(
        options.model, options.dtype, options.max_len, options.block, prefill=has_prefill
    )
    for note in plan.notes:
        output.say(f"note: {note}")
    report: dict[str, Any] = {"backend": options.backend, **plan.describe()}
    if options.file is not None:
        report |= _write(options, plan, options.file, output)
    if output.as_json:
        output.print_json(report)
    else:
        from splitup_edge.export.showing import render_export

        output.out.print(render_export(report))


def _check_file(file: Path, backend: str, dtype: str) -> None:
    """Raise InvalidInput for what would fail after minutes of work."""
    suffix = ".onnx" if backend == "onnx" else ".pte"
    if file.suffix != suffix:
        raise InvalidInput(f"'{file}' is no name for this back end; call it '{file.stem}{suffix}'")
    if not file.parent.is_dir():
        raise InvalidInput(f"cannot write '{file}': there is no directory '{file.parent}'")
    if backend == "onnx" and dtype != "fp32":
        raise InvalidInput(f"the ONNX file holds float32 weights; {dtype} needs --backend xnnpack")


def _write(options: ExportOptions, plan: ExportPlan, file: Path, output: Output) -> dict[str, Any]:
    from splitup_deploy.showing.progress import show_status, write_whole

    from splitup_edge.export.onnx_file import write_onnx

    if plan.info is None:
        raise InvalidModel(
            f"the weights of '{options.model}' are not here, so no file can be written: put them "
            "beside config.json, or leave out --output to see the sizes"
        )
    if options.backend == "onnx":
        with write_whole(file) as stream:
            stream.writelines(write_onnx(plan.models["forward"]))
        return {"file": str(file), "file_bytes": file.stat().st_size}
    from splitup_edge.program import import_extra

    import_extra("executorch.exir"), import_extra("torch")
    from splitup_edge.export.program_file import check_program, export_program, make_modules

    with show_status(output.log, "exporting") as say:
        modules = make_modules(plan.models, plan.dtype)
        found = export_program(modules, plan.info, plan.tokenizer, options.backend, file)
        report = {"file": str(file), "file_bytes": file.stat().st_size, "delegated": found}
        if options.check:
            say("comparing with our kernels")
            report["check"] = check_program(file, options.model, plan, modules)
    return report
