"""``splitup-node run``: serve until Ctrl-C or SIGTERM."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Final

import typer

from splitup.cli.command import as_command, start_log
from splitup.cli.console import Output
from splitup.core.garbage_collection import pause_garbage_collection
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption

_LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@as_command(hint="starting the node")
async def command(
    config: ConfigOption = DEFAULT_CONFIG,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    log_json: Annotated[bool, typer.Option("--json", help="Log JSON lines.")] = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Logs go to stderr."""
    import gc

    with pause_garbage_collection():
        from splitup_node.config import NodeConfig
        from splitup_node.daemon import run_node

    _start_logging(verbose, log_json)
    gc.collect()
    # without this, every full collection walks 100,000 objects of imported modules
    # and stops all tasks meanwhile
    gc.freeze()
    await run_node(NodeConfig.load(config))


def _start_logging(verbose: bool, log_json: bool) -> None:
    handler = logging.StreamHandler() if log_json else InPlaceHandler(Output.open())
    handler.setFormatter(_JsonLines() if log_json else logging.Formatter(_LOG_FORMAT))
    start_log(handler, logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class InPlaceHandler(logging.Handler):
    """Logs lines; on a terminal the next line replaces a record that is marked ``in_place``."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        write = self._output.update if getattr(record, "in_place", False) else self._output.say
        try:
            write(self.format(record))
        except Exception:  # as logging's own handlers do
            self.handleError(record)


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
