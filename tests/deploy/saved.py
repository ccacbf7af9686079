"""The small random checkpoints of all families, as versions of Hugging Face's library save them.

``golden/make_saved.py`` writes ``golden/saved.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.deploy import checkpoints, hybrids, mixtures, moes, variations

SAVED: Final = checkpoints.GOLDEN / "saved.json"
_CHECKPOINTS: Final = {
    **checkpoints.CASES,
    **mixtures.CASES,
    **hybrids.CASES,
    **variations.CASES,
}
CASES: Final = (*_CHECKPOINTS, *moes.CASES)


def save_case(name: str, directory: Path) -> None:
    """Write the checkpoint of a case, in the spelling of its first publication."""
    if name in _CHECKPOINTS:
        checkpoints.save_checkpoint(directory, _CHECKPOINTS[name])
    else:
        moes.save_moe(directory, moes.CASES[name])


def save_again(directory: Path, saved: dict[str, Any]) -> None:
    """Write a checkpoint's configuration and names as a later version saves them."""
    (directory / "config.json").write_text(json.dumps(saved["config"]))
    path = directory / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = {name: saved["renamed"].get(name, name) for name in header}
    text = json.dumps({names[name]: entry for name, entry in header.items()}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
