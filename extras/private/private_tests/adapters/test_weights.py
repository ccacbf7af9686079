"""Adapters in PEFT's form: what is read, what is refused, and what the digest names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_tests.adapters.weights import make_random
from safetensors.numpy import save_file
from splitup_private.adapters.weights import get_total_bits, load_adapter, make_adapter

from splitup.core.errors import InvalidInput, InvalidModel

RNG = np.random.default_rng(3)
A = RNG.normal(size=(4, 24)).astype(np.float32)
B = RNG.normal(size=(24, 4)).astype(np.float32)


def save(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8} | config))
    return folder


def name(letter: str) -> str:
    return f"base_model.model.final_hidden.lora_{letter}.weight"


def test_a_folder_is_an_adapter(tmp_path: Path) -> None:
    adapter = load_adapter(save(tmp_path / "poems", {name("A"): A, name("B"): B}))
    assert (adapter.info.name, adapter.info.width, adapter.info.rank) == ("poems", 24, 4)
    hidden = RNG.normal(size=(3, 24))
    np.testing.assert_allclose(adapter.compute(hidden), 2 * hidden @ A.T @ B.T, rtol=1e-12)
    np.testing.assert_allclose(adapter.a @ adapter.a.T, np.eye(4), atol=1e-12)
    lengths = np.linalg.norm(adapter.b, axis=1)
    assert 0.5 <= lengths.max() < 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_digest_names_the_weights(tmp_path: Path, dtype: Any) -> None:
    tensors = {name("A"): A.astype(dtype), name("B"): B.astype(dtype)}
    first = load_adapter(save(tmp_path / "a", tensors))
    again = load_adapter(save(tmp_path / "b", dict(reversed(tensors.items()))))
    other = load_adapter(save(tmp_path / "c", tensors, lora_alpha=7))
    assert first.info.adapter == again.info.adapter != other.info.adapter
    changed = tensors | {name("B"): tensors[name("B")] + dtype(1)}
    assert load_adapter(save(tmp_path / "d", changed)).info.adapter != first.info.adapter


def test_rows_that_others_span_change_nothing() -> None:
    a = np.stack([A[0], A[1], A[0] + A[1], 0 * A[0]])
    adapter = make_adapter(a, B, 1.0, "dependent")
    hidden = RNG.normal(size=24)
    np.testing.assert_allclose(adapter.compute(hidden), B @ (a @ hidden), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("width", "rank"), [(1, 1), (1536, 16), (300, 64)])
def test_products_have_the_bits_that_a_prime_holds(width: int, rank: int) -> None:
    assert 56 <= get_total_bits(make_random(width, rank).info) <= 70


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({name("A"): A}, {}, "no single pair"),
        ({name("A"): A, name("B"): B, "x.lora_A.weight": A}, {}, "no single pair"),
        ({name("A"): A, name("B"): B, "bias": B}, {}, "no single pair"),
        ({name("A"): A, name("B"): B}, {"r": 5}, "r is 5"),
        ({name("A"): A, name("B"): A}, {}, "have to be"),
        ({name("A"): A[:, 0], name("B"): B}, {}, "is no matrix"),
        ({name("A"): A.astype(np.float64), name("B"): B}, {}, "is no matrix"),
        ({name("A"): A * np.inf, name("B"): B}, {}, "not finite"),
        ({name("A"): A, name("B"): 0 * B}, {}, "changes nothing"),
        ({name("A"): A, name("B"): B}, {"r": "4"}, "no numbers"),
        ({name("A"): A, name("B"): B}, {"r": 0}, "no numbers"),
        ({name("A"): A, name("B"): B}, {"lora_alpha": None}, "no numbers"),
        ({name("A"): A, name("B"): B}, {"use_rslora": True}, "not supported"),
        ({name("A"): A, name("B"): B}, {"bias": "all"}, "not supported"),
    ],
)
def test_other_folders_are_refused(
    tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidModel, match=words):
        load_adapter(save(tmp_path, tensors, **config))


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="name a PEFT folder"):
        load_adapter(tmp_path)
    save(tmp_path, {name("A"): A, name("B"): B})
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidModel, match="is not JSON"):
        load_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(InvalidModel, match="no numbers"):
        load_adapter(tmp_path)
    save(tmp_path, {name("A"): A, name("B"): B})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(InvalidModel, match="shorter than its header"):
        load_adapter(tmp_path)


def test_sizes_out_of_bounds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the rank is 1 to 64"):
        make_adapter(np.ones((65, 100)), np.ones((100, 65)), 1.0, "x")
    with pytest.raises(InvalidInput, match="the width at most 8192"):
        make_adapter(np.ones((1, 8193)), np.ones((8193, 1)), 1.0, "x")
