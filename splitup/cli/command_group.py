"""The commands of a program: its own, and those of the extras that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from splitup.core.extras import Command, find_commands


def list_own_commands(
    package: str, texts: Mapping[str, str], shared: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Command]:
    """Return the commands of a package with their lines in the help.

    Each is a module's ``command``. Those of a module that is ``shared`` are functions of their
    names.
    """
    commands = {
        name: Command(f"{package}.{name.replace('-', '_')}", text) for name, text in texts.items()
    }
    for module, names in (shared or {}).items():
        for name in names:
            commands[name] = Command(f"{package}.{module}", texts[name], name)
    return commands


def make_group(program: str, own: Mapping[str, Command] | None = None) -> type[TyperGroup]:
    """Return the class of a program's commands; a module is imported when its command is used.

    ``own`` commands come first, then those registered with Typer, then those of extras.
    """
    commands = dict(own or {})

    class Group(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [*commands, *super().list_commands(ctx), *find_commands(program)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if (registered := super().get_command(ctx, cmd_name)) is not None:
                return registered
            found = commands.get(cmd_name) or find_commands(program).get(cmd_name)
            if found is None:
                return None
            module = import_module(found.module)
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            settings = getattr(module, "CONTEXT", None)
            app.command(cmd_name, context_settings=settings)(getattr(module, found.function))
            return typer.main.get_command(app)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            known = self.list_commands(ctx)  # Typer looks for similar ones among its own only
            if args[0] not in known and not ctx.resilient_parsing:
                near = " or ".join(f"'{name}'" for name in get_close_matches(args[0], known))
                if near:
                    ctx.fail(f"No such command '{args[0]}'. Did you mean {near}?")
            return super().resolve_command(ctx, args)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            rows = [(name, command.help) for name, command in commands.items()]
            rows += [
                (name, command.get_short_help_str(limit=formatter.width))
                for name, command in self.commands.items()
            ]
            with formatter.section("Commands"):
                formatter.write_dl(rows)
            if added := find_commands(program):
                with formatter.section("Commands of extras"):
                    formatter.write_dl([(name, command.help) for name, command in added.items()])

    return Group
