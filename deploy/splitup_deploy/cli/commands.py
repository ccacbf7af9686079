"""The commands of splitup-deploy: compile, publish and retire models; deploy a network's contracts.

Data goes to stdout, everything else to stderr. Exit codes: 0 done (also when there was nothing to
do), 1 the network or the chain failed or refused, 2 the input cannot be used, 130 interrupted.
What a command needs is imported when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import typer

from splitup.cli.command_group import make_group
from splitup.cli.console import EXIT_CODES, add_version_option
from splitup_deploy.cli.calibrate import CalibrateOptions, calibrate
from splitup_deploy.cli.families import FamiliesOptions, families
from splitup_deploy.cli.inspect import InspectOptions, inspect
from splitup_deploy.cli.list import ListOptions, list_models
from splitup_deploy.cli.network import app as network_app
from splitup_deploy.cli.options import make_command
from splitup_deploy.cli.register import RegisterOptions, register
from splitup_deploy.cli.retire import RetireOptions, retire
from splitup_deploy.cli.usage import UsageOptions, usage

app = typer.Typer(
    cls=make_group("splitup-deploy"),
    name="splitup-deploy",
    help="Compile a model into tasks, register it, look at it; deploy a network's contracts.\n\n"
    + EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_version_option(app, "splitup-deploy")

app.command("register", short_help="Compile a model, store its parts, register it.")(
    make_command(RegisterOptions, register)
)
app.command("inspect", short_help="Show how a model is cut, and what each task needs.")(
    make_command(InspectOptions, inspect)
)
app.command("calibrate", short_help="Measure how much results differ between machines.")(
    make_command(CalibrateOptions, calibrate)
)
app.command("families", short_help="List the language models that can be compiled.")(
    make_command(FamiliesOptions, families)
)
app.command("list")(make_command(ListOptions, list_models))
app.command("retire", short_help="Take a model off the market.")(
    make_command(RetireOptions, retire)
)
app.command("usage", short_help="Show how much a model was used and what was paid for it.")(
    make_command(UsageOptions, usage)
)
app.add_typer(network_app, name="network")
