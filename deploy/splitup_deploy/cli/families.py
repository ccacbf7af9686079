"""``splitup-deploy families``: the families of models for text that can be compiled."""

from __future__ import annotations

from splitup.cli.command import JsonOutput, as_command


@as_command
def command(*, output: JsonOutput) -> None:
    """List the models for text that can be compiled, by the architecture in their config.json."""
    from splitup_deploy.showing.families import list_families, render_families

    rows = list_families()
    output.give({"families": rows}, lambda: output.out.print(render_families(rows)))
