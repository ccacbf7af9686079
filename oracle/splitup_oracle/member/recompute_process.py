"""A confined process that recomputes one task from stored inputs and zero state.

It answers ``{}`` with the class it computes in, ``{"determinism": …}``, and a job with the digests
``{"inputs": […], "outputs": […], "state": …, "accepted": […], "is_defined": …, "noisy_steps": …}``:
a bool per claim, whether the results are defined well enough to refuse any, and in how many steps
that was asked. A job:

    task, weights    descriptors of open files; weights null for a task without any
    inputs           per input port the tensors of all steps, each preceded by its length
    steps            the number of steps
    merges           whether consecutive steps may take one pass
    gate             the input that shuts the task when it is zero (splitup.graph.gates), or null
    determinism      the class to compute in; another class is an error
    claims           lists that hold per output port a file like an input's, to be compared
    tolerances       the task's tolerances, for this comparison
    seed             of the noise that shows what rounding changes (splitup.graph.noise), or ""
    defined_steps    how many first steps are known to be defined, for this seed …
    defined_inputs   … and inputs of these digests
    logits           the index of the output that holds logits, or null
    vram_bytes       the memory that the manifest says the task needs
    memory_bytes     limit of the address space; 0 for none (a GPU maps far more than it uses)
    cpu_s            limit of the processor time

``splitup_oracle.member.recomputation`` starts it and limits its time.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from splitup.core import tuning
from splitup.core.errors import InvalidInput
from splitup.core.tensors import StepsDigest, TensorSpec
from splitup.graph import gates
from splitup.graph.compare import Tolerance, compare_tensors, find_tolerance
from splitup.graph.noise import add_noise
from splitup.graph.rules import load_graph
from splitup.graph.step_groups import StepGroup, Tensors
from splitup.messages.completions import EMPTY_DIGEST
from splitup.sandbox.child import Answer, serve
from splitup.sandbox.confinement import confine

if TYPE_CHECKING:
    from splitup.backend import runtime

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

    found = runtime.describe_device().determinism_class
    if found != job["determinism"]:
        raise InvalidInput(f"this machine computes as '{found}', not as '{job['determinism']}'")
    graph = _read(job["task"])
    program = runtime.TaskProgram(graph, _open_weights(job), memory_bytes=job["vram_bytes"])
    if len(job["inputs"]) != len(program.inputs):
        raise InvalidInput(f"the task takes {len(program.inputs)} inputs, not {len(job['inputs'])}")
    state = program.new_state()
    inputs = [StepsDigest() for _ in program.inputs]
    outputs = [StepsDigest() for _ in program.outputs]
    claims = [_ClaimComparison(job, program.outputs, claimed) for claimed in job["claims"]]
    for read, results in _iter_results(program, state, job):
        for digest, tensor in zip((*inputs, *outputs), (*read, *results), strict=True):
            digest.add_tensor(tensor)
        for claim in claims:
            claim.compare(results)
    has_state = program.states and job["steps"]
    read_digests = [digest.hexdigest() for digest in inputs]
    refused_at = [claim.refused_at for claim in claims if claim.refused_at is not None]
    noisy = max(refused_at) + 1 if refused_at and job["seed"] else 0  # steps to run with noise
    is_known = noisy <= job["defined_steps"] and read_digests == job["defined_inputs"]
    return {
        "inputs": read_digests,
        "outputs": [digest.hexdigest() for digest in outputs],
        "state": program.compute_state_digest(state) if has_state else EMPTY_DIGEST,
        "accepted": [claim.refused_at is None for claim in claims],
        "is_defined": not noisy or is_known or _is_defined(job, graph, program, noisy),
        "noisy_steps": noisy,
    }


def _is_defined(
    job: Mapping[str, Any], graph: bytes, program: runtime.TaskProgram, steps: int
) -> bool:
    """Return whether noise in every rounding changes the first steps by half the tolerance at most.

    Raises InvalidModel when the noisy task is too large to compile.
    """
    from splitup.backend import runtime
    from splitup.backend.weights import open_weights

    noisy = runtime.TaskProgram.from_graph(
        add_noise(load_graph(graph), job["seed"]),
        open_weights(_open_weights(job)),
        is_foreign=True,
    )
    half = [_halve(Tolerance.model_validate(value)) for value in job["tolerances"]]
    states = program.new_state(), noisy.new_state()
    for tensors in _iter_steps(job, steps):
        _, exact = _run(program, states[0], job, tensors)
        _, noised = _run(noisy, states[1], job, tensors)
        for place, port in enumerate(program.outputs):
            tolerance, is_logits = find_tolerance(half, port.dtype), place == job["logits"]
            found = compare_tensors(
                port, noised[place], exact[place], tolerance, is_logits=is_logits
            )
            if not found.is_accepted:
                return False
    return True


def _halve(tolerance: Tolerance) -> Tolerance:
    bounds = {name: bound // 2 for name, bound in tolerance.list_bounds().items()}
    return tolerance.model_copy(update=bounds)


def _read(file: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as opened:
        opened.seek(0)
        return opened.read()


def _open_weights(job: Mapping[str, Any]) -> BinaryIO | None:
    if job["weights"] is None:
        return None
    file = os.fdopen(os.dup(job["weights"]), "rb")
    file.seek(0)
    return file


def _iter_steps(job: Mapping[str, Any], steps: int) -> Iterator[list[bytes]]:
    """Yield the tensors of all inputs, step by step, from the first one on."""
    files = [os.fdopen(os.dup(file), "rb") for file in job["inputs"]]
    for file in files:
        file.seek(0)  # a copy of a descriptor shares its place in the file
    for _ in range(steps):
        yield [read_tensor(file) for file in files]


def _iter_results(
    program: runtime.TaskProgram, state: Any, job: Mapping[str, Any]
) -> Iterator[tuple[Tensors, Tensors]]:
    """Yield what counts as the inputs of each step, and its outputs; several take one pass."""

    def run() -> list[tuple[Tensors, Tensors]]:
        return group.pop(program.run_in_order(state, group.to_run))

    most = tuning.MERGE_STEPS if program.merges and job["merges"] else 1
    group = StepGroup(program.inputs, program.outputs, job["gate"], most)
    for tensors in _iter_steps(job, job["steps"]):
        if not group.add(tensors):
            yield from run()
            group.add(tensors)
    yield from run()


def _run(
    program: runtime.TaskProgram, state: Any, job: Mapping[str, Any], tensors: list[bytes]
) -> tuple[Sequence[bytes | memoryview], Sequence[bytes | memoryview]]:
    """Run a step; return what counts as its inputs, and its outputs."""
    zeros = gates.shut(program.inputs, program.outputs, job["gate"], tensors)
    return (tensors, program.run(state, tensors)) if zeros is None else zeros


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
        self._steps = 0
        self.refused_at: int | None = None  # the first step that differs too much

    def compare(self, results: Sequence[bytes | memoryview]) -> None:
        """Compare one step's outputs."""
        for place, file in enumerate(self._files):
            port, claimed = self._ports[place], read_tensor(file)
            tolerance = find_tolerance(self._tolerances, port.dtype)
            found = compare_tensors(
                port, claimed, results[place], tolerance, is_logits=place == self._logits
            )
            if self.refused_at is None and not found.is_accepted:
                self.refused_at = self._steps
        self._steps += 1


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
