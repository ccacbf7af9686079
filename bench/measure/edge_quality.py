"""What narrow weights cost an exported model: ``.edge/bin/python -m bench.measure.edge_quality``.

The example model is exported with XNNPACK at every dtype, and the files compute a text that the
model was not trained on: an argument, by default the sample beside the example adapter. Needs the
extra ``splitup[edge]``. Prints one JSON object per dtype: bytes of the file, nats per token, and
the error of the logits against our kernels, the L2 norm of the difference over that of theirs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from splitup_edge.export.measure import Whole, compute_error, compute_loss
from splitup_edge.export.plan import Dtype, plan_export
from splitup_edge.export.program_file import export_program, make_modules
from splitup_edge.program import EdgeProgram, EdgeSession
from tokenizers import Tokenizer

from splitup.decode.step import make_arrays, make_causal_step

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
MODEL: Final = EXAMPLES / "packages-4m"
SAMPLE: Final = EXAMPLES / "packages-4m-python-docs" / "sample.txt"
CHUNK: Final = 32  # rows of a step


def compute_logits(tokens: list[int], context: int, step: Any) -> tuple[list[Any], list[int]]:
    """Return the logits of windows of a text, and the tokens in them; ``step`` makes windows."""
    found, fed, run = [], [], step()
    for start in range(0, len(tokens) - CHUNK + 1, CHUNK):
        place = start % context
        if start and not place:
            run = step()
        rows = tokens[start : start + CHUNK]
        found.append(run(make_causal_step(rows, place, range(CHUNK))))
        fed += rows
    return found, fed


def main() -> None:
    """Measure every dtype."""
    text = Path(sys.argv[1] if len(sys.argv) > 1 else SAMPLE).read_text()
    tokens = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
    reference = load_reference(str(MODEL), Sizes(chunk=CHUNK))
    context = plan_export(str(MODEL), "fp32", None, None).shapes["forward"].max_len
    logits, fed = compute_logits(tokens, context, lambda: Whole(reference, CHUNK).step)
    wanted = np.concatenate(logits)
    with tempfile.TemporaryDirectory(prefix="splitup-edge-") as directory:
        for dtype in get_args(Dtype):
            plan, file = plan_export(str(MODEL), dtype, None, None), Path(directory, "m.pte")
            assert plan.info is not None
            modules = make_modules(plan.models, dtype)
            export_program(modules, plan.info, plan.tokenizer, "xnnpack", file)
            program = EdgeProgram(file)

            def open_session(program: EdgeProgram = program) -> Any:
                session = EdgeSession(program)
                return lambda step: session.step(make_arrays(step, CHUNK))

            given = np.concatenate(compute_logits(tokens, context, open_session)[0])
            same = (given.argmax(1) == wanted.argmax(1)).mean()
            row = {
                "dtype": dtype,
                "file_bytes": file.stat().st_size,
                "tokens": len(fed),
                "nats_per_token": round(compute_loss(given, fed), 4),
                "nats_per_token_of_our_kernels": round(compute_loss(wanted, fed), 4),
                "logits_error": float(f"{compute_error(given, wanted):.2g}"),
                "same_likeliest_token": round(float(same), 4),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
