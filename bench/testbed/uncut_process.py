"""The uncut model in one process, for comparison with the split one.

    python -m bench.testbed.uncut_process MODEL CHUNK CONTEXT  # then lines: numbers of tokens

Answers each line with a JSON object: the seconds they took and the tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.step import make_arrays, make_causal_step

FIRST: Final = 5  # the token that every generation begins with
_LINE_BYTES: Final = 2**20

Generate = Callable[[int], Awaitable[tuple[float, list[int]]]]  # tokens -> seconds, tokens


def make_step_arrays(token: int, position: int, chunk: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of a step of one token."""
    return make_arrays(make_causal_step([token], position), chunk)


def pick(logits: np.ndarray[Any, Any]) -> int:
    """Return the likeliest token."""
    return int(logits[-1].argmax())


def main() -> None:
    """Load the model, then answer lines until stdin ends."""
    model, chunk, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    program = load_reference(model, Sizes(context=context, chunk=chunk))
    [logits] = program.outputs
    print("{}", flush=True)
    for line in sys.stdin:
        state, token, tokens = program.new_state(), FIRST, []
        begun = 0.0
        for position in range(int(line) + 1):
            if position == 1:  # the first step is the prompt
                begun = time.perf_counter()
            arrays = make_step_arrays(token, position, chunk)
            rows = [array_to_bytes(spec, arrays[spec.name]) for spec in program.inputs]
            token = pick(bytes_to_array(logits, program.run(state, rows)[0]))
            tokens.append(token)
        print(json.dumps({"s": time.perf_counter() - begun, "tokens": tokens}), flush=True)


@asynccontextmanager
async def run_one_piece(model: Path, chunk: int, context: int) -> AsyncIterator[Generate]:
    """Start the process; yields the function that generates tokens in it."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "bench.testbed.uncut_process",
            str(model),
            str(chunk),
            str(context),
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    try:
        await stdout.readline()

        async def generate(tokens: int) -> tuple[float, list[int]]:
            stdin.write(f"{tokens}\n".encode())
            said = json.loads(await stdout.readline())
            return said["s"], said["tokens"]

        yield generate
    finally:
        stdin.close()
        await process.wait()


if __name__ == "__main__":
    main()
