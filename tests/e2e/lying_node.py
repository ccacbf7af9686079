"""``splitup-node run`` of a dishonest operator: ``python lying_node.py HOW … --config NODE.toml``.

HOW is one of

    always            lies in every task and every verification
    every N AT        lies in one of N
    guess             computes its own tasks, and guesses what it should verify
    withhold          commits to what it computed and never shows it
    promise           commits to what it verified and never shows it
    hide              commits to what it computed and stores none of it
    mute              takes its tasks and does nothing
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from splitup_node.config import NodeConfig
from splitup_node.daemon import run_node
from splitup_node.digests import Digests
from splitup_node.reports import Reporter
from splitup_node.runs import Runs
from splitup_node.supervisor import WORKER_ARGV
from splitup_node.verifier import Verifier

from splitup.net.logs import LogWriter

WORKER = Path(__file__).resolve().parents[1] / "node" / "lying_worker.py"


async def say_nothing(self: Any, *_: Any) -> bool:
    return False


async def guess(self: Verifier, order: Any) -> Digests:
    """Fetch and hash the inputs, which is cheap, and make up the rest."""
    found: Digests = await Verifier._recompute_honestly(self, order)  # type: ignore[attr-defined]
    found.add_outputs([b"a guess"] * len(found.outputs))
    return found


def corrupt(how: str) -> None:
    if how == "withhold":
        Reporter._reveal = say_nothing  # type: ignore[method-assign]
    elif how == "promise":
        report = Verifier._report

        async def promise_only(self: Verifier, order: Any, result: Any) -> None:
            self._tools.herald.spread = say_nothing  # type: ignore[method-assign]
            await report(self, order, result)

        Verifier._report = promise_only  # type: ignore[method-assign]
    elif how == "guess":
        Verifier._recompute_honestly = Verifier._recompute  # type: ignore[attr-defined]
        Verifier._recompute = guess  # type: ignore[method-assign]
    elif how == "hide":
        LogWriter.append = lambda self, task, port, entry: None  # type: ignore[method-assign]
    elif how == "mute":
        Runs.pump = lambda self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    how, *numbers, _, config = sys.argv[1:]
    corrupt(how)
    lying = (sys.executable, str(WORKER), *numbers)
    argv = lying if how in ("always", "every") else WORKER_ARGV
    asyncio.run(run_node(NodeConfig.load(Path(config)), worker_argv=argv))
