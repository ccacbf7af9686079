"""``splitup-deploy calibrate``: measure how much results differ between machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup_deploy.cli.options import CutOptions, SourceArgument, TargetFlag
from splitup_deploy.cli.steps import compile_model


@as_command
def command(
    model: SourceArgument,
    target_vram: TargetFlag,
    cut: CutOptions,
    steps: Annotated[
        int, typer.Option(metavar="N", min=2, max=4096, help="Steps to compute.")
    ] = 24,
    prompt: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Text to compute; random tokens follow it."),
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="File for 'register --tolerance'."),
    ] = None,
    *,
    output: JsonOutput,
) -> None:
    """Measure how much correct results differ between machines, and how little perturbations show.

    Computes every task with all code generators of this machine, then perturbed: with lower
    precision, coarser weights, a skipped layer and a shorter context, and with noise in every
    rounding. Where a bound separates correct from perturbed, it becomes the task's tolerance;
    elsewhere only equal bytes count. Takes minutes.
    """
    import tempfile

    from splitup_deploy.calibration.calibrate_model import calibrate_model, encode_prompt
    from splitup_deploy.calibration.calibration_report import render_report
    from splitup_deploy.showing.progress import write_file

    compiled = compile_model(output, model, target_vram, cut)
    with tempfile.TemporaryDirectory() as folder:
        report = calibrate_model(
            compiled,
            Path(folder),
            steps,
            tokens=encode_prompt(compiled, prompt),
            say=output.update,
        )
    if file is not None:
        write_file(file, json.dumps(report.make_file(), indent=1) + "\n")
    if output.as_json:
        output.print_json(report.to_dict())
        return
    output.out.print(render_report(report))
    for variant in report.variants:
        how = f"not used: {variant.problem}" if variant.problem else variant.determinism
        output.say(f"{variant.name}: {how}")
