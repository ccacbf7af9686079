"""What was reported of other readers of model files, tried here: the table of docs/models.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.gguf.tokenizer import make_tokenizer
from splitup_deploy.frontends.huggingface.tokenizer_file import read_tokenizer
from tokenizers import Tokenizer

from splitup.core.errors import InvalidModel
from tests.deploy.checkpoints import CASES, make_weights, save_checkpoint
from tests.deploy.execution import CutReference
from tests.deploy.ggufs import make_tokens, save_gguf
from tests.deploy.llamas import TOKENIZER, compute_logits, relative_error, save_llama
from tests.deploy.mixtures import CASES as MIXTURES
from tests.deploy.steps import as_inputs

GOLDEN = Path(__file__).parents[1] / "golden"
LARGE = 10**9
TOKENS = [5, 7, 1, 30, 2]
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def run(source: Path) -> np.ndarray:
    compiled = build(str(source), LARGE)
    cut = CutReference(compiled)
    states = cut.new_states()
    rows = []
    for position, token in enumerate(TOKENS):
        given = as_inputs(compiled.manifest.inputs, token, position)
        rows.append(np.frombuffer(cut.step(states, given)["logits"], np.float32))
    return np.array(rows)


def make_table(**change: Any) -> dict[str, Any]:
    """Return the metadata of a small tokenizer, with changes."""
    return make_tokens(40) | {f"tokenizer.ggml.{key}": value for key, value in change.items()}


def read_eos_ids(source: Path) -> tuple[int, ...]:
    text = load_model(str(source)).text
    assert text is not None
    return text.eos_ids


def make_scored() -> Tokenizer:
    """Return a tokenizer of SentencePiece that begins texts with a space."""
    table = json.loads((GOLDEN / "sentencepiece.json").read_text())["llama"]["metadata"]
    data = make_tokenizer(table, len(table["tokenizer.ggml.tokens"]))
    return Tokenizer.from_str(data.decode())


@pytest.mark.parametrize(
    ("added", "wanted"),
    [
        ({30: "<|end_of_text|>", 31: "<|eot_id|>", 32: "<|eom_id|>"}, (30, 31, 32, 39)),
        ({30: "<|return|>", 31: "<|call|>", 32: "<|end|>"}, (30, 31, 39)),
        ({30: "<|end|>"}, (30, 39)),
        ({3: "</s>"}, (39,)),  # a part of a page, in a vocabulary without a special token
    ],
)
def test_a_turn_ends_where_the_file_only_names_the_end_of_a_text(
    added: dict[int, str], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    tokens = make_tokens(40)["tokenizer.ggml.tokens"]
    tokens = [added.get(place, token) for place, token in enumerate(tokens)]
    merges = [] if 3 in added else ["a b"]
    table = make_table(tokens=tokens, merges=merges)
    save_gguf(tmp_path / "m.gguf", {"num_hidden_layers": 1}, metadata=table)
    assert read_eos_ids(tmp_path / "m.gguf") == wanted


def test_the_tokenizer_s_end_counts_beside_that_of_generation_config(tmp_path: Path) -> None:
    save_llama(tmp_path)
    table = {**json.loads(TOKENIZER), "added_tokens": []}
    table["added_tokens"] = [{"id": 5, "content": "<|im_end|>", "special": True, **PLAIN}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    for named in ("<|im_end|>", {"content": "<|im_end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert read_eos_ids(tmp_path) == (3, 5)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<absent>"}')
    assert read_eos_ids(tmp_path) == (3,)


def test_bytes_become_text_where_the_decoder_is_sentencepiece_s(tmp_path: Path) -> None:
    decoders = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}]
    table = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES]},
        "decoder": {"type": "Sequence", "decoders": [*decoders, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": {"a": 0, "\u0120": 1, "b": 2}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    assert Tokenizer.from_str(json.dumps(table)).decode([0, 1, 2]) == "a\u0120b"
    data, _ = read_tokenizer(tmp_path)
    assert isinstance(data, bytes) and Tokenizer.from_str(data.decode()).decode([0, 1, 2]) == "a b"
    # Gemma's has a byte's character in its vocabulary, but splits no text into bytes
    table["pre_tokenizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    assert read_tokenizer(tmp_path)[0] == tmp_path / "tokenizer.json"


def test_texts_of_gemma_4_start_with_bos_whatever_the_file_says() -> None:
    for model, starts in (("gemma4", True), ("gpt2", False)):
        table = make_table(model=model, bos_token_id=38, add_bos_token=False)
        ids = Tokenizer.from_str(make_tokenizer(table, 40).decode()).encode("ab").ids
        assert ids == [38] * starts + [27]


def test_tokens_that_users_defined_are_whole() -> None:
    tokens = make_tokens(40)["tokenizer.ggml.tokens"]
    tokens[30:32] = "<think>", "</think>"
    kinds = [1] * 30 + [4] * 2 + [3] * 8
    data = make_tokenizer(make_table(tokens=tokens, token_type=kinds), 40)
    tokenizer = Tokenizer.from_str(data.decode())
    assert tokenizer.encode("<think>ab</think>").ids == [30, 27, 31]
    assert tokenizer.decode([30, 27, 31], skip_special_tokens=True) == "<think>ab</think>"


def test_a_special_token_is_followed_by_a_space_where_a_text_is() -> None:
    tokenizer = make_scored()
    first, second = (
        tokenizer.encode(text, add_special_tokens=False).tokens for text in ("a", "<s>a")
    )
    assert first[0].startswith("\u2581") and second == ["<s>", *first]


@pytest.mark.parametrize("change", [{"head_dim": 16}, {"num_key_value_heads": 1}])
def test_heads_are_reordered_by_their_own_number_and_size(
    change: dict[str, int], tmp_path: Path
) -> None:
    config, weights = save_gguf(tmp_path / "m.gguf", change)
    wanted = compute_logits(config, weights, TOKENS)
    assert relative_error(run(tmp_path / "m.gguf"), wanted) < 1e-5


def test_a_directory_s_heads_may_have_a_size_of_their_own(tmp_path: Path) -> None:
    weights = save_llama(tmp_path, {"head_dim": 16})
    config = json.loads((tmp_path / "config.json").read_text())
    assert relative_error(run(tmp_path), compute_logits(config, weights, TOKENS)) < 1e-5


def test_accents_are_stripped_where_letters_become_small() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581hokkaido", "\u2581tokyo", "\u2581\u014d"]
    table = {
        **{"model": "bert", "tokens": words, "token_type": [3] * 4 + [1] * 3},
        **{"unknown_token_id": 1, "cls_token_id": 2, "bos_token_id": 2, "seperator_token_id": 3},
    }
    for change, wanted in (({}, [2, 4, 5, 3]), ({"normalizer.strip_accents": False}, [2, 1, 1, 3])):
        metadata = {f"tokenizer.ggml.{key}": value for key, value in {**table, **change}.items()}
        tokenizer = Tokenizer.from_str(make_tokenizer(metadata, len(words)).decode())
        assert tokenizer.encode("Hokkaid\u014d T\u014dky\u014d").ids == wanted


@pytest.mark.long  # in small: of a directory in test_whole_checkpoints.py
@pytest.mark.parametrize("factor", [1, 2])
def test_a_head_beside_a_tied_embedding_is_a_copy_or_counts(factor: int, tmp_path: Path) -> None:
    case = replace(CASES["gemma3"], change={**CASES["gemma3"].change, "tie_word_embeddings": True})
    save_checkpoint(tmp_path, case)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights.pop("lm_head.weight", None)
    save_file(weights, path)
    wanted = run(tmp_path)
    save_file({**weights, "lm_head.weight": factor * weights["model.embed_tokens.weight"]}, path)
    is_equal = np.array_equal(run(tmp_path), wanted)
    assert is_equal == (factor == 1)


def test_a_shard_of_tokens_further_ahead_that_is_absent_is_named(tmp_path: Path) -> None:
    case = MIXTURES["glm4-moe"]
    save_checkpoint(tmp_path, case)
    (tmp_path / "model.safetensors").rename(tmp_path / "all.safetensors")
    table = dict.fromkeys(make_weights(case), "all.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    load_model(str(tmp_path))
    table["model.layers.92.enorm.weight"] = "mtp.safetensors"
    index.write_text(json.dumps({"weight_map": table}))
    with pytest.raises(InvalidModel, match=r"no 'mtp\.safetensors'; its index names it: fetch it"):
        load_model(str(tmp_path))


def test_a_header_that_ends_in_zeros_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for fill, is_good in ((b" " * 8, True), (b"\0" * 8, False)):
        path.write_bytes(
            (size + 8).to_bytes(8, "little") + data[8 : 8 + size] + fill + data[8 + size :]
        )
        if is_good:
            load_model(str(tmp_path))
            continue
        with pytest.raises(InvalidModel, match=r"header of weights file .*model\.safetensors"):
            load_model(str(tmp_path))
