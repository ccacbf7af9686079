"""``splitup-deploy families``: the families of models for text that can be compiled."""

from __future__ import annotations

from dataclasses import dataclass

from splitup.cli.console import Output
from splitup_deploy.cli.options import JsonFlag
from splitup_deploy.cli.steps import run_quietly


@dataclass(frozen=True, slots=True, kw_only=True)
class FamiliesOptions:
    """How to show them."""

    as_json: JsonFlag = False


def families(options: FamiliesOptions) -> None:
    """List the models for text that can be compiled, by the architecture in their config.json."""
    output = Output.open(options.as_json)
    run_quietly(output, lambda: _show(output))


def _show(output: Output) -> None:
    from splitup_deploy.showing.families import list_families, render_families

    rows = list_families()
    if output.as_json:
        output.print_json({"families": rows})
    else:
        output.out.print(render_families(rows), soft_wrap=True)
