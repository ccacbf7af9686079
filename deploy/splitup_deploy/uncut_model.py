"""The uncut model in one process: what distributed execution is compared with and measured against.

    python -m splitup_deploy.uncut_model MODEL STEPS.npz OUTPUTS.npz [CHUNK [CONTEXT]]

``STEPS.npz`` holds every input of every step as "STEP/NAME", steps counted from 0; ``OUTPUTS.npz``
gets every output likewise. On stdout: a JSON object with ``load_s``, ``compute_s`` (all steps) and
``determinism_class``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from splitup.backend.runtime import TaskProgram, describe_device
from splitup.core.errors import SplitUpError
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.graph.rules import check_graph
from splitup_deploy.cutting.build import prepare
from splitup_deploy.frontends.source_model import Sizes


def load_reference(model: str, sizes: Sizes | None = None, threads: int = 1) -> TaskProgram:
    """Compile a whole model for this process's device, without cutting it.

    Inputs and outputs are the model's own. On one device and code generator its results equal those
    of the cut model byte for byte.
    """
    traced = prepare(model, sizes).traced

    def get_bytes(name: str) -> memoryview:
        return memoryview(b"".join(traced.weights[name].read()))

    return TaskProgram.from_graph(check_graph(traced.graph), get_bytes, threads=threads)


def replay(
    model: str, steps_path: Path, outputs_path: Path, sizes: Sizes | None = None
) -> dict[str, float | str]:
    """Compute every step in order from a zero state; return the times it took."""
    started = time.perf_counter()
    program = load_reference(model, sizes)
    loaded = time.perf_counter()
    with np.load(steps_path, allow_pickle=False) as steps:
        count = len(steps.files) // len(program.inputs)
        rows = [
            [array_to_bytes(spec, steps[f"{step}/{spec.name}"]) for spec in program.inputs]
            for step in range(count)
        ]
    state = program.new_state()
    begun = time.perf_counter()
    results = [program.run(state, row) for row in rows]
    ended = time.perf_counter()
    outputs = {
        f"{step}/{spec.name}": bytes_to_array(spec, data)
        for step, result in enumerate(results)
        for spec, data in zip(program.outputs, result, strict=True)
    }
    np.savez(outputs_path, **outputs)  # type: ignore[arg-type]
    return {
        "load_s": loaded - started,
        "compute_s": ended - begun,
        "determinism_class": describe_device().determinism_class,
    }


def main() -> None:
    """Run the command line; exit code 1 with one sentence on stderr when it cannot."""
    if not 4 <= len(sys.argv) <= 6:
        raise SystemExit(
            "usage: python -m splitup_deploy.uncut_model MODEL STEPS OUTPUTS [CHUNK [CONTEXT]]"
        )
    chunk, context = (*map(int, sys.argv[4:]), None, None)[:2]
    try:
        report = replay(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Sizes(context, chunk))
    except SplitUpError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps(report))


if __name__ == "__main__":
    main()
