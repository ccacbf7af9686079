"""A confined process that recomputes one task from stored inputs and zero state.

It answers ``{}`` with the class it computes in, ``{"determinism": …}``, and a job with the digests
``{"inputs": […], "outputs": […], "state": …, "accepted": […]}``, a bool per claim. A job:

    task, weights    descriptors of open files; weights null for a task without any
    inputs           per input port the tensors of all steps, each preceded by its length
    steps            the number of steps
    gate             the input that shuts the task when it is zero (splitup.graph.gates), or null
    determinism      the class to compute in; another class is an error
    claims           lists that hold per output port a file like an input's, to be compared
    tolerances       the task's tolerances, for this comparison
    logits           the index of the output that holds logits, or null
    vram_bytes       the memory that the manifest says the task needs
    memory_bytes     limit of the address space; 0 for none (a GPU maps far more than it uses)
    cpu_s            limit of the processor time

``splitup_oracle.member.recomputation`` starts it and limits its time.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final

from splitup.core.errors import InvalidInput
from splitup.core.tensors import StepsDigest, TensorSpec
from splitup.graph.compare import Tolerance, compare_tensors, find_tolerance
from splitup.messages.completions import EMPTY_DIGEST
from splitup.sandbox.child import Answer, serve
from splitup.sandbox.confinement import confine

_LENGTH_BYTES: Final = 8


def write_tensor(file: BinaryIO, data: bytes | memoryview) -> None:
    """Append one step's tensor to an input file, after its length as u64, little-endian."""
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)


def read_tensor(file: BinaryIO) -> bytes:
    """Return the next step's tensor; the task's program checks its length."""
    return file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))


def recompute(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of a job; raise InvalidInput, InvalidModel, or tinygrad's errors."""
    from splitup.backend import runtime  # after the limits: it opens the device
    from splitup.graph import gates

    found = runtime.describe_device().determinism_class
    if found != job["determinism"]:
        raise InvalidInput(f"this machine computes as '{found}', not as '{job['determinism']}'")
    weights = None if job["weights"] is None else os.fdopen(job["weights"], "rb")
    with os.fdopen(job["task"], "rb") as task:
        program = runtime.TaskProgram(task.read(), weights, memory_bytes=job["vram_bytes"])
    if len(job["inputs"]) != len(program.inputs):
        raise InvalidInput(f"the task takes {len(program.inputs)} inputs, not {len(job['inputs'])}")
    state = program.new_state()
    inputs = [StepsDigest() for _ in program.inputs]
    outputs = [StepsDigest() for _ in program.outputs]
    files = [os.fdopen(file, "rb") for file in job["inputs"]]
    claims = [_ClaimComparison(job, program.outputs, claimed) for claimed in job["claims"]]
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
        for claim in claims:
            claim.compare(results)
    has_state = program.states and job["steps"]
    return {
        "inputs": [digest.hexdigest() for digest in inputs],
        "outputs": [digest.hexdigest() for digest in outputs],
        "state": program.compute_state_digest(state) if has_state else EMPTY_DIGEST,
        "accepted": [claim.is_accepted for claim in claims],
    }


class _ClaimComparison:
    """Compares the outputs that a node of another class claims with our own, step by step."""

    def __init__(
        self, job: Mapping[str, Any], ports: Sequence[TensorSpec], claimed: Sequence[int]
    ) -> None:
        self._ports = ports
        self._files = [os.fdopen(file, "rb") for file in claimed]
        if len(self._files) != len(ports):
            raise InvalidInput(f"the task has {len(ports)} outputs, not {len(self._files)}")
        self._tolerances = [Tolerance.model_validate(value) for value in job["tolerances"]]
        self._logits = job["logits"]
        self.is_accepted = True

    def compare(self, results: Sequence[bytes | memoryview]) -> None:
        """Compare one step's outputs."""
        for place, file in enumerate(self._files):
            port, claimed = self._ports[place], read_tensor(file)
            tolerance = find_tolerance(self._tolerances, port.dtype)
            found = compare_tensors(
                port, claimed, results[place], tolerance, is_logits=place == self._logits
            )
            self.is_accepted = self.is_accepted and found.is_accepted


def answer(question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
    """Answer one question of ``recomputation``."""
    if not question:
        from splitup.backend.runtime import describe_device

        return {"determinism": describe_device().determinism_class}, ()
    bounds = {
        resource.RLIMIT_CPU: question["cpu_s"],
        resource.RLIMIT_AS: question["memory_bytes"] or resource.RLIM_INFINITY,
    }
    for bound, value in bounds.items():
        resource.setrlimit(bound, (value, value))
    return recompute(question), ()


def main() -> None:
    confine(os.environ.get("DEV", ""), forks=True)
    serve(answer)


if __name__ == "__main__":
    main()
