"""Write what Hugging Face's models compute on small random checkpoints.

These are the cases of ``tests/deploy/checkpoints.py`` (in ``logits.npz``), of
``tests/deploy/variations.py`` (in ``variation_logits.npz``, and the names and shapes of their
weights in ``variation_shapes.json``),
``tests/deploy/mixtures.py`` (in ``mixture_logits.npz``), of ``tests/deploy/hybrids.py`` (in
``hybrid_logits.npz``), of ``tests/deploy/towers.py`` (in ``tower_logits.npz``, with what the tower
for images makes of ``towers.IMAGE``; in ``image_logits.npz``, of a prompt with images) and of
``tests/deploy/encoders.py`` (in ``encoder_outputs.npz``).

Run it again after changing a checkpoint, in an environment of its own:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers
    PYTHONPATH=. /tmp/golden/bin/python tests/deploy/golden/make_golden.py [FILE ...]

A file gets, for every case, float32 logits after every token, computed at once (prefill)
and one token at a time, and the digest of the checkpoint they belong to.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers.image_utils import load_image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.deploy import encoders, hybrids, mixtures, moes, towers, unusual, variations
from tests.deploy.checkpoints import (
    CASES,
    GOLDEN,
    TOKENS,
    Case,
    compute_checkpoint_digest,
    save_checkpoint,
)


def compute_logits(
    case: Case, save: Callable[[Path], None] | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return logits [tokens, vocab] of one pass, and of one pass per token with a cache.

    ``save`` writes another checkpoint of the case.
    """
    with tempfile.TemporaryDirectory() as folder:
        if save is None:
            save_checkpoint(Path(folder), case)
        else:
            save(Path(folder))
        model, report = getattr(transformers, case.architecture).from_pretrained(
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


TOWERS, ENCODERS, IMAGES = "tower_logits.npz", "encoder_outputs.npz", "image_logits.npz"
NEXT = 8  # tokens after a prompt with images
FILES: dict[str, Mapping[str, Case]] = {
    "logits.npz": CASES,
    "variation_logits.npz": variations.CASES,
    "mixture_logits.npz": mixtures.CASES,
    "hybrid_logits.npz": hybrids.CASES,
    "unusual_logits.npz": unusual.CASES,
}


def list_shapes(case: Case) -> dict[str, list[int]]:
    """Return the names and shapes of the weights that the library saves."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(case.config))
        kind = getattr(transformers, case.architecture)
        model = kind(transformers.AutoConfig.from_pretrained(folder))
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


def write(file: Path, cases: Mapping[str, Case]) -> None:
    """Compute and write all cases of a file."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, case in cases.items():
        whole, steps = compute_logits(case)
        gap = float(np.linalg.norm(whole - steps) / np.linalg.norm(whole))
        spread = float(np.abs(whole).max())
        print(f"{name}: prefill against steps {gap:.1e}, largest logit {spread:.2f}")
        arrays[f"{name}/prefill"] = whole.astype("<f4")
        arrays[f"{name}/steps"] = steps.astype("<f4")
        arrays[f"{name}/digest"] = np.array(compute_checkpoint_digest(case))
    if "gpt-oss" in cases:
        arrays["gpt-oss-mxfp4"], _ = compute_logits(cases["gpt-oss"], variations.save_mxfp4)
    np.savez_compressed(file, **arrays)
    print(f"{file.stat().st_size} bytes")


def write_towers(file: Path) -> None:
    """Compute and write the logits of text towers, [tokens, vocab] of one pass."""
    arrays = {}
    for name in towers.CASES:
        if not hasattr(transformers, name):  # the name in code that comes with a model
            continue
        with tempfile.TemporaryDirectory() as folder:
            names = towers.OLD if name.startswith("Llama4") else towers.NEW
            towers.save_tower(Path(folder), name, names)
            model, report = transformers.AutoModelForImageTextToText.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        missing = [key for key in report["missing_keys"] if "language" in key or "head" in key]
        assert type(model).__name__ == name
        assert not [key for key in missing if "vision" not in key], missing
        tokens = torch.tensor([moes.TOKENS if "VLMoe" in name else TOKENS])
        with torch.no_grad():
            arrays[name] = model.eval()(input_ids=tokens, use_cache=False).logits[0].numpy()
    with tempfile.TemporaryDirectory() as folder:
        towers.save_vision(Path(folder), towers.NEW)
        model, report = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not [key for key in report["missing_keys"] if "head" not in key], report
    with torch.no_grad():
        found = model.eval().get_image_features(torch.tensor(towers.IMAGE[None]))
    arrays["vision"] = found.pooler_output[0].numpy()
    np.savez_compressed(file, **arrays)


def write_images(file: Path) -> None:
    """Compute what Gemma 3 makes of a prompt with images, from their files on.

    ids [tokens], pixels [images, 3, height, width], logits [tokens, vocab], and the tokens that
    follow, chosen greedily.
    """
    with tempfile.TemporaryDirectory() as folder:
        towers.save_images(Path(folder), towers.NEW)
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        names = dict(
            zip(("boi_token", "image_token", "eoi_token"), towers.IMAGE_TOKENS, strict=True)
        )
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", extra_special_tokens=names
        )
        size, half = {"height": 56, "width": 56}, [0.5, 0.5, 0.5]
        reader = Gemma3ImageProcessorPil(size=size, image_mean=half, image_std=half)
        processor = transformers.Gemma3Processor(reader, tokenizer, image_seq_length=4)
        photos = []
        for number, data in enumerate(towers.make_photos()):
            path = Path(folder) / f"{number}"
            path.write_bytes(data)
            photos.append(load_image(str(path)))
        given = processor(text=towers.PHOTO_PROMPT, images=photos, return_tensors="pt")
    pixels = given["pixel_values"]
    ids, types = given["input_ids"], given["token_type_ids"]
    chosen: list[int] = []
    with torch.no_grad():
        for _ in range(NEXT):
            found = model(
                input_ids=ids, token_type_ids=types, pixel_values=pixels, use_cache=False
            ).logits
            if not chosen:
                prompt, logits = ids[0].numpy(), found[0].numpy()
            chosen.append(int(found[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([chosen[-1:]])], dim=1)
            types = torch.cat([types, torch.zeros((1, 1), dtype=types.dtype)], dim=1)
    np.savez_compressed(file, ids=prompt, pixels=pixels.numpy(), logits=logits, tokens=chosen)


def write_encoders(file: Path) -> None:
    """Compute and write what encoders say of ``encoders.TEXTS``, padded into one batch."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    longest = max(encoders.LENGTHS)
    mask = torch.tensor(
        [[place < length for place in range(longest)] for length in encoders.LENGTHS]
    )
    for name, case in encoders.CASES.items():
        pad = case.config["pad_token_id"]
        rows = [[*text.tokens, *[pad] * (longest - len(text.tokens))] for text in encoders.TEXTS]
        batch = {"input_ids": torch.tensor(rows), "attention_mask": mask.long()}
        if case.model_type == "bert":
            types = [[*text.types, *[0] * (longest - len(text.types))] for text in encoders.TEXTS]
            batch["token_type_ids"] = torch.tensor(types)
        kind = "AutoModel" if case.pooling else "AutoModelForSequenceClassification"
        with tempfile.TemporaryDirectory() as folder:
            encoders.save_encoder(Path(folder), case)
            model, report = getattr(transformers, kind).from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        missing = [key for key in report["missing_keys"] if "pooler" not in key]
        assert not missing and not report["unexpected_keys"], report
        with torch.no_grad():
            outputs = model.eval()(**batch)
            if case.pooling is None:
                result = outputs.logits
            else:
                x, keep = outputs.last_hidden_state, mask.unsqueeze(2).float()
                result = x[:, 0] if case.pooling == "cls" else (x * keep).sum(1) / keep.sum(1)
                if case.is_normalised:
                    result = torch.nn.functional.normalize(result, dim=1)
        print(f"{name}: largest value {float(result.abs().max()):.2f}")
        arrays[f"{name}/outputs"] = result.numpy().astype("<f4")
        arrays[f"{name}/digest"] = np.array(compute_checkpoint_digest(case))
    np.savez_compressed(file, **arrays)


if __name__ == "__main__":
    for name in sys.argv[1:] or (*FILES, TOWERS, IMAGES, ENCODERS):
        if name == TOWERS:
            write_towers(GOLDEN / TOWERS)
        elif name == IMAGES:
            write_images(GOLDEN / IMAGES)
        elif name == ENCODERS:
            write_encoders(GOLDEN / ENCODERS)
        else:
            if FILES[name] is variations.CASES:
                shapes = {case: list_shapes(one) for case, one in variations.CASES.items()}
                variations.SHAPES.write_text(json.dumps(shapes, indent=1) + "\n")
            write(GOLDEN / name, FILES[name])
