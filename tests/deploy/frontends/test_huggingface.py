from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.families.config_fields import IGNORED
from splitup_deploy.frontends.huggingface.directory import load_huggingface, parse_config
from splitup_deploy.frontends.huggingface.tokenizer_file import read_chat, read_tokenizer
from splitup_deploy.frontends.source_model import Sizes
from tokenizers import Tokenizer

from splitup.client.text.chat_template import render_chat
from splitup.core.errors import InvalidInput, InvalidModel
from tests.deploy.checkpoints import CASES
from tests.deploy.llamas import TINY, save_llama


def test_text_and_context(tmp_path: Path) -> None:
    save_llama(tmp_path)
    model = load_model(str(tmp_path))
    assert model.kind == "text-generation" and model.text is not None
    assert (model.text.eos_ids, model.text.vocab, model.text.context) == ((1, 3), 40, 16)
    short = load_model(str(tmp_path), Sizes(context=8))
    assert short.traced.graph.states[0].shape == (8, 2, 2, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    changed = load_model(str(tmp_path))
    assert changed.text is not None and changed.text.eos_ids == (7,)


@pytest.mark.parametrize("name", ["m.pkl", "m.pt", "m.pth", "m.bin", "model.safetensors"])
def test_weights_alone_are_no_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"never read")
    with pytest.raises(InvalidModel, match=r"is a file of weights.* directory with config\.json"):
        load_model(str(path))


def test_old_and_new_spellings() -> None:
    old = parse_config(TINY, None)
    new = {k: v for k, v in TINY.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    assert parse_config(new, None) == old
    assert parse_config({**TINY, "rope_scaling": None}, None) == old
    assert parse_config({**TINY, "head_dim": None}, None).head_dim == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architecture"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": None, "hidden_activation": "silu"}, "hidden_activation"),
        ({"attention_bias": True}, r"q_proj\.bias"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 1}}, "high_freq"),
        ({"rope_parameters": {"type": "linear", "factor": 2}, "rope_scaling": {"a": 1}}, "beside"),
        ({"rope_scaling": "linear"}, "linear"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"vocab_size": 41}, "embed_tokens"),
        ({"intermediate_size": 47}, "gate_proj"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_a_config_that_cannot_be_used(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **change}))
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path))


def test_old_rope_fields_may_say_what_the_new_ones_do() -> None:
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    config = parse_config({**TINY, "rope_parameters": new}, None)
    both = {"rope_parameters": new, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse_config({**TINY, **both}, None) == config
    both["rope_scaling"]["factor"] = 3.0
    with pytest.raises(InvalidModel, match="beside rope_parameters"):
        parse_config({**TINY, **both}, None)


def test_weights_quantised_by_mlx_are_named(tmp_path: Path) -> None:
    save_llama(tmp_path, {**TINY, "quantization": {"group_size": 64, "bits": 4}})
    with pytest.raises(InvalidModel, match="quantised by MLX"):
        load_model(str(tmp_path))


TEMPLATES = [
    {"name": name, "template": f"{name}\n{{{{ tools }}}}\n"} for name in ("default", "rag")
]
WITH_TOOLS = {"name": "tool_use", "template": "{% for t in tools %}{{ t.n }}{% endfor %}\n  "}


@pytest.mark.parametrize(
    ("files", "texts", "note"),
    [
        ({"tokenizer_config.json": {"chat_template": TEMPLATES}}, ("default\nNone", None), "rag"),
        (
            {"tokenizer_config.json": {"chat_template": [*TEMPLATES, WITH_TOOLS]}},
            ("default\nNone", "7  "),
            "rag",
        ),
        ({"chat_template.json": {"chat_template": "old"}}, ("old", "old"), None),
        (
            {
                "chat_template.jinja": "a",
                "additional_chat_templates/tool_use.jinja": "b",
                "tokenizer_config.json": {"chat_template": "c"},
            },
            ("a", "b"),
            None,
        ),
        ({"tokenizer_config.json": {"chat_template": [WITH_TOOLS]}}, (None, "7  "), None),
    ],
)
def test_chat_templates_are_chosen_as_transformers_does(
    files: dict[str, Any], texts: tuple[str | None, str | None], note: str | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    chat, notes = read_chat(tmp_path)
    assert chat is not None and (note in notes[0] if note else not notes)
    for tools, text in zip((None, [{"n": 7}]), texts, strict=True):
        if text is not None:
            assert render_chat([], tools, **chat.model_dump()) == text
        elif tools is None:
            with pytest.raises(InvalidInput, match="only has a template for chats with tools"):
                render_chat([], tools, **chat.model_dump())


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"tokenizer_class": "TokenizersBackend", "add_prefix_space": True}, [0, 1, 4, 2, 5]),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, [3, 0, 1, 4, 3, 2, 5]),
        ({"added_tokens_decoder": {}}, None),
    ],
)
def test_tokens_of_the_configuration_count(
    change: dict[str, Any], wanted: list[int] | None, tmp_path: Path
) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "\u0120": 3}, "merges": []}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = {key: {**bytes_, "use_regex": True} for key in ("pre_tokenizer", "decoder")}
    table = {"version": "1.0", "model": model, **steps}
    flags = {"lstrip": False, "normalized": False, "single_word": False}
    decoder = {
        "4": {"content": "<x>", **flags, "rstrip": True, "special": True},
        "9": {"content": "<y>", **flags, "rstrip": False, "special": False},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    config = {"added_tokens_decoder": decoder, **change}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    data, _ = read_tokenizer(tmp_path)
    assert isinstance(data, bytes) == (wanted is not None)
    if isinstance(data, bytes):  # the tokens are what transformers 5.24 gives
        assert Tokenizer.from_str(data.decode()).encode("ab<x>  c<y>").ids == wanted


@pytest.mark.parametrize(
    ("added", "vocab", "decoder"),
    [
        ([1], {}, {"5": {"content": "a"}}),
        ([{"content": []}], {}, {"5": {"content": "a"}}),
        ([], {"a": "b", "b": 1}, {"5": {"content": "c"}}),
        ([], [1], {"5": {"content": "a"}}),
        ([], [[]], {"5": {"content": "a"}}),
        ([], {}, {"5": {"content": []}}),
        ([], {}, {"5": {"content": "a"}, "05": {"content": "b"}}),
        ([], {"\ud800": 1}, {"5": {"content": "a"}}),
        ([], {}, [1]),
    ],
)
def test_tokens_that_are_none_are_refused(
    tmp_path: Path, added: Any, vocab: Any, decoder: Any
) -> None:
    table = {"added_tokens": added, "model": {"vocab": vocab}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(InvalidModel, match="lists no tokens by id"):
        read_tokenizer(tmp_path)


def test_the_context_is_bounded(tmp_path: Path) -> None:
    save_llama(tmp_path)
    for context in (0, -1, 17):
        with pytest.raises(InvalidModel, match="1 to 16 positions"):
            load_model(str(tmp_path), Sizes(context=context))


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="does not exist"):
        load_model(str(tmp_path / "absent"))
    with pytest.raises(InvalidModel, match=r"config\.json"):
        load_model(str(tmp_path))
    save_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    for bad in (data[:-1], data + b"\0", b"", b"\0" * 100):
        weights.write_bytes(bad)
        with pytest.raises(InvalidModel, match=r"model\.safetensors"):
            load_model(str(tmp_path))
    weights.unlink()
    with pytest.raises(InvalidModel, match=r"no model\.safetensors"):
        load_huggingface(str(tmp_path))
    weights.write_bytes(data)
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).rename(tmp_path / "aside")
        with pytest.raises(InvalidModel, match=file):
            load_model(str(tmp_path))
        (tmp_path / "aside").rename(tmp_path / file)
    for text in ("", "[]", "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidModel, match=r"config\.json"):
            load_model(str(tmp_path))


def test_a_missing_or_integer_weight_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, path)
    with pytest.raises(InvalidModel, match=name):
        load_model(str(tmp_path))
    save_file({**weights, name: weights[name].astype("int32")}, path)
    with pytest.raises(InvalidModel, match="int32"):
        load_model(str(tmp_path))


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(InvalidModel, match="outside"):
        load_model(str(tmp_path))
    index.write_text(json.dumps({"weight_map": ["a"]}))
    with pytest.raises(InvalidModel, match="weight_map"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "config.json", "tokenizer.json", "model.safetensors"]
)
def test_s89_a_models_folder_leads_to_no_other_file(name: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "model", tmp_path / "passphrase"
    save_llama(folder)
    if name == "chat_template.jinja":
        (folder / name).write_text("secret")
    (folder / name).rename(other)
    (folder / name).symlink_to("../passphrase")
    with pytest.raises(InvalidModel, match="hidden or outside"):
        load_model(str(folder))


def test_the_links_of_hugging_faces_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    folder, blobs = cache / "snapshots" / "main", cache / "blobs"
    save_llama(folder)
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    load_model(str(folder))


FAMILY_FIELDS = [
    ("mistral", {"sliding_window": ...}, "no sliding_window"),
    ("mistral", {"num_key_value_heads": ...}, "no num_key_value_heads"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("qwen2", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"sliding_window": None}, "no sliding_window"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
    ("qwen2-yarn", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
    ("qwen3", {"head_dim": None}, "no head_dim"),
    ("phi3", {"attention_bias": True}, "attention_bias"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2}}, "yarn"),
    ("phi3-longrope", {"partial_rotary_factor": 0.5}, "factor"),
    ("gemma2", {"final_logit_softcapping": ...}, "final_logit_softcapping"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"rope_local_base_freq": 1.0}, "rope_local_base_freq"),
    ("gemma2", {"sliding_window": None}, "no sliding_window"),
    ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": None}, "rope_type"),
    ("gemma3", {"rope_parameters": {}}, "beside"),
]


@pytest.mark.parametrize(("name", "change", "message"), FAMILY_FIELDS)
def test_a_family_that_cannot_be_used(name: str, change: dict[str, Any], message: str) -> None:
    config = {**CASES[name].config, **change}
    config = {key: value for key, value in config.items() if value is not ...}
    with pytest.raises(InvalidModel, match=message):
        parse_config(config, None)


def test_longrope_turns_by_the_factors_of_the_context() -> None:
    """All positions alike: by the long factors as soon as one may be beyond the original context.

    Else a key in the cache would have to turn when the text becomes long.
    """
    config = CASES["phi3-longrope"].config
    scaling, original = config["rope_scaling"], 24
    plain = parse_config({**config, "rope_scaling": None}, original).rope
    for context, factors in ((original, "short_factor"), (original + 1, "long_factor"), (64, "")):
        rope = parse_config(config, context).rope
        assert rope == plain.divide(scaling[factors or "long_factor"], rope.scale)
        # transformers: sqrt(1 + ln(factor) / ln(original)), factor = trained / original
        wanted = math.sqrt(1 + math.log(64 / original) / math.log(original))
        assert rope.scale == pytest.approx(wanted, rel=1e-12)
    assert parse_config(config, None).rope == parse_config(config, 64).rope


def test_no_field_is_overlooked() -> None:
    """A field that means something somewhere is refused wherever nobody reads it."""
    for name, case in CASES.items():
        config = parse_config(case.config, case.context)
        assert parse_config({**case.config, "new_field": None}, case.context) == config
        values: tuple[Any, ...] = (True, False, 0, 1.5, "x", [], {})
        for value in values:
            with pytest.raises(InvalidModel, match="'new_field'"):
                parse_config({**case.config, "new_field": value}, case.context)
        for key in set().union(*(other.config for other in CASES.values())) - set(case.config):
            if key not in IGNORED:
                with suppress(InvalidModel):
                    changed = parse_config({**case.config, key: 4}, case.context)
                    assert changed != config or key in WITHOUT_EFFECT, (name, key)


def test_fields_of_published_models_are_known() -> None:
    """They say in their config.json what they do not do."""
    for name, extra in {
        "llama": {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1},
        "qwen2": {"use_mrope": False, "torch_dtype": "bfloat16"},
        "phi3": {"auto_map": {"AutoConfig": "x"}, "resid_pdrop": 0.0, "full_attn_mod": 1},
        "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
        "gemma3": {"attn_logit_softcapping": None, "eos_token_id": [1, 106]},
    }.items():
        config = CASES[name].config
        assert parse_config({**config, **extra}, None) == parse_config(config, None)


WITHOUT_EFFECT = {
    "original_max_position_embeddings",  # of a Phi-3 without longrope
    "hidden_act",  # of Gemma, which reads hidden_activation
    "max_window_layers",  # where sliding_window is off or layer_types are given
    "sliding_window_pattern",  # where layer_types are given
    "sliding_window",  # where use_sliding_window is off
    "rope_theta",  # where rope_parameters has its own
    "rope_local_base_freq",
}
