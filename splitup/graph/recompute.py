"""A process that replays one task from stored inputs and zero state, and prints the digests.

``python -m splitup.graph.recompute JOB`` reads a JSON file:

    task, weights    paths; weights "" for a task without any
    inputs           per input port the path of its tensors of all steps, each after its length
    steps            how many
    gate             the input whose zeros shut the task (splitup.graph.gates), or null
    determinism      the class to compute in; another one ends it before it computes
    memory_bytes     of address space; 0 for no bound (a GPU maps far more than it uses)
    cpu_s            of processor time

and prints ``{"inputs": […], "outputs": […], "state": …}``, or ends with status 1 and a sentence on
stderr. The caller gives it an empty environment and a time limit (``splitup.sandbox``).
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final

from splitup.codec import parse_json
from splitup.errors import InvalidInput, SplitUpError
from splitup.wire import EMPTY_DIGEST

_LENGTH_BYTES: Final = 8


def write_tensor(file: BinaryIO, data: bytes | memoryview) -> None:
    """Append one step's tensor to an input file, after its length as u64, little-endian."""
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)


def read_tensor(file: BinaryIO) -> bytes:
    """Return the next step's tensor; whether its length is right, the task's program checks."""
    return file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))


def replay(job: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of a job; raise InvalidInput, InvalidModel, or whatever tinygrad does."""
    from splitup.graph import gates, runtime  # after the limits: it opens the device

    found = runtime.describe_device().determinism_class
    if found != job["determinism"]:
        raise InvalidInput(f"this machine computes as '{found}', not as '{job['determinism']}'")
    weights = Path(job["weights"]) if job["weights"] else None
    program = runtime.TaskProgram(Path(job["task"]).read_bytes(), weights)
    if len(job["inputs"]) != len(program.inputs):
        raise InvalidInput(f"the task takes {len(program.inputs)} inputs, not {len(job['inputs'])}")
    state = program.new_state()
    inputs = [hashlib.sha256() for _ in program.inputs]
    outputs = [hashlib.sha256() for _ in program.outputs]
    files = [Path(path).open("rb") for path in job["inputs"]]
    for _ in range(job["steps"]):
        tensors = [read_tensor(file) for file in files]
        zeros = gates.shut(program.inputs, program.outputs, job["gate"], tensors)
        if zeros is not None:
            tensors, results = zeros
        else:
            results = program.run(state, tensors)
        for digest, tensor in zip(inputs, tensors, strict=True):
            digest.update(tensor)
        for digest, tensor in zip(outputs, results, strict=True):
            digest.update(tensor)
    has_state = program.states and job["steps"]
    return {
        "inputs": [digest.hexdigest() for digest in inputs],
        "outputs": [digest.hexdigest() for digest in outputs],
        "state": program.compute_state_digest(state) if has_state else EMPTY_DIGEST,
    }


def main() -> int:
    job = parse_json(Path(sys.argv[1]).read_bytes())
    bounds = {
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: job["memory_bytes"] or resource.RLIM_INFINITY,
    }
    for bound, value in bounds.items():
        resource.setrlimit(bound, (value, value))
    try:
        print(json.dumps(replay(job)))
    except SplitUpError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:  # tinygrad raises anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
