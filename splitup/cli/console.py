"""How the commands of users and developers speak: data on stdout, all else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import typer
from rich.console import Console

from splitup.core.errors import InvalidInput, SplitUpError

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 the network, the chain or a peer failed, or the answer is no; "
    "2 a flag, file, key or balance is wrong; 130 interrupted."
)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command writes: data on stdout, talk on stderr."""

    as_json: bool
    out: Console
    log: Console

    @classmethod
    def open(cls, as_json: bool = False) -> Output:
        return cls(as_json, Console(), Console(stderr=True))

    def say(self, text: str) -> None:
        """Write a sentence for the user alone, as it is: no markup, no colours, no wrapping."""
        self.log.print(text, markup=False, highlight=False, soft_wrap=True)

    def print_json(self, value: dict[str, Any]) -> None:
        """Write the one JSON object of a command."""
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def run_command(output: Output, run: Callable[[], None], *, interrupted: str) -> None:
    """Run; an error becomes one sentence and exit code 1 or 2, Ctrl-C ``interrupted`` and 130."""
    try:
        run()
    except SplitUpError as error:
        if output.as_json:
            output.print_json({"error": str(error)})
        else:
            output.say(f"error: {error}")
        raise typer.Exit(2 if isinstance(error, InvalidInput) else 1) from None
    except KeyboardInterrupt:
        output.say(interrupted)
        raise typer.Exit(130) from None
