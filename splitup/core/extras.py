"""Systems beside the market, such as private inference: found when installed, imported by nothing.

Each is a package in the folder ``extras``, which may import the market's packages. Its object
``EXTRA`` says what it adds to the programs, and the entry point ``splitup.extras`` leads to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Final

from splitup.core.errors import ConfigurationError
from splitup.core.source_tree import compose_package_install

_GROUP: Final = "splitup.extras"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: module and function, which Typer takes, and its line in the program's help."""

    module: str
    help: str
    function: str = "command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What an extra adds to the programs."""

    commands: Mapping[str, Mapping[str, Command]] = field(default_factory=dict)  # by program
    adapter_flags: str = ""  # "module:class" of flags that choose an adapter of hidden states


@cache
def find_extras() -> Mapping[str, Extra]:
    """Return the installed extras by name; one whose folder was deleted is not installed."""
    from importlib.metadata import entry_points  # takes 50 ms, and most processes need no list

    found: dict[str, Extra] = {}
    for point in sorted(entry_points(group=_GROUP)):
        try:
            found[point.name] = point.load()
        except ModuleNotFoundError as error:
            if error.name != point.module:
                raise
    return found


def require(*modules: str) -> None:
    """Raise ConfigurationError unless packages are installed that only the extra [serve] brings."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise ConfigurationError(
            f"not installed: {', '.join(missing)}; run: {compose_package_install('serve')}"
        )


def find_commands(program: str) -> dict[str, Command]:
    """Return the commands that extras add to a program, by name."""
    return {
        name: command
        for extra in find_extras().values()
        for name, command in extra.commands.get(program, {}).items()
    }
