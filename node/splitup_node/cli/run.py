"""``splitup-node run``: serve until Ctrl-C or SIGTERM."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated, Final

import typer

from splitup.cli.command import as_command, start_log
from splitup.core.garbage_collection import pause_garbage_collection
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption
from splitup_node.cli.progress import InPlaceHandler

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
    handler = logging.StreamHandler() if log_json else InPlaceHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_json else logging.Formatter(_LOG_FORMAT))
    start_log(handler, logging.DEBUG if verbose else logging.INFO)
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
