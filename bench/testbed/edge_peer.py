"""XNNPACK for ``bench.measure.kernel_speed``: a float32 GGUF file, exported and computed.

    python -m bench.testbed.edge_peer FILE FORM THREADS CONTEXT  # then lines: steps, rows

Needs the extra ``splitup[edge]``. FORM is the one that the model is compared with: f32, f16 or
q8_0. Answers each line with the seconds that so many steps of so many rows took.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from splitup_deploy.frontends.gguf.config import read_config
from splitup_deploy.frontends.gguf.family_table import FAMILIES
from splitup_deploy.frontends.gguf.header import read_gguf
from splitup_deploy.frontends.gguf.model_file import GgufWeights
from splitup_edge.export.plan import Dtype
from splitup_edge.export.program_file import export_program, make_modules
from splitup_edge.export.static_graph import build_static_step, make_shape
from splitup_edge.program import EdgeInfo, EdgeProgram, EdgeSession

from bench.measure.kernel_speed import ROWS, get_clock
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import TextInfo

DTYPES: Final[dict[str, Dtype]] = {"f32": "fp32", "f16": "fp16", "q8_0": "int8"}


def export(source: Path, dtype: Dtype, context: int) -> Path:
    """Export the model, unless it was exported before; return the file."""
    output = source.with_name(f"{dtype}.pte")
    if output.exists():
        return output
    file = read_gguf(source)
    config = read_config(file, "llama", context)
    weights = GgufWeights(file, config, FAMILIES["llama"])
    shapes = {name: make_shape(config, rows) for name, rows in (("forward", 1), ("prefill", ROWS))}
    models = {name: build_static_step(config, weights, shape) for name, shape in shapes.items()}
    text = TextInfo(
        tokenizer_digest="0" * 64,
        tokenizer_bytes=1,
        eos_ids=(),
        vocab=config.vocab,
        context=context,
    )
    info = EdgeInfo(
        version=1,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_len=context,
        windows=(),
        dtype="float16" if dtype == "fp16" else "float32",
        methods={name: shape.block for name, shape in shapes.items()},
        text=text,
    )
    export_program(make_modules(models, dtype), info, b"-", "xnnpack", output)
    return output


def main() -> None:
    """Export, then answer lines."""
    source, form, threads, context = Path(sys.argv[1]), *sys.argv[2:]
    file = export(source, DTYPES[form], int(context))
    program = EdgeProgram(file, threads=int(threads))
    clock = get_clock(int(threads))
    for line in sys.stdin:
        count, rows = map(int, line.split())
        session = EdgeSession(program)
        steps = [make_causal_step([7] * rows, at * rows) for at in range(count)]
        start_s = clock()
        for step in steps:
            session.step(make_arrays(step, program.info.chunk))
        print(clock() - start_s, flush=True)


if __name__ == "__main__":
    main()
