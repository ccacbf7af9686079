"""``splitup-node run`` of a dishonest operator: ``python lying_node.py NODE.toml``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from splitup_node.config import NodeConfig
from splitup_node.daemon import run_node

WORKER = Path(__file__).resolve().parents[1] / "node" / "lying_worker.py"

if __name__ == "__main__":
    argv = (sys.executable, str(WORKER))
    asyncio.run(run_node(NodeConfig.load(Path(sys.argv[1])), worker_argv=argv))
