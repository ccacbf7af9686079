"""Steps of a sequence model as bytes, and whole sequences fed through a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from splitup.backend.runtime import TaskProgram
from splitup.core.tensors import TensorSpec
from splitup.decode.step import StepInput, make_arrays, make_causal_step
from splitup.graph.step_groups import StepGroup

S = TypeVar("S")


class HasShape(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def as_inputs(ports: Sequence[HasShape], token: int, position: int) -> dict[str, bytes]:
    """Return the inputs of a step of one token, by name, for a model with these input ports."""
    return step_inputs(ports, make_causal_step([token], position))


def step_inputs(ports: Sequence[HasShape], step: StepInput) -> dict[str, bytes]:
    chunk = next(port.shape[0] for port in ports if port.name == "tokens")
    return {name: array.tobytes() for name, array in make_arrays(step, chunk).items()}


class Program(Protocol[S]):
    """A whole model, compiled or not (``reference_program``), whose states are of this kind."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    def new_state(self) -> S: ...

    def run(self, state: S, inputs: Sequence[bytes]) -> Sequence[bytes | memoryview]: ...


def run_step(program: Program[S], state: S, step: StepInput) -> np.ndarray:
    """Return the logits of an uncut model, float32 [R, vocab]."""
    inputs = step_inputs(program.inputs, step)
    (data,) = program.run(state, [inputs[spec.name] for spec in program.inputs])
    return np.frombuffer(data, np.float32).reshape(len(step.outputs), -1)


def feed(program: Program[S], tokens: Sequence[int], rows: int = 1) -> np.ndarray:
    """Return the logits of every token, fed ``rows`` at a time."""
    state, logits = program.new_state(), []
    for start in range(0, len(tokens), rows):
        group = tokens[start : start + rows]
        step = make_causal_step(group, start, outputs=range(len(group)))
        logits.append(run_step(program, state, step))
    return np.concatenate(logits)


def check_together(program: TaskProgram, plans: Sequence[Sequence[StepInput]]) -> None:
    """Check that sequences of steps, run together, give the bytes of each alone."""
    states = {name: [program.new_state() for _ in plans] for name in ("alone", "together")}
    for number in range(max(map(len, plans))):
        who = [k for k, plan in enumerate(plans) if number < len(plan)]
        named = {k: step_inputs(program.inputs, plans[k][number]) for k in who}
        inputs = {k: [named[k][spec.name] for spec in program.inputs] for k in who}
        wanted = [program.run(states["alone"][k], inputs[k]) for k in who]
        given = program.run_together([(states["together"][k], inputs[k]) for k in who])
        assert given == wanted
    digests = [[program.compute_state_digest(s) for s in group] for group in states.values()]
    assert digests[0] == digests[1]


def check_merged(program: TaskProgram, plan: Sequence[StepInput], passes: int = 3) -> None:
    """Check that consecutive steps, cut into passes at random, give the bytes of single steps."""
    named = [step_inputs(program.inputs, step) for step in plan]
    inputs = [[one[spec.name] for spec in program.inputs] for one in named]
    alone = program.new_state()
    wanted = [program.run(alone, one) for one in inputs]
    assert program.merges
    for seed in range(passes):
        chance, state, given = np.random.default_rng(seed), program.new_state(), []
        group = StepGroup(program.inputs, program.outputs, None, len(inputs))
        for one in inputs:
            if chance.random() < 0.1 * seed or not group.add(one):
                given += program.run_in_order(state, group.to_run)
                group = StepGroup(program.inputs, program.outputs, None, len(inputs))
                assert group.add(one)
        given += program.run_in_order(state, group.to_run)
        assert given == wanted
        assert program.compute_state_digest(state) == program.compute_state_digest(alone)
