"""GGUF files of encoders give what their directories give, for numbers and for texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.gguf.tokenizer import make_tokenizer
from splitup_deploy.frontends.source_model import Sizes
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from splitup.core.errors import InvalidModel
from splitup.decode.texts import make_text_arrays
from tests.deploy.checkpoints import GOLDEN, compute_checkpoint_digest
from tests.deploy.encoderggufs import CASES, save_encoder_gguf
from tests.deploy.encoders import LENGTHS, TEXTS, save_encoder
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph
from tests.deploy.strange_texts import STRANGE
from tests.parameters import some_of

BOUND = 1e-5
SIZES = Sizes(chunk=sum(LENGTHS))


def compute(path: Path) -> np.ndarray:
    """Return the vectors of all texts, [texts, width]."""
    program = load_graph(str(path), SIZES)  # kernels of encoders are in test_encoders.py
    arrays = make_text_arrays(TEXTS)
    given = [arrays[spec.name].tobytes() for spec in program.inputs]
    (data,) = program.run(program.new_state(), given)
    return np.frombuffer(data, np.float32).reshape(len(TEXTS), -1)


def test_vectors_are_those_of_transformers(tmp_path: Path) -> None:
    with np.load(GOLDEN / "encoder_outputs.npz", allow_pickle=False) as golden:
        assert golden["bert/digest"] == compute_checkpoint_digest(CASES["bert"]), (
            "run make_golden.py"
        )
        wanted = golden["bert/outputs"]
    save_encoder_gguf(tmp_path / "m.gguf", "bert")
    assert relative_error(compute(tmp_path / "m.gguf"), wanted) <= BOUND
    model = load_model(str(tmp_path / "m.gguf"))
    assert model.kind == "text-embedding" and model.text is not None and not model.traced.notes
    assert isinstance(model.text.tokenizer, bytes)
    tokens = Tokenizer.from_str(model.text.tokenizer.decode()).encode("The caf\u00e9").tokens
    assert tokens == ["[CLS]", "the", "caf", "##e", "[SEP]"]


@pytest.mark.parametrize("name", some_of(CASES, "roberta", "distilbert-ranker", "modernbert"))
def test_a_file_gives_what_its_directory_gives(name: str, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "m.gguf"
    save_encoder_gguf(path, name)
    wanted = compute(Path(save_encoder(tmp_path, case)))
    given = load_model(str(path))
    assert given.kind == ("text-embedding" if case.pooling else "text-ranking")
    if name == "modernbert-ranker":  # the classes' own default is another one
        (note,) = given.traced.notes
        assert note == "no classifier.pooling_type: a score is of the mean of a text's rows"
    else:
        assert not given.traced.notes
    assert relative_error(compute(path), wanted) <= BOUND


@pytest.mark.parametrize(
    "name", some_of(["bert", "xlm-roberta-ranker", "modernbert"], "modernbert")
)
def test_quantised_files_stand_for_their_numbers(name: str, tmp_path: Path) -> None:
    for widened in (False, True):
        save_encoder_gguf(tmp_path / f"{widened}.gguf", name, form="Q8_0", widened=widened)
    given, wanted = (compute(tmp_path / f"{widened}.gguf") for widened in (False, True))
    assert relative_error(given, wanted) <= BOUND


def test_what_pools_a_ranker_s_rows_is_read(tmp_path: Path) -> None:
    for number, name in ((1, "m"), (2, "c")):
        change = {"modern-bert.classifier.pooling_type": number, "modern-bert.pooling_type": 4}
        save_encoder_gguf(tmp_path / f"{name}.gguf", "modernbert-ranker", change)
    mean, first = (compute(tmp_path / f"{name}.gguf") for name in "mc")
    assert mean.shape == first.shape == (len(TEXTS), 1) and relative_error(first, mean) > 0.01


def test_a_head_beside_a_pooling_type_is_left_out(tmp_path: Path) -> None:
    save_encoder_gguf(tmp_path / "m.gguf", "xlm-roberta-ranker", {"bert.pooling_type": 2})
    model = load_model(str(tmp_path / "m.gguf"))
    assert model.kind == "text-embedding"
    (note,) = model.traced.notes
    assert "'cls.weight' and 3 others" in note and note.endswith("of a head for another use")


def test_what_a_file_does_not_say_is_said(tmp_path: Path) -> None:
    save_encoder_gguf(
        tmp_path / "m.gguf", "bert", {"bert.pooling_type": None, "bert.context_length": 32}
    )
    (note,) = load_model(str(tmp_path / "m.gguf")).traced.notes
    assert note == "no pooling_type: a text's vector is the mean of its rows"
    save_encoder_gguf(tmp_path / "c.gguf", "bert", {"bert.pooling_type": 2})
    both = [compute(tmp_path / f"{name}.gguf") for name in "mc"]
    assert relative_error(*both) > 0.01
    np.testing.assert_allclose(np.linalg.norm(both, axis=2), 1, rtol=1e-5)


def test_a_file_without_types_of_tokens_is_read(tmp_path: Path) -> None:
    save_encoder_gguf(tmp_path / "m.gguf", "bert", without="token_types.")
    assert np.isfinite(compute(tmp_path / "m.gguf")).all()


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def train_roberta() -> tuple[Tokenizer, dict[str, Any]]:
    """Return a tokenizer as RoBERTa's, and what llama.cpp's converter writes of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=letters)
    tokenizer.train_from_iterator([*STRANGE, *[text[1:] for text in STRANGE]], trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokenizer, {
        "model": "gpt2",
        "pre": "roberta-bpe",
        "tokens": tokens,
        "token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "merges": [" ".join(pair) for pair in model["merges"]],
    }


def make_xlm_roberta() -> tuple[Tokenizer, dict[str, Any]]:
    """Return a tokenizer as transformers makes XLM-RoBERTa's, and what the converter writes."""
    found = json.loads((GOLDEN / "sentencepiece.json").read_text())["t5"]["metadata"]
    table = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}
    names = ["<s>", "<pad>", "</s>", "<unk>", *table["tokens"][3:], "<mask>"]
    scores = [0.0] * 4 + table["scores"][3:] + [0.0]
    tokenizer = Tokenizer(models.Unigram(list(zip(names, scores, strict=True)), unk_id=3))
    charsmap = bytes(number & 255 for number in table["precompiled_charsmap"])
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(charsmap),
            normalizers.Strip(left=False),
            normalizers.Replace(Regex(" {2,}"), "\u2581"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [AddedToken(name, lstrip=name == "<mask>") for name in SPECIAL if name != "<unk>"]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    kinds = [3, 3, 3, 2] + [1] * (len(names) - 5) + [3]
    return tokenizer, {
        **table,
        **{"tokens": names, "scores": scores, "token_type": kinds},
        **{"add_space_prefix": True, "remove_extra_whitespaces": True},
    }


@pytest.mark.parametrize("make", [train_roberta, make_xlm_roberta])
def test_strange_texts_and_pairs_have_the_original_s_tokens(
    make: Callable[[], tuple[Tokenizer, dict[str, Any]]],
) -> None:
    tokenizer, table = make()
    around = {"bos_token_id": 0, "eos_token_id": 2, "seperator_token_id": 2}
    around |= dict.fromkeys(("add_bos_token", "add_eos_token", "add_sep_token"), True)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**table, **around}.items()}
    metadata["general.architecture"] = "bert"
    made = Tokenizer.from_str(make_tokenizer(metadata, len(table["tokens"])).decode())
    for text in (*STRANGE, "a <mask> b", "a</s>b"):
        assert made.encode(text).ids == tokenizer.encode(text).ids, text
        assert made.encode(text, "a b").ids == tokenizer.encode(text, "a b").ids, text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("roberta", [38, 0, 39, 39, 1, 39]),
        ("modernbert", [38, 0, 39, 1, 39]),
        ("xlm-roberta-ranker", [0, 3, 2, 2, 3, 2]),
        ("distilbert", [2, 1, 3, 1, 3]),
    ],
)
def test_what_stands_around_texts_is_known_without_the_file(
    name: str, wanted: list[int], tmp_path: Path
) -> None:
    separated = name == "distilbert"  # whose files may say no, which counts for no text alone
    change = {"tokenizer.ggml.add_sep_token": False} if separated else {}
    save_encoder_gguf(tmp_path / "m.gguf", name, change)
    text = load_model(str(tmp_path / "m.gguf")).text
    assert text is not None and isinstance(text.tokenizer, bytes)
    found = Tokenizer.from_str(text.tokenizer.decode()).encode("a", "b")
    assert found.ids == wanted
    assert found.type_ids[:3] == [0, 0, 0] and found.type_ids[-2:] == [1, 1]


LABELS = "classifier.output_labels"


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("bert", {"bert.pooling_type": 3}, "pooling_type = 3: not supported"),
        ("bert", {"bert.pooling_type": 4}, "no tensor 'cls.weight': llama.cpp's converter drops"),
        ("bert", {"bert.attention.causal": True}, "attention.causal = True: not supported"),
        ("bert", {f"bert.{LABELS}": ["a", "b"]}, "a reranker has one"),
        ("bert", {"bert.embedding_length_out": 8}, "embedding_length_out', which is unknown"),
        ("bert", {"bert.attention.head_count": 5}, "5"),
        ("bert", {"tokenizer.ggml.tokens": ["a"]}, "has not one token per embedding"),
        ("bert", {"tokenizer.ggml.model": "rwkv"}, "which is not known"),
        ("modernbert", {"modern-bert.rope.scaling.type": "yarn"}, "'yarn': not supported"),
        ("modernbert", {"modern-bert.attention.sliding_window": None}, "no modern-bert.attention"),
        ("modernbert", {"modern-bert.hidden_activation": "mish"}, "hidden_activation = 'mish'"),
        ("modernbert", {"tokenizer.ggml.bos_token_id": 40}, "a BOS token that does not exist"),
    ],
)
def test_what_is_refused_is_named(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_encoder_gguf(tmp_path / "m.gguf", name, metadata)
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path / "m.gguf"))


def test_a_ranker_without_the_layer_that_the_converter_drops_is_refused(tmp_path: Path) -> None:
    save_encoder_gguf(tmp_path / "m.gguf", "bert-ranker", without="cls.weight")
    with pytest.raises(InvalidModel, match="give the directory that it was made from"):
        load_model(str(tmp_path / "m.gguf"))
