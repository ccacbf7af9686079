"""GGUF files of BERT give the vectors of Hugging Face's own implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.gguf.encoder_file import _BLOCK, _BLOCK_NAMES, _NAMES
from splitup_deploy.frontends.source_model import Sizes
from tokenizers import Tokenizer

from splitup.core.errors import InvalidModel
from splitup.decode.texts import make_text_arrays
from tests.deploy.checkpoints import GOLDEN, compute_checkpoint_digest, iter_shapes, make_weights
from tests.deploy.encoders import CASES, LENGTHS, TEXTS
from tests.deploy.ggufs import BLOCKS, quantise, write_gguf
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph

BOUND = 1e-5
SIZES = Sizes(chunk=sum(LENGTHS))
CASE = CASES["bert"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581the", "\u2581caf", "e", "\u2581e"]


def save_bert(
    path: Path,
    metadata: dict[str, Any] | None = None,
    *,
    form: str = "F32",
    widened: bool = False,
    without: str = "pooler.",
) -> None:
    """Write the case as llama.cpp's converter does, matrices in a format or what it stands for."""
    shapes, tensors = dict(iter_shapes(CASE)), {}
    for name, data in make_weights(CASE).items():
        if name.startswith(without) or name.startswith("pooler."):
            continue
        stem, _, kind = name.rpartition(".")
        match = _BLOCK.fullmatch(stem)
        place = f"blk.{match[1]}.{_BLOCK_NAMES[match[2]]}" if match else _NAMES[stem]
        array = np.frombuffer(data, "<f4").reshape(shapes[name])
        is_plain = array.ndim < 2 or array.shape[-1] % BLOCKS.get(form, (1, 0))[0]
        stored, values = quantise(array, kept := "F32" if is_plain else form)
        if widened:
            kept, stored = "F32", values.astype("<f4").tobytes()
        tensors[f"{place}.{kind}"] = (kept, array.shape, stored)
    c = CASE.config
    keys = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        "pooling_type": 1,
    }
    others = [f"\u2581w{number}" for number in range(c["vocab_size"] - len(WORDS))]
    tokens = {
        "model": "bert",
        "pre": "jina-v2-en",
        "tokens": [*WORDS, *others],
        "token_type": [3] * 4 + [1] * (c["vocab_size"] - 4),
        "token_type_count": 2,
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "bos_token_id": 2,
        "seperator_token_id": 3,
    }
    head: dict[str, Any] = {"general.architecture": "bert"}
    head |= {f"bert.{key}": value for key, value in keys.items()}
    head |= {f"tokenizer.ggml.{key}": value for key, value in tokens.items()} | (metadata or {})
    write_gguf(path, {key: value for key, value in head.items() if value is not None}, tensors)


def compute(path: Path) -> np.ndarray:
    """Return the vectors of all texts, [texts, width]."""
    program = load_graph(str(path), SIZES)  # kernels of encoders are in test_encoders.py
    arrays = make_text_arrays(TEXTS)
    given = [arrays[spec.name].tobytes() for spec in program.inputs]
    (data,) = program.run(program.new_state(), given)
    return np.frombuffer(data, np.float32).reshape(len(TEXTS), -1)


def test_vectors_are_those_of_transformers(tmp_path: Path) -> None:
    with np.load(GOLDEN / "encoder_outputs.npz", allow_pickle=False) as golden:
        assert golden["bert/digest"] == compute_checkpoint_digest(CASE), "run make_golden.py"
        wanted = golden["bert/outputs"]
    save_bert(tmp_path / "m.gguf")
    assert relative_error(compute(tmp_path / "m.gguf"), wanted) <= BOUND
    model = load_model(str(tmp_path / "m.gguf"))
    assert model.kind == "text-embedding" and model.text is not None and not model.traced.notes
    assert isinstance(model.text.tokenizer, bytes)
    tokens = Tokenizer.from_str(model.text.tokenizer.decode()).encode("The caf\u00e9").tokens
    assert tokens == ["[CLS]", "the", "caf", "##e", "[SEP]"]


@pytest.mark.long  # in small: above, in float32
def test_quantised_files_stand_for_their_numbers(tmp_path: Path) -> None:
    for widened in (False, True):
        save_bert(tmp_path / f"{widened}.gguf", form="Q8_0", widened=widened)
    given, wanted = (compute(tmp_path / f"{widened}.gguf") for widened in (False, True))
    assert relative_error(given, wanted) <= BOUND


def test_what_a_file_does_not_say_is_said(tmp_path: Path) -> None:
    save_bert(tmp_path / "m.gguf", {"bert.pooling_type": None, "bert.context_length": 32})
    (note,) = load_model(str(tmp_path / "m.gguf")).traced.notes
    assert note == "no pooling_type: a text's vector is the mean of its rows"
    save_bert(tmp_path / "c.gguf", {"bert.pooling_type": 2})
    both = [compute(tmp_path / f"{name}.gguf") for name in "mc"]
    assert relative_error(*both) > 0.01
    np.testing.assert_allclose(np.linalg.norm(both, axis=2), 1, rtol=1e-5)


def test_a_file_without_types_of_tokens_is_read(tmp_path: Path) -> None:
    save_bert(tmp_path / "m.gguf", without="embeddings.token_type")
    assert np.isfinite(compute(tmp_path / "m.gguf")).all()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"bert.pooling_type": 4}, "pooling_type = 4: not supported"),
        ({"bert.attention.causal": True}, "attention.causal = True: not supported"),
        ({"bert.classifier.output_labels": ["a"]}, "classifier.output_labels', which is unknown"),
        ({"tokenizer.ggml.model": "gpt2"}, "another tokenizer than BERT's"),
        ({"bert.attention.head_count": 5}, "5"),
        ({"tokenizer.ggml.tokens": ["a"]}, "has not one token per embedding"),
    ],
)
def test_what_is_refused_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_bert(tmp_path / "m.gguf", metadata)
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path / "m.gguf"))
