"""Encoders give the vectors and scores of Hugging Face's own implementation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.backend.runtime import TaskProgram
from splitup.core.errors import InvalidModel
from splitup.decode.texts import EncodedText, make_text_arrays
from tests.deploy.checkpoints import GOLDEN, compute_checkpoint_digest
from tests.deploy.encoders import CASES, LENGTHS, TEXTS, save_encoder, save_modules
from tests.deploy.execution import CutModel
from tests.deploy.llamas import relative_error

BOUND = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN / "encoder_outputs.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def run(program: TaskProgram, texts: Sequence[EncodedText]) -> np.ndarray:
    """Return what one step says of texts, [texts, width]."""
    arrays = make_text_arrays(texts)
    (data,) = program.run(program.new_state(), [arrays[s.name].tobytes() for s in program.inputs])
    return np.frombuffer(data, np.float32).reshape(len(texts), -1)


@pytest.mark.parametrize("name", CASES)
def test_results_agree_and_do_not_depend_on_the_other_texts(
    name: str, golden: dict[str, Any], tmp_path: Path
) -> None:
    case = CASES[name]
    assert golden[f"{name}/digest"] == compute_checkpoint_digest(case), "run make_golden.py"
    program = load_reference(save_encoder(tmp_path, case), Sizes(chunk=sum(LENGTHS)))
    together = run(program, TEXTS)
    assert relative_error(together, golden[f"{name}/outputs"]) <= BOUND
    for text, wanted in zip(TEXTS, together, strict=True):
        assert run(program, [text]).tobytes() == wanted.tobytes()
        assert relative_error(wanted, golden[f"{name}/outputs"][TEXTS.index(text)]) <= BOUND


def test_a_cut_encoder_gives_equal_bytes(tmp_path: Path) -> None:
    source = save_encoder(tmp_path, CASES["modernbert"])
    cut = CutModel(build(source, 120_000, sizes=Sizes(chunk=40)))
    assert len(cut.manifest.tasks) >= 3 and cut.manifest.kind == "text-embedding"
    (port,) = cut.manifest.outputs
    assert (port.name, port.shape, port.rows) == ("vectors", (40, 32), "R")
    program = load_reference(source, Sizes(chunk=40))
    inputs = {name: array.tobytes() for name, array in make_text_arrays(TEXTS[:3]).items()}
    given = cut.step(cut.new_states(), inputs)["vectors"]
    assert given == run(program, TEXTS[:3]).tobytes()


def test_any_integers_are_safe(tmp_path: Path) -> None:
    """A client may send what it likes: it gets numbers, and no other memory."""
    program = load_reference(save_encoder(tmp_path, CASES["bert"]), Sizes(context=8))
    wanted = run(program, TEXTS[1:2])
    for value in (-(2**31), -1, 0, 9, 2**31 - 1):
        arrays = {
            name: np.full_like(array, value) for name, array in make_text_arrays(TEXTS[:1]).items()
        }
        data = program.run(
            program.new_state(), [arrays[spec.name].tobytes() for spec in program.inputs]
        )
        assert np.isfinite(np.frombuffer(data[0], np.float32)).all()
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
