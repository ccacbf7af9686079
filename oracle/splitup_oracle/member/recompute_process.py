"""A confined process that recomputes tasks from stored inputs and zero state, each in a fork.

It compiles as ``splitup.backend.compiler.compile_server`` does, in forks that run nothing, and each
fork that runs a task gets the machine code of that task alone. It opens no GPU itself, whose driver
a fork could not use. ``splitup_oracle.member.recomputation`` starts it and limits its time. Besides
what the compile server is asked it is asked for

    {"ask": "class"}    the device and the class that it computes in, as its report says
    {"ask": "replay"}   the digests of a job's results, which claims are accepted, and in how many
                        steps noise has to say whether that was right; buffer: the task's code
    {"ask": "noise"}    whether noise changes the first ``noisy_steps`` of a job by half of the
                        tolerance at most; buffers: the task's code, and the noisy task's

and answers with a buffer of JSON. A job:

    task, weights    descriptors of open files; weights null for a task without any
    inputs           per input port the tensors of all steps, each preceded by its length
    steps            the number of steps
    merges           whether consecutive steps may take one pass
    gate             the input that shuts the task when it is zero (splitup.graph.gates), or null
    determinism      the class to compute in; another class is an error
    claims           lists that hold per output port a file like an input's, to be compared
    tolerances       the task's tolerances, for this comparison
    seed             of the noise that shows what rounding changes (splitup.graph.noise), or ""
    noisy_steps      how many first steps to compute with noise
    logits           the index of the output that holds logits, or null
    vram_bytes       the memory that the manifest says the task needs
    memory_bytes     limit of the address space; 0 for none (a GPU maps far more than it uses)
    cpu_s            limit of the processor time

Files are named by their place among those that came with the question.
"""

from __future__ import annotations

import functools
import json
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from splitup.backend.compiler import compile_server
from splitup.core import tuning
from splitup.core.errors import InvalidInput
from splitup.core.garbage_collection import pause_garbage_collection
from splitup.core.tensors import StepsDigest, TensorSpec
from splitup.graph import gates
from splitup.graph.compare import compare_tensors
from splitup.graph.noise import add_noise
from splitup.graph.rules import load_graph
from splitup.graph.step_groups import StepGroup, Tensors
from splitup.graph.tolerances import Tolerance, find_tolerance
from splitup.messages.completions import EMPTY_DIGEST
from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.fork import run_in_fork
from splitup.sandbox.serving import Answer

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


def replay(job: Mapping[str, Any], kernels: bytes) -> dict[str, Any]:
    """Return the digests of a job; raise InvalidInput, InvalidModel, or tinygrad's errors."""
    program = _load(job, kernels)
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
    refused_at = [claim.refused_at for claim in claims if claim.refused_at is not None]
    return {
        "inputs": [digest.hexdigest() for digest in inputs],
        "outputs": [digest.hexdigest() for digest in outputs],
        "state": program.compute_state_digest(state) if has_state else EMPTY_DIGEST,
        "accepted": [claim.refused_at is None for claim in claims],
        "noisy_steps": max(refused_at) + 1 if refused_at and job["seed"] else 0,
    }


def is_defined(job: Mapping[str, Any], kernels: bytes, noisy_kernels: bytes) -> bool:
    """Return whether noise in every rounding changes the first steps by half the tolerance at most.

    Raises InvalidModel when the noisy task breaks a rule.
    """
    from splitup.backend import runtime
    from splitup.backend.weights import open_weights

    program = _load(job, kernels)
    graph, keys = add_noise(load_graph(_read(job["task"])), job["seed"])
    get_bytes = open_weights(_open_weights(job))
    noisy = runtime.TaskProgram.from_graph(
        graph,
        lambda name: memoryview(keys[name]) if name in keys else get_bytes(name),
        kernels=noisy_kernels,
    )
    half = [_halve(Tolerance.model_validate(value)) for value in job["tolerances"]]
    states = program.new_state(), noisy.new_state()
    for tensors in _iter_steps(job, job["noisy_steps"]):
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


def _load(job: Mapping[str, Any], kernels: bytes) -> runtime.TaskProgram:
    from splitup.backend import runtime

    found = runtime.describe_device().determinism_class
    if found != job["determinism"]:
        raise InvalidInput(f"this machine computes as '{found}', not as '{job['determinism']}'")
    program = runtime.TaskProgram(
        _read(job["task"]),
        _open_weights(job),
        kernels=kernels,
        memory_bytes=job["vram_bytes"],
        gate=job["gate"],
    )
    if len(job["inputs"]) != len(program.inputs):
        raise InvalidInput(f"the task takes {len(program.inputs)} inputs, not {len(job['inputs'])}")
    return program


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
    if "ask" not in question:
        return compile_server.answer(question, buffers)
    passed = question.get("passed", ())
    job = _name_files(question, passed)
    work = functools.partial(_work, job, [bytes(buffer) for buffer in buffers])
    return {}, [run_in_fork("recomputing the task", work, passed)]


def _work(job: Mapping[str, Any], kernels: Sequence[bytes]) -> bytes:
    found: object
    if job["ask"] == "class":
        from splitup.backend.runtime import describe_device

        found = describe_device().to_dict()
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"]))
        bound = job["memory_bytes"] or resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
        found = replay(job, *kernels) if job["ask"] == "replay" else is_defined(job, *kernels)
    return json.dumps(found).encode()


def _name_files(job: Mapping[str, Any], passed: Sequence[int]) -> dict[str, Any]:
    """Return the job with this process's numbers of its files."""
    if not passed:
        return dict(job)
    weights = job["weights"]
    return {
        **job,
        "task": passed[job["task"]],
        "weights": None if weights is None else passed[weights],
        "inputs": [passed[place] for place in job["inputs"]],
        "claims": [[passed[place] for place in claim] for claim in job["claims"]],
    }


def main() -> None:
    # opens what tells its memory; and what a fork has imported, the next one would import again
    with pause_garbage_collection():
        from splitup.backend import runtime as runtime
        from splitup.backend.compiler import compile_process as compile_process
        from splitup.graph import noise as noise

    serve_confined(answer, os.environ.get("DEV", ""), forks=True)


if __name__ == "__main__":
    main()
