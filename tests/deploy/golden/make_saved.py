"""Write how Hugging Face's library saves the small random checkpoints of all families.

Run it in the environment that ``make_golden.py`` describes, and again in one with the oldest
version that still has a family:

    PYTHONPATH=. /tmp/golden/bin/python tests/deploy/golden/make_saved.py [CASE ...]

``saved.json`` gets, for this version and every case, the config.json and the names of weights that
are not those of the checkpoint; ``saved_encoders.json`` gets the config.json of every encoder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.deploy import encoders
from tests.deploy.checkpoints import TOKENS
from tests.deploy.saved import CASES, SAVED, save_case


def digest(directory: Path) -> dict[str, str]:
    """Return a digest of every weight's values, by name."""
    return {
        name: hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


def get_kind(directory: Path) -> Any:
    """Return the class of a checkpoint's model; raises AttributeError if this version has none."""
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    return getattr(transformers, name)


def compute(directory: Path) -> torch.Tensor | None:
    """Return a model's logits, None if it cannot be loaded."""
    try:
        model = get_kind(directory).from_pretrained(directory, dtype="auto")
    except RuntimeError:  # weights of another shape
        return None
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([TOKENS[:8]]), use_cache=False).logits
    return logits


def describe(name: str) -> dict[str, Any]:
    """Load a case and save it again; return what that changed.

    Fields that this version only carries along are left out: a model made with it has none.
    """
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder) / "old", Path(folder) / "new"
        save_case(name, old)
        model = get_kind(old).from_pretrained(old, dtype="auto")
        model.save_pretrained(new)
        path, wanted = new / "config.json", compute(old)
        config = json.loads(path.read_text())
        assert wanted is not None
        for key in list_carried(model.config, config):
            path.write_text(json.dumps({k: v for k, v in config.items() if k != key}))
            given = compute(new)
            if given is not None and torch.equal(given, wanted):
                del config[key]
        before, after = digest(old), {value: key for key, value in digest(new).items()}
    renamed = {key: after[value] for key, value in before.items() if after[value] != key}
    assert len(after) == len(before), name
    return {"config": config, "renamed": renamed}


def list_carried(config: Any, saved: dict[str, Any]) -> list[str]:
    """Return the saved fields that the class of the configuration does not declare."""
    kind: Any = type(config)
    if not dataclasses.is_dataclass(kind):  # a version before 5
        return []
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map.values())
    names |= {"architectures", "dtype", "model_type", "transformers_version"}
    return [key for key in saved if key not in names]


def describe_encoders() -> dict[str, Any]:
    """Return the config.json of every encoder as this version saves it."""
    found = {}
    for name, case in encoders.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            old, new = Path(folder) / "old", Path(folder) / "new"
            encoders.save_encoder(old, case)
            model = getattr(transformers, case.architecture).from_pretrained(old, dtype="auto")
            model.save_pretrained(new)
            found[name] = json.loads((new / "config.json").read_text())
    return found


def main() -> None:
    """Describe the cases that this version of the library has, or only those that are named."""
    found = {}
    for name in sys.argv[1:] or CASES:
        try:
            found[name] = describe(name)
        except (ValueError, ImportError, KeyError, AttributeError) as error:
            print(f"{name}: {str(error)[:200]}")
    add_to(SAVED, found)
    if not sys.argv[1:]:
        add_to(encoders.SAVED, describe_encoders())


def add_to(path: Path, found: dict[str, Any]) -> None:
    """Write what this version gives, beside what other versions gave."""
    table = json.loads(path.read_text()) if path.is_file() else {}
    table[transformers.__version__] = table.get(transformers.__version__, {}) | found
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
