from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from splitup.messages.plans import PlanNode
from tests.builders import HANG_S
from tests.node.network import TestClient, make_certificate, make_manifest

ROOT = Path(__file__).resolve().parents[3]
TASKS, SIZE = 3, 1024  # 4 KB tensors
WARM, AHEAD = 1_000, 32


def read_rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.long  # a leak shows after thousands of steps only
@pytest.mark.parametrize(("steps", "most_mb"), [(2_000, 6), (10_000, 24)])
async def test_steps_do_not_grow_the_daemon(tmp_path: Path, steps: int, most_mb: int) -> None:
    """If it kept one tensor of each step it would grow by 4 KB times their number."""
    manifest, _ = make_manifest(SIZE, tasks=TASKS)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.node.memory_node", tmp_path, str(TASKS), str(SIZE)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    client = TestClient()
    try:
        entry = PlanNode.from_value(json.loads(await process.stdout.readline()))
        key = client.identity.signing_key_hex
        certificate = make_certificate(manifest, [entry] * TASKS, key, steps=WARM + steps)
        process.stdin.write(certificate.canonical_bytes() + b"\n")
        await client.connect(certificate)
        x = np.ones(SIZE, np.float32)
        before = 0
        for step in range(WARM + steps + AHEAD):
            if step < WARM + steps:
                client.send(certificate, step, x, {entry.node})
            if step >= AHEAD:
                async with asyncio.timeout(HANG_S):
                    frame = await client.outputs.get()
                assert frame.step == step - AHEAD
            if step == WARM:
                before = read_rss_bytes(process.pid)
        growth = read_rss_bytes(process.pid) - before
        print(f"growth over {steps} steps: {growth / 2**20:.1f} MB")
        assert growth <= most_mb * 2**20
    finally:
        await client.pool.close()
        process.stdin.close()
        await process.wait()
