"""The commands of ``splitup-deploy``: one module each, imported when it is used.

Data goes to stdout, everything else to stderr. Exit codes: 0 done (also when there was nothing to
do), 1 the network or the chain failed or refused, 2 the input cannot be used, 130 interrupted.
What a command needs is imported when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

from typing import Final

import typer

from splitup.cli.command_group import list_own_commands, make_group
from splitup.cli.console import EXIT_CODES, add_version_option
from splitup_deploy.cli.network import app as network_app

COMMANDS: Final = list_own_commands(
    "splitup_deploy.cli",
    {
        "register": "Compile a model, store its parts, register it.",
        "inspect": "Show how a model is cut, and what each task needs.",
        "calibrate": "Measure how much results differ between machines.",
        "families": "List the language models that can be compiled.",
        "list": "List the registered models.",
        "retire": "Take a model off the market.",
        "usage": "Show how much a model was used and what was paid for it.",
    },
)

app = typer.Typer(
    cls=make_group("splitup-deploy", COMMANDS),
    name="splitup-deploy",
    help="Compile a model into tasks, register it, look at it; deploy a network's contracts.\n\n"
    + EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_version_option(app, "splitup-deploy")
app.add_typer(network_app, name="network")
