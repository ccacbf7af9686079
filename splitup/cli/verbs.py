"""The verbs of ``splitup``: one module each, imported when the verb is used.

A verb's module imports what its work needs inside its functions, so that ``--help`` stays fast.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the network or chain failed
(or, for the demo, the result differs), 2 the input cannot be used, 130 interrupted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from splitup.cli.console import EXIT_CODES, add_version_option

VERBS: Final = {  # each with its line in the help
    "run": "Run a model over arrays; write every output as NAME.npy.",
    "generate": "Continue a text and print its tokens as they come.",
    "embed": "Print the vector of every text, one JSON line each.",
    "serve": "Offer models over HTTP to clients of the OpenAI API.",
    "draft-worker": "Draft for others with a small model, over gRPC.",
    "target-worker": "Verify others' drafts with a model, over gRPC.",
    "speculate": "Continue a text by workers that draft and verify.",
    "adapter-host": "Apply adapters to hidden states that clients encrypt.",
    "edge": "Continue a text with an exported model, without a network.",
    "keys": "Create, list and revoke the API keys of serve.",
    "relay": "Let a phone on the local network reach serve on this machine.",
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
    "demo": "Run a model on a temporary network and show every step.",
}


def get_module(verb: str) -> str:
    """Return the name of a verb's module."""
    return f"splitup.cli.{verb.replace('-', '_')}"


class _Verbs(TyperGroup):
    """A group of commands that imports a command's module on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        verb = typer.Typer(add_completion=False, rich_markup_mode=None)
        module = import_module(get_module(cmd_name))
        verb.command(cmd_name, context_settings=getattr(module, "CONTEXT", None))(module.command)
        return typer.main.get_command(verb)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(
    cls=_Verbs,
    name="splitup",
    help=f"Run models on the network, or run a network of your own.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_version_option(app, "splitup")
