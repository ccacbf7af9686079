"""Compute given tasks on this process's device and save their outputs, for ``calibrate``.

    python -m splitup_deploy.calibration.measure JOBS.json

``JOBS.json`` holds the number of ``threads`` and ``jobs``: per job the files of a graph and of its
weights, where each input port's steps are found ([file, array]), where to write the outputs, and
``forget_at``. Arrays are uint8 [steps, bytes]. On stdout: one JSON object with the determinism
class. It is a process of its own because tinygrad chooses its device and options once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad.helpers import NUM_CPU_THREADS

from splitup.backend.devices.device_choice import OTHER_DEVICE
from splitup.backend.runtime import TaskProgram, describe_device
from splitup.core.codec import parse_json
from splitup.core.errors import SplitUpError


def run_job(job: dict[str, Any]) -> None:
    """Run one task over its steps from zero state, and write its outputs."""
    program = TaskProgram(
        Path(job["graph"]).read_bytes(),
        Path(job["weights"]) if job["weights"] else None,
        is_foreign=False,
    )
    columns = []
    for file, array in job["inputs"]:
        with np.load(file, allow_pickle=False) as archive:
            columns.append(archive[array])
    state, results = program.new_state(), []
    for step in range(job["steps"]):
        if step == job["forget_at"]:
            state = program.new_state()
        results.append(program.run(state, [column[step].tobytes() for column in columns]))
    outputs = {
        f"port{port}": np.stack([np.frombuffer(row[port], np.uint8) for row in results])
        for port in range(len(program.outputs))
    }
    np.savez(job["output"], **outputs)  # type: ignore[arg-type]


def main() -> None:
    """Run the command line; exit code 1 with one sentence on stderr when it cannot."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m splitup_deploy.calibration.measure JOBS.json")
    plan = parse_json(Path(sys.argv[1]).read_bytes())
    try:
        report = describe_device()
        NUM_CPU_THREADS.value = plan["threads"]  # the runtime has fixed it to one
        for job in plan["jobs"]:
            run_job(job)
    except SplitUpError as error:
        said = str(error).removesuffix(OTHER_DEVICE)  # 'calibrate' has set DEV, not its user
        raise SystemExit(f"error: {said}") from None
    print(json.dumps({"determinism_class": report.determinism_class}))


if __name__ == "__main__":
    main()
