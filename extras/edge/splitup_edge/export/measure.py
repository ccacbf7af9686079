"""How far an exported model is from the one that is cut for the market, and how fast it is.

Both compute one text of the model's own. The market's side is the uncut model on our kernels; what
the layers give is compared, by their keys and values, with the same graph in torch at float32.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from splitup.backend.runtime import State, TaskProgram
from splitup.core.tensors import array_to_bytes
from splitup.decode.sampler import Sampler
from splitup.decode.step import StepInput, make_arrays, make_block_step, make_causal_step
from splitup_edge.program import EdgeInfo, EdgeProgram, EdgeSession

TOKENS: Final = 64  # of the text
Floats = npt.NDArray[np.float32]


class EagerProgram:
    """The static steps computed by torch itself, without ExecuTorch."""

    def __init__(self, info: EdgeInfo, modules: Mapping[str, nn.Module]) -> None:
        self.info, self._modules = info, modules

    def execute(
        self, method: str, inputs: dict[str, npt.NDArray[Any]]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Run a static step; return logits [1, rows, vocab] and the new cache."""
        names = self.info.make_shape(method).inputs
        with torch.no_grad():
            tensors = (torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in names)
            logits, cache = self._modules[method](*tensors)
        return logits.numpy(), cache.numpy()


class Whole:
    """The uncut model on our kernels."""

    def __init__(self, program: TaskProgram, chunk: int) -> None:
        self._program, self._chunk = program, chunk
        self._state: State = program.new_state()

    def step(self, step: StepInput) -> Floats:
        """Take one step; return logits [R, vocab]."""
        arrays = make_arrays(step, self._chunk)
        given = [array_to_bytes(spec, arrays[spec.name]) for spec in self._program.inputs]
        [data] = self._program.run(self._state, given)
        return np.frombuffer(data, np.float32).reshape(len(step.outputs), -1)


def measure(program: EdgeProgram, eager: EagerProgram, reference: TaskProgram) -> dict[str, Any]:
    """Return errors, likelihoods and rates of an exported model.

    Errors are relative: the L2 norm of the difference over that of the reference. Rates are by the
    CPU time, so the program has to be loaded for one thread, which our kernels take.
    """
    info = program.info
    tokens = _write_text(info, reference)
    steps = _split(info, tokens)
    whole = Whole(reference, info.chunk)
    sessions = EdgeSession(program), EdgeSession(eager)
    found, wanted, times = [], [], np.zeros((len(steps), 2))
    for number, step in enumerate(steps):
        arrays = make_arrays(step, info.chunk)
        begun = time.process_time()
        found.append(sessions[0].step(arrays))
        between = time.process_time()
        wanted.append(whole.step(step))
        times[number] = between - begun, time.process_time() - between
        sessions[1].step(arrays)
    given, right = np.concatenate(found), np.concatenate(wanted)
    rows = len(tokens)
    caches = [session.cache[..., :rows, :].astype(np.float64) for session in sessions]
    result: dict[str, Any] = {
        "tokens": rows,
        "logits_error": compute_error(given, right),
        "layer_errors": [compute_error(*pair) for pair in zip(*caches, strict=True)],
        "same_likeliest_token": float((given.argmax(1) == right.argmax(1)).mean()),
    }
    if info.text.diffusion is None:
        result["nats_per_token"] = compute_loss(given, tokens)
        result["nats_per_token_of_the_model"] = compute_loss(right, tokens)
    rate = info.methods[info.choose_method(1)] / np.median(times[1:], axis=0)
    result |= {"rows_per_s": float(rate[0]), "rows_per_s_of_our_kernels": float(rate[1])}
    return result


def _write_text(info: EdgeInfo, reference: TaskProgram) -> list[int]:
    """Return tokens that the model draws one after the other; a model of blocks gets any."""
    count, vocab = min(TOKENS, info.max_len), info.text.vocab
    if info.text.diffusion is not None:
        return [int(token) for token in np.random.default_rng(0).integers(0, vocab, count)]
    whole, sampler = Whole(reference, info.chunk), Sampler(1.0, 0)
    tokens = [info.text.eos_ids[0] if info.text.eos_ids else 0]
    while len(tokens) < count:
        place = len(tokens) - 1
        logits = whole.step(make_causal_step(tokens[-1:], place))
        tokens.append(sampler.choose(logits[0], place))
    return tokens


def _split(info: EdgeInfo, tokens: Sequence[int]) -> list[StepInput]:
    """Return the text in steps: one of the most rows, then such as decoding takes."""
    small = info.methods[info.choose_method(1)]
    ends = [min(info.chunk, len(tokens) - small) // small * small or small]
    while ends[-1] < len(tokens):
        ends.append(min(ends[-1] + small, len(tokens)))
    steps = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        rows = range(end - start)
        if (diffusion := info.text.diffusion) is None:
            steps.append(make_causal_step(tokens[start:end], start, rows))
        else:
            size = diffusion.block_size
            steps.append(make_block_step(tokens[start:end], start, rows, block_size=size))
    return steps


def compute_error(given: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Return the L2 norm of the difference over that of what is wanted."""
    norm = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(given - wanted)) / norm if norm else 0.0


def compute_loss(logits: Floats, tokens: Sequence[int]) -> float:
    """Return the mean of -log p of every token but the first."""
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    chosen = wide[np.arange(len(wide)), tokens[1:]]
    return float((np.log(np.exp(wide).sum(1)) - chosen).mean())
