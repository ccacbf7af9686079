"""A process that recomputes one task from stored inputs and zero state, and prints the digests.

``python -m splitup_oracle.member.recompute_process JOB`` reads a JSON file:

    task, weights    paths; weights "" for a task without any inputs           per input port the
    path of its tensors of all steps, each preceded by its length steps            the number of
    steps gate             the input that shuts the task when it is zero (splitup.graph.gates), or
    null determinism      the class to compute in; in another class the process ends with an error
    claimed          per output port a path like an input's, to be compared with the result; or []
    tolerances       the task's tolerances, for this comparison logits           the index of the
    output that holds logits, or null memory_bytes     limit of the address space; 0 for none (a GPU
    maps far more than it uses) cpu_s            limit of the processor time

It prints ``{"inputs": […], "outputs": […], "state": …}``, and ``accepted`` if ``claimed`` is not
empty, or ends with status 1 and a sentence on stderr. The caller gives it a minimal environment and
a time limit (``splitup_oracle.member.sandbox``).

``python -m splitup_oracle.member.recompute_process`` without JOB prints ``{"determinism": …}``, the
class it computes in.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from splitup.core.codec import parse_json
from splitup.core.errors import InvalidInput, SplitUpError
from splitup.core.tensors import StepsDigest, TensorSpec
from splitup.graph.compare import Tolerance, compare_tensors, find_tolerance
from splitup.messages.completions import EMPTY_DIGEST

_LENGTH_BYTES: Final = 8


def write_tensor(file: BinaryIO, data: bytes | memoryview) -> None:
    """Append one step's tensor to an input file, after its length as u64, little-endian."""
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)


def read_tensor(file: BinaryIO) -> bytes:
    """Return the next step's tensor; the task's program checks its length."""
    return file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))


def recompute(job: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of a job; raise InvalidInput, InvalidModel, or tinygrad's errors."""
    from splitup.backend import runtime  # after the limits: it opens the device
    from splitup.graph import gates

    found = runtime.describe_device().determinism_class
    if found != job["determinism"]:
        raise InvalidInput(f"this machine computes as '{found}', not as '{job['determinism']}'")
    weights = Path(job["weights"]) if job["weights"] else None
    graph = Path(job["task"]).read_bytes()
    program = runtime.TaskProgram(graph, weights, memory_bytes=job["vram_bytes"])
    if len(job["inputs"]) != len(program.inputs):
        raise InvalidInput(f"the task takes {len(program.inputs)} inputs, not {len(job['inputs'])}")
    state = program.new_state()
    inputs = [StepsDigest() for _ in program.inputs]
    outputs = [StepsDigest() for _ in program.outputs]
    files = [Path(path).open("rb") for path in job["inputs"]]
    comparison = _ClaimComparison(job, program.outputs)
    for _ in range(job["steps"]):
        tensors = [read_tensor(file) for file in files]
        zeros = gates.shut(program.inputs, program.outputs, job["gate"], tensors)
        if zeros is not None:
            tensors, results = zeros
        else:
            results = program.run(state, tensors)
        for digest, tensor in zip(inputs, tensors, strict=True):
            digest.add_tensor(tensor)
        for digest, tensor in zip(outputs, results, strict=True):
            digest.add_tensor(tensor)
        comparison.compare(results)
    has_state = program.states and job["steps"]
    return {
        "inputs": [digest.hexdigest() for digest in inputs],
        "outputs": [digest.hexdigest() for digest in outputs],
        "state": program.compute_state_digest(state) if has_state else EMPTY_DIGEST,
        **comparison.get_result(),
    }


class _ClaimComparison:
    """Compares the outputs that a node of another class claims with our own, step by step."""

    def __init__(self, job: dict[str, Any], ports: Sequence[TensorSpec]) -> None:
        self._ports = ports
        self._files = [Path(path).open("rb") for path in job["claimed"]]
        if len(self._files) not in (0, len(ports)):
            raise InvalidInput(f"the task has {len(ports)} outputs, not {len(self._files)}")
        self._tolerances = [Tolerance.model_validate(value) for value in job["tolerances"]]
        self._logits = job["logits"]
        self._accepted = True

    def compare(self, results: Sequence[bytes | memoryview]) -> None:
        """Compare one step's outputs."""
        for place, file in enumerate(self._files):
            port, claimed = self._ports[place], read_tensor(file)
            tolerance = find_tolerance(self._tolerances, port.dtype)
            found = compare_tensors(
                port, claimed, results[place], tolerance, is_logits=place == self._logits
            )
            self._accepted = self._accepted and found.is_accepted

    def get_result(self) -> dict[str, Any]:
        """Return whether the claimed outputs are accepted; nothing if there are none."""
        return {"accepted": self._accepted} if self._files else {}


def main() -> int:
    if len(sys.argv) == 1:
        from splitup.backend.runtime import describe_device

        print(json.dumps({"determinism": describe_device().determinism_class}))
        return 0
    job = parse_json(Path(sys.argv[1]).read_bytes())
    bounds = {
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: job["memory_bytes"] or resource.RLIM_INFINITY,
    }
    for bound, value in bounds.items():
        resource.setrlimit(bound, (value, value))
    try:
        print(json.dumps(recompute(job)))
    except SplitUpError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:  # tinygrad raises anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
