"""GGUF files: what they compute, what is read from them, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import CompiledModel, build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.decoder.quantised import dequantise
from splitup_deploy.frontends.decoder.step_function import trace_decoder
from splitup_deploy.frontends.gguf.config import read_config
from splitup_deploy.frontends.gguf.header import FORMATS, MAX_ARRAY, Metadata, read_gguf
from splitup_deploy.frontends.gguf.tokenizer import make_tokenizer
from splitup_deploy.frontends.gguf.word_splits import SPLITS
from splitup_deploy.frontends.huggingface.checkpoint import DirectoryWeights
from splitup_deploy.frontends.huggingface.directory import parse_config
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference
from tinygrad.tensor import Tensor
from tokenizers import BertWordPieceTokenizer, Tokenizer

from splitup.backend.compiler.schedule import compile_graph
from splitup.core.errors import InvalidModel
from splitup.cpu.native_kernels import is_supported
from splitup.graph.ir import Graph
from splitup.graph.manifest import get_task_key
from splitup.graph.rules import check_graph, load_graph
from tests.builders import HANG_S
from tests.deploy import moes
from tests.deploy.checkpoints import CASES, save_checkpoint
from tests.deploy.execution import CutModel, CutReference, CutTasks
from tests.deploy.ggufs import (
    ARRAY,
    KINDS,
    encode_text,
    make_tokens,
    save_dense,
    save_gguf,
    write_gguf,
)
from tests.deploy.llamas import compute_logits, relative_error, save_llama
from tests.deploy.steps import as_inputs, feed
from tests.deploy.strange_texts import STRANGE, digest_tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf_blocks.npz"
TOKENS = [5, 7, 1, 30, 2]
LARGE = 10**9


def run(
    compiled: CompiledModel, tokens: list[int], load: Callable[[CompiledModel], CutTasks[Any]]
) -> np.ndarray:
    cut = load(compiled)
    states = cut.new_states()
    rows = []
    for position, token in enumerate(tokens):
        given = as_inputs(compiled.manifest.inputs, token, position)
        rows.append(np.frombuffer(cut.step(states, given)["logits"], np.float32))
    return np.array(rows)


@pytest.mark.long  # in small: cpu/test_decoder_match.py
def test_quantised_blocks_stand_for_what_the_gguf_package_says() -> None:
    golden = np.load(GOLDEN)
    names = {form.name for form in FORMATS.values() if form.elements > 1}
    assert {name.partition("/")[0] for name in golden.files} == names
    for name in names:
        blocks, wanted = golden[f"{name}/blocks"], golden[f"{name}/values"]
        given = dequantise(Tensor(blocks), name).numpy()
        np.testing.assert_array_equal(given, wanted, name)


@pytest.mark.long  # in small: quantised weights above; cutting/test_cut_equals_whole.py
def test_a_whole_precision_file_computes_the_model_and_is_cut(tmp_path: Path) -> None:
    config, weights = save_gguf(tmp_path / "m.gguf")
    compiled = build(str(tmp_path / "m.gguf"), 30_000)
    assert compiled.manifest.kind == "text-generation" and len(compiled.manifest.tasks) > 2
    wanted = compute_logits(config, weights, TOKENS)
    assert relative_error(run(compiled, TOKENS, CutModel), wanted) <= 1e-5


@pytest.mark.usefixtures("float32_caches")
def test_quantised_weights_stay_quantised_and_mixed_formats_work(tmp_path: Path) -> None:
    """Compiled, blocks are in test_quantised.py and cpu/test_decoder_match.py."""
    config, weights = save_gguf(
        tmp_path / "m.gguf",
        {"intermediate_size": 64, "num_hidden_layers": 1},
        forms={"": "Q8_0", "attn_v": "Q4_0", "token_embd": "Q4_0", "ffn_down": "F16"},
    )
    compiled = build(str(tmp_path / "m.gguf"), LARGE)
    (task,) = compiled.manifest.tasks
    whole = sum(array.nbytes for array in weights.values())
    assert task.weights_bytes < 0.6 * whole
    wanted = compute_logits(config, weights, TOKENS)
    assert relative_error(run(compiled, TOKENS, CutReference), wanted) <= 1e-5


def find_blocks(graph: Graph) -> tuple[set[str], set[str]]:
    """Return the quantised matrices of products, and those that products' own code reads."""
    blocks = {
        place: weight.name
        for place, weight in enumerate(graph.weights)
        if weight.spec.dtype == "uint8" and "embed" not in weight.name  # its rows are looked up
    }
    launches = [
        one for one in compile_graph(check_graph(graph), "CPU").launches if one.kind == "native"
    ]
    read = {place.index for one in launches for place in one.places if place.role == "weight"}
    return set(blocks.values()), {name for place, name in blocks.items() if place in read}


@pytest.mark.long  # in small: test_divide.py
def test_pieces_of_quantised_products_have_the_kernels_and_the_bytes_of_the_whole(
    tmp_path: Path,
) -> None:
    """Q8_0, Q4_0 and, divided within its blocks, a table of Q4_K."""
    path = tmp_path / "m.gguf"
    config = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    forms = {"": "Q8_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "token_embd": "Q4_K"}
    save_gguf(path, {**config, "vocab_size": 640}, forms=forms)
    compiled = build(str(path), 75_000, sizes=Sizes(chunk=2))
    labels = " ".join(task.label for task in compiled.manifest.tasks)
    assert all(f"{name} 2 of" in labels for name in ("embed", "attention", "MLP", "head"))
    if is_supported():
        blobs = {blob.key: blob for blob in compiled.blobs}
        pieces = []
        for task in compiled.manifest.tasks:
            graph = load_graph(b"".join(blobs[get_task_key(task.task_id)].open()))
            stored, read = find_blocks(graph)
            assert stored == read, task.label
            pieces += [name.split(".")[-2] for name in stored if "[" in name]
        assert {"qkv_proj", "gate_up_proj", "lm_head"} <= set(pieces)
    whole = load_reference(str(path), Sizes(chunk=2))
    tokens = [5, 639, 0, 30]
    assert run(compiled, tokens, CutModel).tobytes() == feed(whole, tokens).tobytes()


@pytest.mark.parametrize(
    ("family", "config", "forms"),
    [
        ("llama", {**moes.MIXTRAL, "num_hidden_layers": 1}, {}),
        pytest.param(  # other experts, in other forms, are in test_mixtures.py
            "qwen3moe",
            {
                **moes.QWEN3_MOE,
                "mlp_only_layers": [],
                "num_hidden_layers": 1,
                "moe_intermediate_size": 32,
            },
            {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q8_0"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_experts_stay_quantised_and_only_the_chosen_are_looked_up(
    family: str, config: dict[str, Any], forms: dict[str, str], tmp_path: Path
) -> None:
    """Compiled, experts are in test_moe.py, and formats of blocks above."""
    table, weights = save_gguf(tmp_path / "m.gguf", config, family=family, forms=forms)
    wanted = moes.compute_logits(table, weights, TOKENS)
    whole = build(str(tmp_path / "m.gguf"), LARGE, sizes=Sizes(chunk=2))
    given = run(whole, TOKENS, CutReference)
    assert relative_error(given, wanted) <= 1e-5
    (bank,) = whole.manifest.tasks
    dense = sum(array.nbytes for name, array in weights.items() if ".experts." not in name)
    experts = sum(array.nbytes for name, array in weights.items() if ".experts." in name)
    assert bank.weights_bytes < dense + (0.3 if forms else 1.1) * experts + 10_000
    target = 20_000 if forms else 50_000
    cut = build(str(tmp_path / "m.gguf"), target, sizes=Sizes(chunk=2))
    assert len(cut.manifest.tasks) > 2
    assert forms or sum(task.gate is not None for task in cut.manifest.tasks) > 1
    assert run(cut, TOKENS, CutReference).tobytes() == given.tobytes()


@pytest.mark.parametrize(
    ("forms", "metadata", "message"),
    [
        ({"ffn_gate_exps": "Q4_0"}, {}, "'model.layers.0.mlp.experts.gate_proj.up_proj.weight'"),
        ({}, {"qwen3moe.expert_count": 5}, r"'blk\.0\.ffn_gate_\w+.weight' .* is \[6, .*\[5, "),
        ({}, {"qwen3moe.expert_count": None}, "has no num_experts"),
        ({}, {"qwen3moe.expert_feed_forward_length": 16}, r"is \[6, 24, 32\].*\[6, 16, 32\]"),
        ({}, {"qwen3moe.expert_weights_scale": 2.0}, "expert_weights_scale.*unknown"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    forms: dict[str, str], metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {**moes.QWEN3_MOE, "mlp_only_layers": [], "num_hidden_layers": 1}
    path = tmp_path / "m.gguf"
    save_gguf(path, config, family="qwen3moe", forms=forms, metadata=metadata)
    with pytest.raises(InvalidModel, match=message):
        build(str(path), LARGE)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_rows_of_heads_are_reordered_for_llama_only(tmp_path: Path, family: str) -> None:
    draw = np.random.default_rng(1).normal(0, 0.3, (2, 3, 32)).astype(np.float32)
    extra = {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": draw[layer, i, :size]
        for layer in range(2)
        for i, (name, size) in enumerate((("q", 32), ("k", 16), ("v", 16)))
    }
    if family == "qwen3":
        extra = {
            f"model.layers.{layer}.self_attn.{name}_norm.weight": np.ones(8, np.float32)
            for layer in range(2)
            for name in "qk"
        }
    save_gguf(tmp_path / "a.gguf", family=family, extra=extra)
    read = build(str(tmp_path / "a.gguf"), LARGE)
    assert np.isfinite(run(read, TOKENS, CutReference)).all()
    if family == "qwen3":
        return
    _, same = save_gguf(tmp_path / "b.gguf", family="llama")
    _, weights = save_gguf(tmp_path / "c.gguf", family="qwen2")
    assert all((same[name] == weights[name]).all() for name in weights)
    built = [build(str(tmp_path / f"{n}.gguf"), LARGE) for n in "bc"]
    given = [run(compiled, TOKENS, CutReference) for compiled in built]
    np.testing.assert_array_equal(*given)


def test_a_byte_level_tokenizer_becomes_a_tokenizer_json(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf")
    compiled = build(str(tmp_path / "m.gguf"), LARGE)
    text = compiled.manifest.text
    assert text is not None and text.eos_ids == (39,) and text.context == 16
    (blob,) = (b for b in compiled.blobs if b.digest == text.tokenizer_digest)
    tokenizer = Tokenizer.from_str(b"".join(blob.open()).decode())
    assert tokenizer.encode("abc ab<|3|>").tokens == ["abc", "Ġ", "ab", "<|3|>"]
    assert tokenizer.decode([28, 29, 1]) == "abc ab"


def test_llama_3_texts_start_with_bos() -> None:
    metadata = {**make_tokens(40), "tokenizer.ggml.bos_token_id": 38}
    data = make_tokenizer({**metadata, "tokenizer.ggml.pre": "llama-bpe"}, 40)
    assert data is not None
    assert Tokenizer.from_str(data.decode()).encode("ab").ids == [38, 27]
    assert "TemplateProcessing" not in json.dumps(json.loads(make_tokenizer(metadata, 40) or b""))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("glm4", ["Ġab", "'ll", "Ġ", "123", "45", "!=Ċ", "ãģ®a"]),
        ("olmo", ["Ġab", "'ll", "Ġ12345", "!=", "Ċ", "ãģ®a"]),
        ("deepseek-v3", ["Ġab", "'ll", "Ġ", "123", "45", "!=Ċ", "ãģ®", "a"]),
        ("qwen35", ["Ġab", "'ll", "Ġ", "1", "2", "3", "4", "5", "!=Ċ", "ãģ®a"]),
        ("kimi-k2", ["Ġab'll", "Ġ", "123", "45", "!=Ċ", "ãģ®a"]),
        ("tekken", ["Ġab", "'ll", "Ġ", "1", "2", "3", "4", "5", "!=Ċ", "ãģ®a"]),
    ],
)
def test_texts_are_split_as_their_pre_tokenizer_does(pre: str, words: list[str]) -> None:
    metadata = {**make_tokens(40), "tokenizer.ggml.bos_token_id": 38}
    data = make_tokenizer({**metadata, "tokenizer.ggml.pre": pre}, 40)
    assert data is not None
    splitter = Tokenizer.from_str(data.decode()).pre_tokenizer
    assert [word for word, _ in splitter.pre_tokenize_str(" ab'll 12345!=\nのa")] == words


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("kimi-k2", "汉字abCd/\n", ["汉字", "ab", "Cd", "/\n"]),
        ("tekken", "汉字abCd/\n", ["汉字ab", "Cd", "/\n"]),
        ("qwen2", "क्ष!", ["क", "्ष", "!"]),
        ("qwen35", "क्ष!", ["क्ष", "!"]),
    ],
)
def test_han_capitals_and_marks_end_words_as_their_pre_tokenizer_says(
    pre: str, text: str, words: list[str]
) -> None:
    metadata = {**make_tokens(40), "tokenizer.ggml.bos_token_id": 38}
    data = make_tokenizer({**metadata, "tokenizer.ggml.pre": pre}, 40)
    assert data is not None
    parts = Tokenizer.from_str(data.decode()).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in parts] == words


SENTENCEPIECE = json.loads((GOLDEN.parent / "sentencepiece.json").read_text())


def make_scored(name: str, **metadata: Any) -> Tokenizer:
    """Return the tokenizer of a file that has a score for every token."""
    table = {**SENTENCEPIECE[name]["metadata"], **metadata}
    data = make_tokenizer(table, len(table["tokenizer.ggml.tokens"]))
    assert data is not None
    return Tokenizer.from_str(data.decode())


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_texts_in_all_scripts_have_the_tokens_that_sentencepiece_gives(name: str) -> None:
    tokenizer = make_scored(name)
    for text, wanted in SENTENCEPIECE[name]["texts"]:
        if name == "t5" and "\u2581" in text:
            continue  # a space that is written out: the library takes it for the one before a text
        given = tokenizer.encode(text, add_special_tokens=False).ids
        assert given == wanted, text
        if name != "t5":  # which normalises, and has no bytes
            assert tokenizer.decode(given) == text.replace("\u2581", " ")
    with_special = tokenizer.encode("a<s>b").ids
    assert 1 in with_special[1:] and (
        with_special[-1] == 2 if name == "t5" else with_special[0] == 1
    )


def test_special_tokens_of_phi_3_take_the_spaces_behind_them() -> None:
    kinds = list(SENTENCEPIECE["llama"]["metadata"]["tokenizer.ggml.token_type"])
    tokens = list(SENTENCEPIECE["llama"]["metadata"]["tokenizer.ggml.tokens"])
    tokens[-1], kinds[-1] = "<|end|>", 3
    names = {"tokens": tokens, "token_type": kinds}
    change = {f"tokenizer.ggml.{key}": value for key, value in names.items()}
    for family, wanted in (("phi3", "b"), ("llama", " \nb")):
        tokenizer = make_scored("llama", **change, **{"general.architecture": family})
        ids = tokenizer.encode("a<|end|> \nb", add_special_tokens=False).ids
        assert tokenizer.decode(ids[ids.index(len(tokens) - 1) + 1 :]) == wanted


def test_s57_a_tokenizer_has_no_more_merges_than_a_file_has_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all words of two letters up to a length, each merges at each of its places."""
    pieces = [
        "".join(word) for size in range(1, 6) for word in itertools.product("ab", repeat=size)
    ]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata: Metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens],
        "tokenizer.ggml.token_type": [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }
    merges = sum(len(piece) - 1 for piece in pieces)
    for most in (merges, merges - 1):
        monkeypatch.setattr("splitup_deploy.frontends.gguf.tokenizer.MAX_ARRAY", most)
        if most == merges:
            found = json.loads(make_tokenizer(metadata, len(tokens)))
            assert len(found["model"]["merges"]) == merges
        else:
            with pytest.raises(InvalidModel, match=f"merges more than {most} pairs"):
                make_tokenizer(metadata, len(tokens))


def test_a_tokenizer_with_scores_that_is_not_consistent_is_refused() -> None:
    good = SENTENCEPIECE["llama"]["metadata"]
    count, scores = len(good["tokenizer.ggml.tokens"]), good["tokenizer.ggml.scores"]
    kinds = good["tokenizer.ggml.token_type"]
    for key, value, message in (
        ("scores", scores[1:], "lacks scores"),
        ("scores", [*scores[1:], float("nan")], "lacks scores"),
        ("scores", ["a"] * count, "scores are no list of float"),
        ("tokens", [*good["tokenizer.ggml.tokens"][:-1], "a" * 129], "that is too long"),
        ("token_type", [1, *kinds[:-1]], "has not one token per byte"),
        ("token_type", [1] * count, "has not one token per byte"),
        ("add_space_prefix", 1, "says neither yes nor no"),
        ("bos_token_id", count, "a BOS token that does not exist"),
    ):
        with pytest.raises(InvalidModel, match=message):
            make_tokenizer({**good, f"tokenizer.ggml.{key}": value}, count)


def test_words_have_the_longest_tokens_that_a_bert_tokenizer_gives() -> None:
    letters = {letter for text in STRANGE for letter in text.lower() if not letter.isspace()}
    whole = ["the", "it", "don", "def", "x", "http", "user", "123", "é"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *whole, *sorted(letters - {*whole})[::2]]
    words += ["##" + part for part in ("s", "se", "ser", "er", "1", "23", "a", "case", "\u0301")]
    file = BertWordPieceTokenizer({word: place for place, word in enumerate(words)})
    table = {
        "model": "bert",
        "tokens": [
            word if place < 4 else word[2:] if word[:2] == "##" else f"\u2581{word}"
            for place, word in enumerate(words)
        ],
        "token_type": [3] * 4 + [1] * (len(words) - 4),
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "bos_token_id": 2,
        "seperator_token_id": 3,
    }
    data = make_tokenizer({f"tokenizer.ggml.{k}": v for k, v in table.items()}, len(words))
    tokenizer = Tokenizer.from_str(data.decode())
    assert [tokenizer.encode(text).ids for text in STRANGE] == [
        file.encode(text).ids for text in STRANGE
    ]
    pairs = [one.encode("the user", "it") for one in (tokenizer, file)]
    assert pairs[0].ids == pairs[1].ids and pairs[0].type_ids == pairs[1].type_ids


WORD_SPLITS = json.loads((GOLDEN.parent / "word_splits.json").read_text())
# Texts that split as in the models' tokenizer.json files, which llama.cpp only approximates: marks
# belong to letters, cases, \d and \s are those of all scripts, and texts become NFC.
APPROXIMATED = {
    **{pre: {10, 11, 20} for pre in ("tekken", "gpt-4o", "granite-embed-multi-97m")},
    "kimi-k2": {10, 11, 15, 20},
    **{pre: {15} for pre in ("tiny_aya", "youtu")},
    **{pre: {16} for pre in ("deepseek-llm", "deepseek-coder")},
    "superbpe": {6},
    **{pre: {10} for pre in ("olmo", "qwen2", "qwen35", "command-r")},
}


def test_every_way_of_splitting_has_golden_tokens() -> None:
    with_tokens = {SPLITS[name] for name in WORD_SPLITS["digests"]}
    assert with_tokens == {split for split in SPLITS.values() if not split.is_plain}


@pytest.mark.parametrize("pre", WORD_SPLITS["digests"])
def test_strange_texts_have_the_tokens_that_llama_cpp_gives(pre: str) -> None:
    metadata = {**WORD_SPLITS["metadata"], "tokenizer.ggml.pre": pre}
    data = make_tokenizer(metadata, len(metadata["tokenizer.ggml.tokens"]))
    tokenizer = Tokenizer.from_str(data.decode())
    for place, wanted in enumerate(WORD_SPLITS["digests"][pre]):
        if place not in APPROXIMATED.get(pre, ()):
            given = tokenizer.encode(STRANGE[place], add_special_tokens=False).ids
            assert digest_tokens(given) == wanted, STRANGE[place]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "xyz"}, 'tokenizer.ggml.pre is "xyz", which is not known.*--without text'),
        ({"model": "rwkv"}, 'tokenizer.ggml.model is "rwkv", which is not known.*--without text'),
        ({"tokens": ["a"]}, "has not one token per embedding.*--without text"),
    ],
)
def test_a_model_is_compiled_without_a_tokenizer_only_if_asked(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    save_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(InvalidModel, match=message):
        build(str(tmp_path / "m.gguf"), LARGE)
    compiled = build(str(tmp_path / "m.gguf"), LARGE, sizes=Sizes(without="text"))
    assert compiled.manifest.kind == "function" and compiled.manifest.text is None


def test_a_model_is_compiled_without_its_chat_template_only_if_asked(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "{% if %}"})
    with pytest.raises(InvalidModel, match=r"template.*--without chat"):
        build(str(tmp_path / "m.gguf"), LARGE)
    compiled = build(str(tmp_path / "m.gguf"), LARGE, sizes=Sizes(without="chat"))
    assert compiled.manifest.text is not None and compiled.manifest.text.chat is None


_DENSE = {
    "phi3": {},
    "phi3-longrope": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.125, 1.25, 1.5, 2.0, 3.0],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "attention_factor": 1.1875,
        },
    },
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        **{"query_pre_attn_scalar": 16, "final_logit_softcapping": None},
        **{"sliding_window_pattern": 6, "num_hidden_layers": 7},
    },
}


@pytest.mark.parametrize(
    ("name", "context"), [*((name, None) for name in _DENSE), ("phi3-longrope", 20)]
)
def test_gemma_and_phi_have_the_graphs_of_directories(
    name: str, context: int | None, tmp_path: Path
) -> None:
    case = replace(CASES[name], change={**CASES[name].change, **_DENSE[name]})
    save_checkpoint(tmp_path / "m", case)
    save_dense(tmp_path / "m.gguf", case)
    file = load_model(str(tmp_path / "m.gguf"), Sizes(context, 4)).traced.graph
    config = replace(parse_config(case.config, context), unit_norms=False)
    wanted = trace_decoder(config, DirectoryWeights(tmp_path / "m"), 4).read_weights().graph
    assert file.to_bytes() == wanted.to_bytes()


def test_a_large_gemma_divides_queries_by_another_number(tmp_path: Path) -> None:
    change = {"num_hidden_layers": 46, "hidden_size": 8, "intermediate_size": 8}
    case = replace(CASES["gemma2"], change={**CASES["gemma2"].change, **change})
    save_dense(tmp_path / "m.gguf", case)
    file = read_gguf(tmp_path / "m.gguf")
    assert read_config(file, "gemma2", None).attention_scale == 1 / math.sqrt(8 // 4)


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    config, weights = save_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    file = read_gguf(tmp_path / "m.gguf")
    tensors = {
        t.name: (t.format.name, t.shape, data[t.start : t.end]) for t in file.tensors.values()
    }
    factors = np.full(4, 4.0, "<f4")
    tensors["rope_freqs.weight"] = ("F32", (4,), factors.tobytes())
    write_gguf(tmp_path / "m.gguf", file.metadata, tensors)
    plain = build(str(tmp_path / "m.gguf"), LARGE)
    save_gguf(
        tmp_path / "linear.gguf",
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    )
    linear = build(str(tmp_path / "linear.gguf"), LARGE)
    assert plain.model_id == linear.model_id
    given = run(plain, TOKENS, CutReference)
    assert relative_error(given, compute_logits(config, weights, TOKENS)) > 1e-3


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"general.architecture": "mamba"}, "'mamba'"),
        ({"llama.attention.key_length": 2**30}, "4 heads of 1073741824"),
        ({"llama.rope.freq_base": 1e-20}, "rope theta"),
        ({"llama.expert_count": 8}, "num_experts_per_tok"),
        ({"llama.attention.value_length": 4}, "value_length"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.sliding_window": 4}, "4 others"),
        ({"llama.residual_scale": 0.5}, "residual_scale"),
        ({"llama.block_count": 3}, "blk.2"),
        ({"llama.block_count": 1}, "blk.1"),
        ({"split.count": 2}, "one of 2 parts"),
        ({"general.alignment": 48}, "alignment"),
        ({"tokenizer.ggml.tokens": ["a"]}, "one token per embedding"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "unknown tokens"),
        ({"tokenizer.ggml.eos_token_id": 40}, "does not exist"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], problem: str
) -> None:
    save_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(InvalidModel, match=problem):
        build(str(tmp_path / "m.gguf"), LARGE)


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    KINDS["IQ2_XS"] = 17
    try:
        tensors = {"token_embd.weight": ("IQ2_XS", (1, 256), bytes(74))}
        write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    finally:
        del KINDS["IQ2_XS"]
    with pytest.raises(InvalidModel, match="IQ2_XS"):
        read_gguf(tmp_path / "m.gguf")


def test_hostile_headers_are_refused_at_once(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", {"num_hidden_layers": 1})
    path = tmp_path / "bad.gguf"
    data = (tmp_path / "m.gguf").read_bytes()
    huge = struct.pack("<Q", 2**63)
    hostile = {
        "tensors": data[:8] + huge + data[16:],
        "keys": data[:16] + huge + data[24:],
        "text": data[:24] + huge + data[32:],
        "trailing": data + bytes(64),
        "cut": data[:-1],
        "empty": b"",
        "big-endian": data[:4] + struct.pack(">I", 3) + data[8:],
    }
    for name, content in hostile.items():
        path.write_bytes(content)
        start = time.monotonic()
        with pytest.raises(InvalidModel):
            read_gguf(path)
        assert time.monotonic() - start < HANG_S, name


def test_all_arrays_of_a_file_are_bounded_together(tmp_path: Path) -> None:
    path, count = tmp_path / "m.gguf", MAX_ARRAY // 2 + 1
    array = struct.pack("<IIQ", ARRAY, 0, count) + bytes(count)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    path.write_bytes(head + encode_text("a") + array + encode_text("b") + array)
    with pytest.raises(InvalidModel, match=f"more than {MAX_ARRAY} values, one of {count}"):
        read_gguf(path)


def test_a_text_of_an_array_that_ends_behind_the_header_is_refused(tmp_path: Path) -> None:
    for length in (3, 2**20 + 1, 2**63):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + encode_text("a")
        texts = encode_text("ab") + struct.pack("<Q", length) + b"ab"
        (tmp_path / "m.gguf").write_bytes(head + struct.pack("<IIQ", ARRAY, 8, 2) + texts)
        with pytest.raises(InvalidModel, match=r"m\.gguf' (ends within|has a text of)"):
            read_gguf(tmp_path / "m.gguf")


def test_the_tensor_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = write_gguf(path, {}, {name: ("F32", (8,), bytes(32)) for name in ("first", "last")})
    path.write_bytes(data[:-1])
    with pytest.raises(InvalidModel, match=r"m\.gguf' has .* ends before 'last' does"):
        read_gguf(path)


def test_names_are_plain_text(tmp_path: Path) -> None:
    for name in ("a\x1b[31m", "é"):
        write_gguf(tmp_path / "m.gguf", {name: 1}, {})
        with pytest.raises(InvalidModel, match="no plain text"):
            read_gguf(tmp_path / "m.gguf")


def test_the_same_weights_give_the_same_tasks_as_a_hugging_face_directory(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf")
    save_llama(tmp_path / "model")
    given, wanted = (build(str(tmp_path / name), 30_000) for name in ("m.gguf", "model"))
    assert given.manifest.tasks == wanted.manifest.tasks
