"""Runs steps with the uncut model in a process of its own.

    python uncut_steps.py MODEL STEPS.npz OUTPUTS.npz CHUNK

``STEPS.npz`` holds every input of every step as "STEP/NAME", steps counted from 0; ``OUTPUTS.npz``
gets every output likewise.
"""

from __future__ import annotations

import sys

import numpy as np
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.core.tensors import array_to_bytes, bytes_to_array


def main(model: str, steps_path: str, outputs_path: str, chunk: str) -> None:
    program = load_reference(model, Sizes(chunk=int(chunk)))
    state, outputs = program.new_state(), {}
    with np.load(steps_path, allow_pickle=False) as steps:
        for step in range(len(steps.files) // len(program.inputs)):
            given = [array_to_bytes(s, steps[f"{step}/{s.name}"]) for s in program.inputs]
            for spec, data in zip(program.outputs, program.run(state, given), strict=True):
                outputs[f"{step}/{spec.name}"] = bytes_to_array(spec, data).copy()
    np.savez(outputs_path, **outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
