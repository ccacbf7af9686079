"""``splitup-node run``: serve until Ctrl-C or SIGTERM."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from splitup.core.log_limit import WarningLimit
from splitup_node.cli.command import DEFAULT_CONFIG, ConfigOption, run_and_print
from splitup_node.cli.progress import InPlaceHandler

_LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Which node runs, and how it logs."""

    config: Path
    verbose: bool
    log_json: bool


def run_node_command(
    config: ConfigOption = DEFAULT_CONFIG,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON lines.")] = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Logs go to stderr."""
    options = RunOptions(config, verbose, as_json)
    run_and_print(lambda: run(options), lambda result, console: None, as_json=False)


def run(options: RunOptions) -> dict[str, Any]:
    """Run the daemon."""
    import gc

    from splitup.core import event_loop
    from splitup_node.config import NodeConfig
    from splitup_node.daemon import run_node

    _start_logging(options)
    gc.collect()
    # without this, every full collection walks 100,000 objects of imported modules
    # and stops all tasks meanwhile
    gc.freeze()
    event_loop.run(run_node(NodeConfig.load(options.config)))
    return {}


def _start_logging(options: RunOptions) -> None:
    handler = logging.StreamHandler() if options.log_json else InPlaceHandler(sys.stderr)
    handler.addFilter(WarningLimit())
    handler.setFormatter(_JsonLines() if options.log_json else logging.Formatter(_LOG_FORMAT))
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
