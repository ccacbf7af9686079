"""The verbs of ``splitup``, whose modules are imported when the verb is used.

A verb's module imports what its work needs inside its functions, so that ``--help`` stays fast.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the network or chain failed
(or, for the demo, the result differs), 2 the input cannot be used, 130 interrupted.
"""

from __future__ import annotations

from typing import Final

import typer

from splitup.cli.command_group import list_own_commands, make_group
from splitup.cli.console import EXIT_CODES, add_version_option

_VERBS: Final = {  # each with its line in the help
    "run": "Run a model over arrays; write every output as NAME.npy.",
    "models": "List the models on the market, their prices, and whether nodes hold them.",
    "chat": "Talk to a model in this terminal.",
    "generate": "Continue a text and print its tokens as they come.",
    "embed": "Print the vector of every text, one JSON line each.",
    "join": "Make a key and a configuration for the network behind a URL.",
    "deposit": "Move USDC into the market for later executions.",
    "withdraw": "Move USDC of the deposit back into your wallet.",
    "receipt": "Show what an execution cost; wait until it is settled.",
    "check": "Check that the committee planned an execution correctly.",
    "up": "Start, or resume, a network on this machine.",
    "down": "Stop a network; its chain, objects and keys are kept.",
    "fund": "Give an account test money of a network on this machine.",
    "status": "Show a network's processes and nodes.",
    "doctor": "Check what this machine lacks, and say how to install it.",
    "example": "Write the example model here, to register it.",
    "demo": "Run a model on a temporary network and show every step.",
}

_SHARED: Final = {  # modules of several verbs
    "demo": ("demo", "example"),
    "money": ("deposit", "withdraw"),
    "network": ("up", "down", "fund", "status"),
}

VERBS: Final = list_own_commands("splitup.cli.commands", _VERBS, _SHARED)
app = typer.Typer(
    cls=make_group("splitup", VERBS),
    name="splitup",
    help=f"Run models on the network, or run a network of your own.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_version_option(app, "splitup")
