"""Write small state files with torch and numpy themselves, for ``test_statefile.py``.

PYTHONPATH=. /tmp/golden/bin/python tests/deploy/golden/make_state_files.py
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from tests.deploy.checkpoints import GOLDEN


def make_state() -> dict[str, Any]:
    """Return tensors of many dtypes, two on one storage, one of them a parameter."""
    both = torch.arange(12, dtype=torch.float32) / 7
    state = OrderedDict(
        first=both[:6].view(2, 3),
        second=both[6:].view(3, 2),
        parameter=torch.nn.Parameter(torch.full((2, 2), 0.5)),
        half=torch.arange(3).to(torch.float16),
        brain=torch.arange(5).to(torch.bfloat16),
        double=torch.tensor(2.5, dtype=torch.float64),
        long=torch.tensor([-1, 2**40]),
        byte=torch.tensor([[255]], dtype=torch.uint8),
        flag=torch.tensor([True, False]),
    )
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return state


def main() -> None:
    """Write every form."""
    state = make_state()
    torch.save(state, GOLDEN / "state.zip.pt")
    torch.save(
        {"state_dict": state, "epoch": 3, "arguments": ["-v", None, 0.1]},
        GOLDEN / "state.legacy.pth",
        _use_new_zipfile_serialization=False,
    )
    (GOLDEN / "state.torch.pkl").write_bytes(pickle.dumps({"half": state["half"]}, protocol=4))
    arrays = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.array([1, -2], "<i8")}
    for protocol in (3, 4, 5):
        data = pickle.dumps(arrays, protocol=protocol)
        (GOLDEN / f"state.numpy{protocol}.pkl").write_bytes(data)


if __name__ == "__main__":
    main()
