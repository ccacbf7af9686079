"""The uncut model in one process, for comparison with the split one.

    python -m bench.testbed.uncut_process MODEL CHUNK CONTEXT  # then lines: tokens or "read" tokens

Generates as many tokens as a line says, or reads a prompt of so many. Answers with a JSON object:
the seconds they took, those of its processor, and the tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from bench.testbed.run_python import Ask, run_lines
from splitup.backend.runtime import TaskProgram
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.step import make_arrays, make_causal_step

FIRST: Final = 5  # the token that every generation begins with
_WORDS: Final = 1_000  # different tokens of a prompt
_READ: Final = "read"

Arrays = dict[str, np.ndarray[Any, Any]]


def make_step_arrays(token: int, position: int, chunk: int) -> Arrays:
    """Return the inputs of a step of one token."""
    return make_arrays(make_causal_step([token], position), chunk)


def make_prompt_arrays(tokens: int, chunk: int, context: int) -> list[Arrays]:
    """Return the inputs of all steps that a client sends of a prompt of so many tokens."""
    decoder = SequentialDecoder(
        TextRequest(
            prompt=tuple(FIRST + place % _WORDS for place in range(tokens)),
            sampler=Sampler(),
            max_tokens=1,
            eos_ids=frozenset(),
            vocab=FIRST + _WORDS,
            context=context,
            chunk=chunk,
        )
    )
    steps = []
    while (step := decoder.next_step()) is not None:
        steps.append(make_arrays(step, chunk))
    return steps


def pick(logits: np.ndarray[Any, Any]) -> int:
    """Return the likeliest token."""
    return int(logits[-1].argmax())


class OnePiece:
    """The process, as the one who asks it sees it. Made by ``run_one_piece``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def generate(self, tokens: int) -> tuple[float, list[int]]:
        """Return the seconds of as many tokens after the first, and all of them."""
        said = json.loads(await self._ask(str(tokens)))
        return said["s"], said["tokens"]

    async def read(self, tokens: int) -> tuple[float, float, int]:
        """Read a prompt; return the seconds, those of the processor, and the token after it."""
        said = json.loads(await self._ask(f"{_READ} {tokens}"))
        return said["s"], said["cpu_s"], said["tokens"][0]


class _Whole:
    def __init__(self, program: TaskProgram, chunk: int, context: int) -> None:
        self._program = program
        self._chunk, self._context = chunk, context

    def generate(self, tokens: int) -> list[int]:
        """Restart the clock after the first step, which is the prompt."""
        state, token, found = self._program.new_state(), FIRST, []
        for position in range(tokens + 1):
            if position == 1:
                self.begin()
            token = self._run(state, make_step_arrays(token, position, self._chunk))
            found.append(token)
        return found

    def read(self, tokens: int) -> list[int]:
        state, steps = (
            self._program.new_state(),
            make_prompt_arrays(tokens, self._chunk, self._context),
        )
        self.begin()
        return [self._run(state, arrays) for arrays in steps][-1:]

    def begin(self) -> None:
        self._s, self._cpu_s = time.perf_counter(), time.process_time()

    def measure(self) -> dict[str, float]:
        return {
            "s": time.perf_counter() - self._s,
            "cpu_s": time.process_time() - self._cpu_s,
        }

    def _run(self, state: Any, arrays: Arrays) -> int:
        [logits] = self._program.outputs
        rows = [array_to_bytes(spec, arrays[spec.name]) for spec in self._program.inputs]
        return pick(bytes_to_array(logits, self._program.run(state, rows)[0]))


def main() -> None:
    """Load the model, then answer lines until stdin ends."""
    model, chunk, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    whole = _Whole(load_reference(model, Sizes(context=context, chunk=chunk)), chunk, context)
    print("{}", flush=True)
    for line in sys.stdin:
        *order, tokens = line.split()
        found = (whole.read if order == [_READ] else whole.generate)(int(tokens))
        print(json.dumps({**whole.measure(), "tokens": found}), flush=True)


@asynccontextmanager
async def run_one_piece(model: Path, chunk: int, context: int) -> AsyncIterator[OnePiece]:
    """Start the process; it serves until the block is left."""
    arguments = (str(model), str(chunk), str(context))
    async with run_lines("bench.testbed.uncut_process", *arguments) as (_, ask):
        yield OnePiece(ask)


if __name__ == "__main__":
    main()
