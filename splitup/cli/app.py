"""The entry point of ``splitup``. Ctrl-C is quiet even while the program loads."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from splitup.cli.verbs import app

        app(prog_name="splitup")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
