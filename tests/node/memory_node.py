"""A node whose store forgets everything: ``python memory_node.py DIRECTORY TASKS SIZE``.

Reads certificates, a JSON line each, and writes its address, key and endpoint first.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitup.graph.manifest import Manifest
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import LogName
from splitup.net.object_transfer import NotStored
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.storage.log_store import LogObject
from tests.node.network import Store, TestNode, make_manifest

FLUSH_S = 0.5


class Forgetful:
    async def write(self, objects: Sequence[LogObject], *, pause_s: float = 0.0) -> None:
        await asyncio.sleep(0)

    async def read(self, name: LogName, max_bytes: int, digest: bytes | None) -> bytes:
        raise NotStored("nothing is kept")


@dataclass
class ForgetfulStore(Store):
    def open(
        self, certificate: PlanCertificate, manifest: Manifest, executor_map: ExecutorMap
    ) -> Forgetful:  # type: ignore[override]
        return Forgetful()


async def main(directory: Path, tasks: int, size: int) -> None:
    manifest, graphs = make_manifest(size, tasks=tasks)
    node = TestNode(directory, ForgetfulStore())
    await node.start(graphs)
    print(node.entry.canonical_bytes().decode(), flush=True)
    loop = asyncio.get_running_loop()

    async def flush() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            node.engine.flush()

    flushing = asyncio.create_task(flush())
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        node.engine.start(PlanCertificate.from_value(json.loads(line)), manifest)
    flushing.cancel()
    await node.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
