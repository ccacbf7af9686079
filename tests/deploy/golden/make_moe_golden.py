"""Write what Hugging Face's models compute on the checkpoints of ``tests/deploy/moes.py``.

Those of ``tests/deploy/blocks.py`` are Qwen3 models whose rows see their whole block; they go to
``block_logits.npz``.

    PYTHONPATH=. /tmp/golden/bin/python tests/deploy/golden/make_moe_golden.py

in the environment that ``make_golden.py`` describes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.deploy import blocks
from tests.deploy.moes import CASES, GOLDEN, TOKENS, compute_digest, save_moe


def compute_logits(config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the logits after every token, float32 [tokens, vocab]."""
    with tempfile.TemporaryDirectory() as folder:
        save_moe(Path(folder), config)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert type(model).__name__ == config["architectures"][0]
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits.numpy()


def compute_blocks(config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the logits of every token, float32 [tokens, vocab]."""
    kind = "Qwen3Moe" if "num_experts" in config else "Qwen3"
    plain = {key: value for key, value in config.items() if key not in ("ep_size", "block_size")}
    plain |= {"architectures": [f"{kind}ForCausalLM"]}
    plain |= {"model_type": "qwen3_moe" if kind == "Qwen3Moe" else "qwen3"}
    block = torch.arange(len(blocks.TOKENS)) // blocks.BLOCK
    seen = block[:, None] >= block[None, :]
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with tempfile.TemporaryDirectory() as folder:
        save_moe(Path(folder), plain, weights=blocks.make_weights(config))
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        tokens = torch.tensor([blocks.TOKENS])
        logits: torch.Tensor = model.eval()(tokens, attention_mask=mask, use_cache=False).logits[0]
    return logits.numpy()


def main() -> None:
    """Compute and write all cases."""
    found = {name: compute_blocks(config) for name, config in blocks.CASES.items()}
    np.savez_compressed(blocks.GOLDEN, **found)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, config in CASES.items():
        arrays[f"{name}/logits"] = compute_logits(config)
        arrays[f"{name}/digest"] = np.array(compute_digest(config))
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    main()
