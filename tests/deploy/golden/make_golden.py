"""Write what Hugging Face's models compute on the checkpoints of ``tests/deploy/checkpoints.py``.

Run it again after changing a checkpoint, in an environment of its own:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers
    PYTHONPATH=. /tmp/golden/bin/python tests/deploy/golden/make_golden.py

``logits.npz`` gets, for every case, float32 logits after every token, computed at once (prefill)
and one token at a time, and the digest of the checkpoint they belong to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.deploy.checkpoints import (
    CASES,
    GOLDEN,
    TOKENS,
    Case,
    compute_checkpoint_digest,
    save_checkpoint,
)


def compute_logits(case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return logits [tokens, vocab] of one pass, and of one pass per token with a cache."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), case)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    assert type(model).__name__ == case.architecture
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    model.eval()
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits[0]
        cache, rows = None, []
        for position in range(len(TOKENS)):
            step = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            rows.append(step.logits[0, 0])
    return whole.numpy(), torch.stack(rows).numpy()


def main() -> None:
    """Compute and write all cases."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, case in CASES.items():
        whole, steps = compute_logits(case)
        gap = float(np.linalg.norm(whole - steps) / np.linalg.norm(whole))
        spread = float(np.abs(whole).max())
        print(f"{name}: prefill against steps {gap:.1e}, largest logit {spread:.2f}")
        arrays[f"{name}/prefill"] = whole.astype("<f4")
        arrays[f"{name}/steps"] = steps.astype("<f4")
        arrays[f"{name}/digest"] = np.array(compute_checkpoint_digest(case))
    np.savez_compressed(GOLDEN / "logits.npz", **arrays)
    print(f"{(GOLDEN / 'logits.npz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
