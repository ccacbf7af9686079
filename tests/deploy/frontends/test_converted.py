"""GGUF files whose converter splits or renames weights give the logits of Hugging Face's models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.gguf.gemma4_config import read_turned
from splitup_deploy.frontends.gguf.header import read_gguf
from splitup_deploy.frontends.source_model import Sizes

from splitup.core.errors import InvalidModel
from tests.deploy.checkpoints import GOLDEN, TOKENS, Case, iter_shapes, save_checkpoint
from tests.deploy.converted import CASES, FAMILIES, save_converted
from tests.deploy.hybridggufs import save_hybrid
from tests.deploy.llamas import relative_error
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import feed
from tests.parameters import some_of

BOUND = 1e-5
SIZES = Sizes(context=32, chunk=1)  # files of models without positions say a million
# whose cases have what no file says
UNSAID = (
    *("smollm3", "granite-4-dense", "cohere2", "gpt-oss", "gemma4-e", "llama4"),
    *("mistral4", "phimoe"),
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("logits.npz", "variation_logits.npz"):
        with np.load(GOLDEN / name, allow_pickle=False) as file:
            found |= {key: file[key] for key in file.files}
    return found


SAID = [name for name in CASES if name not in UNSAID]
SOME = some_of(SAID, "gemma4", "nemotron-h")


@pytest.mark.parametrize("name", SOME)
def test_logits_are_those_of_transformers(
    name: str, golden: dict[str, Any], tmp_path: Path
) -> None:
    save_converted(tmp_path / "m.gguf", name, CASES[name])
    given = feed(load_graph(str(tmp_path / "m.gguf"), SIZES), TOKENS)
    assert relative_error(given, golden[f"{name}/prefill"]) <= BOUND


def check_like_directory(directory: Path, name: str, case: Case, **metadata: Any) -> None:
    """Check a file against a directory, which the tests of families compare with transformers."""
    save_converted(directory / "m.gguf", name, case, metadata)
    save_checkpoint(directory / "m", case)
    given, wanted = (
        feed(load_graph(str(directory / source), SIZES), TOKENS) for source in ("m.gguf", "m")
    )
    assert relative_error(given, wanted) <= BOUND


def change_case(name: str, **change: Any) -> Case:
    """Return a case with other fields, None for none, and the same weights."""
    case = CASES[name]
    fields = {key: value for key, value in {**case.change, **change}.items() if value is not None}
    shapes = None if case.shapes is None else lambda _: iter_shapes(case)
    return replace(case, change=fields, shapes=shapes)


def test_every_fourth_layer_of_smollm3_has_no_rope(tmp_path: Path) -> None:
    """Files do not say which: no other ones are published."""
    layers = {"no_rope_layers": [1, 1, 1, 0, 1], "num_hidden_layers": 5}
    case = change_case("smollm3", no_rope_layer_interval=None, **layers)
    check_like_directory(tmp_path, "smollm3", case)


def test_one_layer_in_four_of_cohere2_has_no_window(tmp_path: Path) -> None:
    """Files do not say which, and rows of layer norms are no root mean squares."""
    case = change_case("cohere2", sliding_window_pattern=None)
    check_like_directory(tmp_path, "cohere2", case)


def test_gpt_oss_bounds_activations_at_seven(tmp_path: Path) -> None:
    """Files do not say where. YaRN's ends are not rounded, as in the original."""
    check_like_directory(tmp_path, "gpt-oss", change_case("gpt-oss", swiglu_limit=None))


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("nemotron-h", {"feed_forward_length": 48}, "a list of 0 and one other number is wanted"),
        ("nemotron-h", {"attention.head_count_kv": [0, 0]}, "one per block"),
        ("nemotron-h", {"attention.head_count_kv": [], "block_count": 0}, "one per block"),
        ("nemotron-h", {"attention.head_count": 8}, "8 heads of 16; its query has 64 rows"),
        ("nemotron-h", {"ssm.inner_size": 50}, "4 heads of 50 in all"),
        ("nemotron-h", {"ssm.group_count": 1}, "the metadata want"),
        ("nemotron-h", {"attention.layer_norm_epsilon": 0.5}, "another layer_norm_epsilon"),
        ("nemotron-3", {"moe_latent_size": None}, "the metadata want"),
        ("nemotron-3", {"expert_shared_count": 2}, "n_shared_experts"),
    ],
)
def test_what_does_not_fit_nemotron_is_named(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    named = {f"{FAMILIES[name]}.{key}": value for key, value in metadata.items()}
    save_converted(tmp_path / "m.gguf", name, CASES[name], named)
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path / "m.gguf"), SIZES)


def make_llama_4(experts: int = 6, **change: Any) -> Case:
    """Return the case with four layers, and with chunks and growth as published files have them."""
    said = {"attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layers": None}
    sizes = {"num_hidden_layers": 4, "num_local_experts": experts}
    rows: dict[str, tuple[int, ...]] = {}
    for name, shape in iter_shapes(CASES["llama4"]):
        size = experts if "experts." in name or "router" in name else shape[0]
        for layer in (0, 2):
            others = name.replace(".layers.1.", f".layers.{layer + 1}.")
            rows[others.replace(".layers.0.", f".layers.{layer}.")] = (size, *shape[1:])
    case = change_case("llama4", **{**said, **sizes, **change})
    return replace(case, shapes=lambda _: iter(rows.items()))


@pytest.mark.parametrize("experts", [6, 128])
def test_llama_4_has_what_files_do_not_say(experts: int, tmp_path: Path) -> None:
    """One of four layers has no rope, 8,192 positions are a chunk, and 128 experts are Maverick."""
    change = {"use_qk_norm": experts == 6, "max_position_embeddings": 20_000}
    graphs = []
    for name, size in (("m.gguf", 8192), ("m", 8192), ("n", 4096)):
        case = make_llama_4(experts, **change, attention_chunk_size=size)
        if name == "m.gguf":
            save_converted(tmp_path / name, "llama4", case)
        else:
            save_checkpoint(tmp_path / name, case)
        traced = load_model(str(tmp_path / name), Sizes(chunk=4)).traced
        graphs.append(traced.read_weights().graph.to_bytes())
    assert graphs[0] == graphs[1] != graphs[2]


@pytest.mark.long  # in small: what a file does not say, above
def test_logits_of_llama_4_are_those_of_its_directory(tmp_path: Path) -> None:
    check_like_directory(tmp_path, "llama4", make_llama_4())
    with pytest.raises(InvalidModel, match="without chunks"):
        check_like_directory(
            tmp_path, "llama4", make_llama_4(), **{"llama4.attention.sliding_window": 0}
        )


def make_gemma_4_e(**change: Any) -> Case:
    """Return the case without a factor for positions, which no file has."""
    ropes = CASES["gemma4-e"].config["rope_parameters"]
    full = {key: value for key, value in ropes["full_attention"].items() if key != "factor"}
    return change_case("gemma4-e", rope_parameters={**ropes, "full_attention": full}, **change)


@pytest.mark.long  # in small: test_factors_of_gemma_4_only_say_what_is_turned
def test_gemma_4_e_turns_by_the_factors_of_the_file(tmp_path: Path) -> None:
    check_like_directory(tmp_path, "gemma4-e", make_gemma_4_e())


@pytest.mark.long  # in small: the same of a directory in test_variations.py
def test_upper_layers_of_gemma_4_may_have_keys_that_nothing_reads(tmp_path: Path) -> None:
    case, given = make_gemma_4_e(), {}
    shapes = dict(iter_shapes(case))
    others = {f"model.layers.{n}.self_attn.{part}.weight" for n in (3, 5) for part in ("k_norm",)}
    for name, extra in (("a", ()), ("b", others)):
        whole = {**shapes, **dict.fromkeys(extra, (8,))}
        rows = replace(case, shapes=lambda _, whole=whole: iter(whole.items()))
        save_converted(tmp_path / f"{name}.gguf", "gemma4-e", rows)
        given[name] = load_model(str(tmp_path / f"{name}.gguf")).traced
    assert not given["a"].notes
    assert [note.partition(", the")[2] for note in given["b"].notes] == [
        " layers attend to another one's keys"
    ]


@pytest.mark.usefixtures("float32_caches")
@pytest.mark.parametrize("name", some_of(["gemma4-e", "gemma4-moe"], "gemma4-moe"))
def test_quantised_files_of_gemma_4_stand_for_their_numbers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if name == "gemma4-e":  # a whole block for each layer
        case, wide = make_gemma_4_e(hidden_size_per_layer_input=32), {72: 6 * 32, 12: 32}
        rows = [(n, tuple(wide.get(i, i) for i in shape)) for n, shape in iter_shapes(case)]
        case = replace(case, shapes=lambda _: iter(rows))
    given = []
    for widened in (False, True):
        path = tmp_path / f"{widened}.gguf"
        save_converted(path, name, case, form="Q8_0", widened=widened)
        given.append(feed(load_graph(str(path), SIZES), TOKENS))
    assert relative_error(*given) <= BOUND


def test_factors_of_gemma_4_only_say_what_is_turned(tmp_path: Path) -> None:
    save_converted(tmp_path / "m.gguf", "gemma4", CASES["gemma4"])
    file = read_gguf(tmp_path / "m.gguf")
    assert read_turned(file, "rope_freqs.weight", 8) == 2
    with pytest.raises(InvalidModel, match="of another shape than its heads"):
        read_turned(file, "rope_freqs.weight", 4)
    with pytest.raises(InvalidModel, match="of other numbers than 1 and 1e30"):
        read_turned(file, "output_norm.weight", 32)


def test_blocks_of_a_table_that_cross_layers_are_refused(tmp_path: Path) -> None:
    case, wide = make_gemma_4_e(hidden_size_per_layer_input=16), {72: 6 * 16, 12: 16}
    rows = [(n, tuple(wide.get(i, i) for i in shape)) for n, shape in iter_shapes(case)]
    case = replace(case, shapes=lambda _: iter(rows))
    save_converted(tmp_path / "m.gguf", "gemma4-e", case, form="Q8_0")
    with pytest.raises(InvalidModel, match="blocks of 32 columns, and 16 from 0 on are needed"):
        load_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.sliding_window_pattern": [True, False]}, "a list of yes and no is wanted"),
        ({"attention.value_length": 24}, "attention.value_length = 24; supported: 16"),
        ({"attention.value_length_swa": 16}, "value_length_swa = 16; supported: 8"),
        ({"attention.head_count": 8}, "8 heads of 8, 2 of keys; the query of block 0 has 32"),
        ({"attention.head_count_kv": [2, 1, 1]}, "one number is supported"),
        ({"attention.shared_kv_layers": 3}, "borrows keys in 3 of 3 blocks"),
        ({"feed_forward_length": [48, 48, 96]}, "and twice that where keys are borrowed"),
        ({"rope.dimension_count": 8}, "rope.dimension_count = 8; supported: 16"),
        ({"altup.num_inputs": 4}, "altup.num_inputs', which is unknown"),
    ],
)
def test_what_does_not_fit_gemma_4_is_named(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changes = {f"gemma4.{key}": value for key, value in metadata.items()}
    save_converted(tmp_path / "m.gguf", "gemma4", CASES["gemma4"], changes)
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path / "m.gguf"))


def make_mistral_4(beta: float) -> Case:
    """Return the case with one group of experts, as published."""
    rope = {**CASES["mistral4"].config["rope_parameters"], "llama_4_scaling_beta": beta}
    return change_case("mistral4", n_group=1, topk_group=1, rope_parameters=rope)


@pytest.mark.long  # in small: one whose queries do not, below
def test_queries_of_mistral_4_grow_if_the_file_says_so(tmp_path: Path) -> None:
    growth = {"temperature_scale": 0.1, "temperature_length": 8}
    named = {f"mistral4.attention.{key}": value for key, value in growth.items()}
    check_like_directory(tmp_path, "mistral4", make_mistral_4(0.1), **named)
    check_like_directory(tmp_path, "mistral4", make_mistral_4(0.0))
    notes = load_model(str(tmp_path / "m.gguf"), SIZES).traced.notes
    assert any("queries are not scaled" in note for note in notes)


def test_a_mistral_3_whose_queries_do_not_grow_is_a_mistral(tmp_path: Path) -> None:
    rope = {**CASES["ministral3"].config["rope_parameters"], "llama_4_scaling_beta": 0.0}
    case = change_case("ministral3", rope_parameters=rope)
    save_converted(tmp_path / "m.gguf", "ministral3", case)
    for name in ("llama_4_scaling_beta", "max_position_embeddings"):
        del rope[name]
    fields = {**case.change, "rope_parameters": rope, "sliding_window": None}
    plain = replace(case, architecture="MistralForCausalLM", model_type="mistral", change=fields)
    save_checkpoint(tmp_path / "m", plain)
    given, wanted = (feed(load_graph(str(tmp_path / n), SIZES), TOKENS) for n in ("m.gguf", "m"))
    assert relative_error(given, wanted) <= BOUND


_LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "short_mscale": 1.243163121016122,
    "long_mscale": 1.243163121016122,
}


@pytest.mark.parametrize("scaling", [pytest.param(None, marks=pytest.mark.long), _LONG_ROPE])
def test_phi_moe_has_what_files_do_not_say(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """How the router compares, and by what Phi-3.5-MoE's LongRoPE multiplies."""
    original = None if scaling is None else 16
    case = change_case(
        "phimoe",
        router_jitter_noise=None,
        rope_scaling=scaling,
        original_max_position_embeddings=original,
    )
    check_like_directory(tmp_path, "phimoe", case)


def test_projections_of_qwen_3_next_may_be_grouped(golden: dict[str, Any], tmp_path: Path) -> None:
    """As its first converter wrote them."""
    save_hybrid(tmp_path / "m.gguf", CASES["qwen3-next"], grouped=True)
    given = feed(load_graph(str(tmp_path / "m.gguf"), SIZES), TOKENS)
    assert relative_error(given, golden["qwen3-next/prefill"]) <= BOUND


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_indexers_that_would_choose_all_are_left_out(name: str, tmp_path: Path) -> None:
    save_converted(tmp_path / "m.gguf", name, CASES[name])
    traced = load_model(str(tmp_path / "m.gguf"), Sizes(context=5, chunk=1)).traced
    assert any("an indexer would choose all positions" in note for note in traced.notes)


def test_granite_without_a_factor_for_scores_divides_as_usual(tmp_path: Path) -> None:
    case = change_case("granite", attention_multiplier=8**-0.5)
    check_like_directory(tmp_path, "granite", case, **{"granite.attention.scale": None})


def test_granite_4_without_recurrent_layers_is_a_granite(tmp_path: Path) -> None:
    """The converter writes one width for both MLPs; published models have equal ones."""
    case = change_case("granite-4-dense", intermediate_size=20)
    check_like_directory(tmp_path, "granite-4-dense", case)
    with pytest.raises(InvalidModel, match="num_key_value_heads"):
        other = {"granite.attention.head_count_kv": [2, 4]}
        check_like_directory(tmp_path, "granite-4-dense", case, **other)


@pytest.mark.parametrize(
    ("name", "metadata", "problem"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "no positions"),
        ("granite-hybrid", {"attention.head_count_kv": 2}, "a list of 0 and one other number"),
        ("granite-hybrid", {"attention.head_count_kv": [0, 2, 4]}, "a list of 0 and one other"),
        ("granite-hybrid", {"attention.head_count_kv": [2, 0]}, r"blk\.0\.attn_q|blk\.1\.ssm"),
        ("granite-hybrid", {"ssm.inner_size": 63}, "4 heads of 63 in all, for rows of 32"),
        ("granite-hybrid", {"ssm.time_step_rank": 0}, "0 heads of 64"),
        ("granite-hybrid", {"ssm.group_count": 2}, "mamba_n_groups"),
        ("olmo2", {"attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern"),
        ("gpt-oss", {"attention.sliding_window_pattern": 3}, "sliding_window_pattern"),
        ("olmo3", {"attention.sliding_window_pattern": 4}, "a list of yes and no is wanted"),
        ("olmo3", {"rope.freq_base": 10_000.0}, "rope_theta"),
        ("minimax-m2", {"expert_gating_func": 1}, "supported: 2, sigmoid"),
        ("gpt-oss", {"expert_used_count": 7}, "7 active experts of 6"),
        ("granite-moe-shared", {"expert_shared_feed_forward_length": 19}, "the metadata want"),
        ("smollm3", {"no_rope_layer_interval": 2}, "no_rope_layer_interval"),
        ("ministral3", {"rope.scaling.type": "none"}, "original_max_position_embeddings"),
        ("mistral4", {"attention.temperature_length": 8}, "temperature_length = 8"),
        ("deepseek-v3.2", {"expert_gating_func": 1}, "supported: 2, sigmoid"),
        ("deepseek-v3.2", {"attention.indexer.types": [True]}, "types', which is unknown"),
        ("glm-5", {"attention.indexer.types": [False]}, "indexer_types"),
        ("glm-5", {"context_length": 2**20}, "indexer_types"),
        ("phimoe", {"expert_used_count": 1}, "num_experts_per_tok"),
        ("qwen3-next", {"ssm.inner_size": 50}, "4 value heads of 50 in all"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, metadata: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    named = {f"{FAMILIES[name]}.{key}": value for key, value in metadata.items()}
    save_converted(tmp_path / "m.gguf", name, CASES[name], named)
    with pytest.raises(InvalidModel, match=problem):
        load_graph(str(tmp_path / "m.gguf"), SIZES)
