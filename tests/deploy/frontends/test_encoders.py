"""Encoders give the vectors and scores of Hugging Face's own implementation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from splitup_deploy.calibration.variant_runs import make_steps
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.decode.texts import EncodedText, make_text_arrays
from tests.deploy.checkpoints import GOLDEN, compute_checkpoint_digest
from tests.deploy.encoders import CASES, LENGTHS, SAVED, TEXTS, save_encoder, save_modules
from tests.deploy.execution import CutModel
from tests.deploy.llamas import relative_error
from tests.parameters import some_of

BOUND = 1e-5
SIZES = Sizes(chunk=sum(LENGTHS))


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "encoder_outputs.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TaskProgram]:
    """Compile the checkpoint of a case once; a step has room for all texts."""

    @cache
    def compile_case(name: str) -> TaskProgram:
        source = save_encoder(tmp_path_factory.mktemp(name), CASES[name])
        return load_reference(source, SIZES)

    return compile_case


def as_inputs(program: TaskProgram, texts: Sequence[EncodedText]) -> list[bytes]:
    arrays = make_text_arrays(texts)
    return [arrays[spec.name].tobytes() for spec in program.inputs]


def run(program: TaskProgram, texts: Sequence[EncodedText]) -> np.ndarray:
    """Return what one step says of texts, [texts, width]."""
    (data,) = program.run(program.new_state(), as_inputs(program, texts))
    return np.frombuffer(data, np.float32).reshape(len(texts), -1)


@pytest.mark.parametrize("name", some_of(CASES, "bert", "distilbert-ranker"))
def test_results_agree_and_do_not_depend_on_the_other_texts(
    name: str, golden: dict[str, Any], programs: Callable[[str], TaskProgram]
) -> None:
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(CASES[name]), "run make_golden.py"
    program = programs(name)
    together = run(program, TEXTS)
    assert relative_error(together, golden[f"{name}/outputs"]) <= BOUND
    for text, wanted in zip(TEXTS, together, strict=True):
        assert run(program, [text]).tobytes() == wanted.tobytes()
        assert relative_error(wanted, golden[f"{name}/outputs"][TEXTS.index(text)]) <= BOUND
    groups = [as_inputs(program, group) for group in (TEXTS[:2], TEXTS[2:3], TEXTS[3:])]
    given = program.run_together([(program.new_state(), group) for group in groups])
    assert b"".join(data for (data,) in given) == together.tobytes()


@pytest.mark.parametrize("name", some_of(CASES, "bert", "modernbert"))
def test_every_version_s_configuration_is_the_same_model(name: str, tmp_path: Path) -> None:
    source = save_encoder(tmp_path, CASES[name])
    wanted = load_model(source).traced.graph.to_bytes()
    versions = json.loads(SAVED.read_text())
    assert len(versions) == 2, "run make_saved.py"
    for saved in versions.values():
        config = {**saved[name], "architectures": [CASES[name].architecture]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_model(source).traced.graph.to_bytes() == wanted


def test_old_names_and_other_heads(tmp_path: Path) -> None:
    """A checkpoint of 2019, with a head that fills in words."""
    source = save_encoder(tmp_path, CASES["bert"])
    wanted = load_model(source).traced.graph.to_bytes()
    path = tmp_path / "model.safetensors"
    old = {}
    for name, array in load_file(path).items():
        name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        old[f"bert.{name}"] = array
    others = {
        "cls.predictions.bias": np.ones(40, np.float32),
        "bert.embeddings.position_ids": np.arange(32)[None],
    }
    save_file({**old, **others}, path)
    found = load_model(source)
    assert found.traced.graph.to_bytes() == wanted
    assert [note.partition(", ")[2] for note in found.traced.notes] == [
        "of a head for another use",
        "which are counted here",
    ]
    save_file({**old, "bert.encoder.layer.2.output.dense.bias": np.ones(32, np.float32)}, path)
    with pytest.raises(InvalidModel, match=r"'encoder\.layer\.2\.output\.dense\.bias' for which"):
        load_model(source)


def test_calibration_computes_with_whole_texts(tmp_path: Path) -> None:
    compiled = build(save_encoder(tmp_path, CASES["bert"]), 10**8)
    first, second, third = make_steps(compiled.manifest, 3, [5, 6], seed=1)
    assert first == as_bytes(EncodedText((5, 6)))
    for number, step in enumerate((second, third), 2):
        tokens = np.frombuffer(step[0], np.int32)
        assert step == as_bytes(EncodedText(tuple(map(int, tokens)))) and len(tokens) == number


def as_bytes(text: EncodedText) -> list[bytes]:
    return [array.tobytes() for array in make_text_arrays([text]).values()]


@pytest.mark.long  # in small: cutting/test_cut_equals_whole.py
def test_a_cut_encoder_gives_equal_bytes(
    programs: Callable[[str], TaskProgram], tmp_path: Path
) -> None:
    program = programs("roberta")
    cut = CutModel(build(save_encoder(tmp_path, CASES["roberta"]), 100_000, sizes=SIZES))
    assert len(cut.manifest.tasks) >= 2 and cut.manifest.kind == "text-embedding"
    (port,) = cut.manifest.outputs
    assert (port.name, port.shape, port.rows) == ("vectors", (sum(LENGTHS), 32), "R")
    inputs = {name: array.tobytes() for name, array in make_text_arrays(TEXTS[:3]).items()}
    assert cut.step(cut.new_states(), inputs)["vectors"] == run(program, TEXTS[:3]).tobytes()


def test_any_integers_are_safe(programs: Callable[[str], TaskProgram]) -> None:
    """A client may send what it likes: it gets numbers, and no other memory."""
    program = programs("bert")
    wanted = run(program, TEXTS[1:2])
    for value in (-(2**31), -1, 0, 9, 2**31 - 1):
        inputs = [
            np.full(len(data) // 4, value, np.int32).tobytes()
            for data in as_inputs(program, TEXTS[:1])
        ]
        (data,) = program.run(program.new_state(), inputs)
        assert np.isfinite(np.frombuffer(data, np.float32)).all()
    assert run(program, TEXTS[1:2]).tobytes() == wanted.tobytes()


def test_a_default_is_said(tmp_path: Path) -> None:
    source = save_encoder(tmp_path, CASES["bert"])
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    model = load_model(source)
    assert model.text is not None and model.text.context == 9
    assert [note.partition(":")[0] for note in model.traced.notes] == [
        "texts of up to 9 tokens; the model has 32 positions, see --context",
        "left out",
        "its authors begin texts with these, nothing here does",
    ]
    model = load_model(source, Sizes(context=20, chunk=64))
    assert model.text is not None and model.text.context == 20
    assert model.traced.graph.inputs[0].shape == (64,)
    (tmp_path / "modules.json").unlink()
    assert any("mean of its rows" in note for note in load_model(source).traced.notes)
    with pytest.raises(InvalidModel, match="does not hold a text of 20; give a --chunk from 20"):
        load_model(source, Sizes(context=20, chunk=19))
    with pytest.raises(InvalidModel, match="context 33 is not possible"):
        load_model(source, Sizes(context=33))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act = 'mish'; supported: gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"rope_theta": 10.0}, "'rope_theta', which means nothing"),
        ({"num_attention_heads": 5}, "do not divide"),
        ({"architectures": ["BertForMaskedLM"]}, None),
        ({"architectures": ["BertForQuestionAnswering"]}, "is not supported"),
        ({"architectures": ["BertForSequenceClassification"]}, "has 2 labels"),
    ],
)
def test_configurations_that_are_refused(
    change: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    source = save_encoder(tmp_path, CASES["bert"])
    (tmp_path / "config.json").write_text(json.dumps({**CASES["bert"].config, **change}))
    if message is None:
        (tmp_path / "modules.json").unlink()
        message = "without modules.json"
    with pytest.raises(InvalidModel, match=message):
        load_model(source)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", "{}", "supported: Transformer, Pooling"),
        ("modules.json", "[1]", "no list of modules"),
        ("modules.json", '[{"type": "x.Transformer", "path": "../x"}]', "outside the model's"),
        ("modules.json", "[" * 100_000, "no list of modules"),
        ("1_Pooling/config.json", '{"pooling_mode": ["cls", "mean"]}', "pools by cls, mean"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "pooling_mode_max_tokens"),
        ("1_Pooling/config.json", "{}", "pools by nothing"),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
        ("sentence_bert_config.json", '{"max_seq_length": "9"}', "max_seq_length"),
        ("tokenizer.json", "[]", "no JSON object"),
    ],
)
def test_files_beside_the_weights_that_are_refused(
    file: str, text: str, message: str, tmp_path: Path
) -> None:
    source = save_encoder(tmp_path, CASES["bert"])
    (tmp_path / file).write_text(text)
    with pytest.raises(InvalidModel, match=message):
        load_model(source)


def test_a_module_between_the_vector_and_the_user_is_refused(tmp_path: Path) -> None:
    source = save_encoder(tmp_path, CASES["bert"])
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2] = {
        "idx": 2,
        "name": "2",
        "path": "2_Dense",
        "type": "sentence_transformers.models.Dense",
    }
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InvalidModel, match="Transformer, Pooling, Dense; supported"):
        load_model(source)
    save_modules(tmp_path, "cls", is_normalised=False)
    assert load_model(source).kind == "text-embedding"


def test_a_tokenizer_with_other_token_types_is_refused(tmp_path: Path) -> None:
    source = save_encoder(tmp_path, CASES["bert-ranker"])
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"model_input_names": ["input_ids", "token_type_ids"]}')
    assert load_model(source).kind == "text-ranking"
    path.write_text('{"model_input_names": ["input_ids", "attention_mask"]}')
    with pytest.raises(InvalidModel, match="no token_type_ids"):
        load_model(source)


def test_a_configuration_alone_shows_how_it_would_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CASES["modernbert-ranker"].config))
    compiled = build(str(path), 10**9)
    assert compiled.manifest.kind == "text-ranking" and not compiled.is_complete
