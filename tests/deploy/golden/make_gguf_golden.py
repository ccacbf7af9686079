"""Write gguf_blocks.npz: random blocks and what the ``gguf`` package says they stand for.

pip install gguf && python tests/deploy/golden/make_gguf_golden.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

NAMES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K Q2_K Q3_K IQ4_NL IQ4_XS MXFP4".split()
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}


def main() -> None:
    random = np.random.default_rng(0)
    arrays = {}
    for name in NAMES:
        kind = GGMLQuantizationType[name]
        nbytes = GGML_QUANT_SIZES[kind][1]
        blocks = random.integers(0, 256, (2, 3, nbytes), dtype=np.uint8)
        for at in HALVES.get(name, (0,)):
            scale = random.normal(0, 0.1, (2, 3)).astype("<f2")
            blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
        if name == "MXFP4":  # powers of two: the least ones, usual ones, the greatest finite one
            blocks[..., 0] = [[0, 1, 2], [120, 127, 252]]
        arrays[f"{name}/blocks"] = blocks
        arrays[f"{name}/values"] = quants.dequantize(blocks.reshape(2, -1), kind)
    np.savez_compressed(Path(__file__).parent / "gguf_blocks.npz", **arrays)


if __name__ == "__main__":
    main()
