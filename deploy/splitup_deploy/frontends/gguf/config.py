"""The metadata of a GGUF file, translated to the config.json of the same family.

A key of the family that is not known is refused, because it may change the results. Some properties
(biases, norms of heads) follow from which tensors a file has. Sources: those of ``family_table``.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from splitup.core import tuning
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import PROJECTIONS, DecoderConfig
from splitup_deploy.frontends.families.architectures import ARCHITECTURES
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.gguf import gemma4_config
from splitup_deploy.frontends.gguf.family_table import (
    DEEPSEEK_V2,
    FAMILIES,
    GRANITE_HYBRID_EXPERTS,
    GRANITE_SCALES,
    GRANITE_SHARED,
    GROWTH,
    INDEXER_TYPES,
    LARGEST_GEMMAS,
    MISTRAL3,
    MIXTRAL,
    OLMO3,
    SHARED_FEED_FORWARD,
    YARN_WEIGHT,
    Family,
)
from splitup_deploy.frontends.gguf.header import GgufFile
from splitup_deploy.frontends.gguf.hybrid_config import (
    SIGMOID,
    check_heads,
    complete_recurrent,
    expect_sigmoid,
    find_attention,
    read_granite_hybrid,
    read_kimi,
    read_nemotron,
    read_qwen,
    read_share,
)

# a family's metadata key -> the field of config.json with the same meaning
_FIELDS: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_ROPE_FIELDS: Final = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# read or compared below
_CHECKED: Final = (
    "block_count",
    "nextn_predict_layers",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.finetuned",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "attention.sliding_window",
    "tensor_data_layout",
)
MAX_RADIANS: Final = 16  # models' largest is 1; the series for sines is slow far from 0
ROPE_FACTORS: Final = "rope_freqs.weight"  # Llama 3.1's scaling
LONG_FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")  # Phi-3's
_MAVERICK: Final = 128  # experts of the Llama 4 whose queries and keys are not normalised
_SOFTMAX = 1  # llama.cpp's number
_BIAS: Final = "exp_probs_b"
_SPLIT: Final = "attn_k_b.weight"
_PATTERN: Final = "attention.sliding_window_pattern"
_KV_RANK: Final = "attention.kv_lora_rank"
_FAMILY: Final = "general.architecture"
_PHI_MOE_SCALE: Final = 1.243163121016122  # of Phi-3.5-MoE's config.json; no file says it
_FIRST_SHARED: Final = 2**20  # the context from which on GLM-5's blocks share indexers
# Keys for which zero means that there is none.
_ABSENT_AT_ZERO: Final = ("n_shared_experts", "n_group", "topk_group", "routed_scaling_factor")


def list_gguf_names() -> dict[str, tuple[str, ...]]:
    """Return for every architecture that files can have what files call it."""
    special = (
        *(("deepseek2", DEEPSEEK_V2), ("llama", MIXTRAL), ("olmo2", OLMO3)),
        *(("granitemoe", GRANITE_SHARED), ("mistral3", MISTRAL3)),
    )
    names: dict[str, tuple[str, ...]] = {"Glm4MoeLiteForCausalLM": ("deepseek2",)}
    for name, family in (*FAMILIES.items(), *special):
        names[family.architecture] = (*names.get(family.architecture, ()), name)
    return names


def _list_keys(file: GgufFile, name: str) -> dict[str, Any]:
    """Return the metadata of a family by their keys without its name."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}


def choose_family(file: GgufFile, name: str) -> Family:
    """Return the family of a file of that name; some names stand for several."""
    keys = _list_keys(file, name)
    if name == "llama" and keys.get("expert_count", 0) != 0:
        return MIXTRAL
    if name == "deepseek2" and _read_gating(file, keys) == _SOFTMAX:
        return DEEPSEEK_V2
    if name == "olmo2" and keys.get("attention.sliding_window", 0) != 0:
        return OLMO3
    if name == "mistral3" and keys.get(GROWTH, 0) == 0:
        return MISTRAL3
    if name == "granitemoe" and keys.get(SHARED_FEED_FORWARD, 0) != 0:
        return GRANITE_SHARED
    if name == "granitehybrid" and keys.get("expert_count", 0) != 0:
        return GRANITE_HYBRID_EXPERTS
    return FAMILIES[name]


def read_config(file: GgufFile, family: str, context: int | None) -> DecoderConfig:
    """Read the metadata of a family; raises InvalidModel for a key that may change the results."""
    prefix, keys = f"{family}.", _list_keys(file, family)
    kind = choose_family(file, family)
    known = {**_FIELDS, **_ROPE_FIELDS, **kind.fields}
    for key in keys:
        if key not in known and key not in _CHECKED and key not in kind.checked:
            raise InvalidModel(f"'{file.path}' has the key '{prefix}{key:.80}', which is unknown")
    table = _make_table(file, keys, kind)
    fields = Fields(table, f"'{file.path}'")
    config = ARCHITECTURES[kind.architecture](fields, context)
    fields.check_all_read()
    _check_keys(file, prefix, keys, config)
    frequencies = _divide(file, config)
    if max(frequencies, default=0) > MAX_RADIANS:
        raise InvalidModel(
            f"'{file.path}' turns heads by more than {MAX_RADIANS} radians per position: "
            "its rope.freq_base or factors are wrong"
        )
    if config.sinks and config.experts:  # gpt-oss
        config = replace(config, experts=replace(config.experts, names=PROJECTIONS))
    if config.latent is not None:
        return complete_recurrent(file, _complete_latent(file, config, frequencies))
    block = find_attention(file)
    return replace(
        complete_recurrent(file, config),
        rope=replace(config.rope, frequencies=frequencies),
        qkv_bias=f"{block}attn_q.bias" in file.tensors,
        output_bias=f"{block}attn_output.bias" in file.tensors,
        unit_norms=False,  # the converters add the 1 of such norms
    )


def list_further_blocks(file: GgufFile, config: DecoderConfig) -> tuple[str, ...]:
    """Return the name prefixes of blocks that only predict tokens further ahead.

    Such a block has a norm for the token before it; a usual block behind the last is no such one.
    """
    last = config.layers + _count_further(file, str(file.metadata[_FAMILY]))
    blocks = (f"blk.{layer}." for layer in range(config.layers, last))
    return tuple(block for block in blocks if f"{block}nextn.enorm.weight" in file.tensors)


def _count_further(file: GgufFile, family: str) -> int:
    """Return the number of the file's last blocks that only predict tokens further ahead."""
    blocks, count = (
        file.metadata.get(f"{family}.{key}", 0) for key in ("block_count", "nextn_predict_layers")
    )
    if type(count) is not int or not 0 <= count <= tuning.MAX_LAYERS:
        raise InvalidModel(f"'{file.path}' has {count!r:.40} blocks that predict further")
    if count and not (type(blocks) is int and count < blocks):
        raise InvalidModel(
            f"'{file.path}' has {count} of {blocks!r:.40} blocks that predict further"
        )
    return count


def _make_table(file: GgufFile, keys: dict[str, Any], kind: Family) -> dict[str, Any]:
    """Return the fields that a config.json would have."""
    names = {**_FIELDS, **kind.fields}
    table = {**kind.defaults, **{name: keys[key] for key, name in names.items() if key in keys}}
    for name in _ABSENT_AT_ZERO:
        if table.get(name) == 0:
            table[name] = kind.defaults.get(name)
    blocks, further = keys.get("block_count"), _count_further(file, str(file.metadata[_FAMILY]))
    table["num_hidden_layers"] = blocks - further if type(blocks) is int else blocks
    table["vocab_size"] = file.get_shape("token_embd.weight")[0]
    table["tie_word_embeddings"] = "output.weight" not in file.tensors
    table["rope_scaling"] = _read_scaling(file, keys)
    if keys.get(GROWTH, 0) != 0:
        table["rope_scaling"] = {
            **(table["rope_scaling"] or {}),
            "llama_4_scaling_beta": keys[GROWTH],
        }
    if kind.architecture == "GptOssForCausalLM" and table["rope_scaling"] is not None:
        table["rope_scaling"]["truncate"] = False  # llama.cpp rounds, the original does not
    if kind.architecture == "GraniteMoeHybridForCausalLM":
        table |= read_granite_hybrid(file, keys)
    if kind.architecture == "KimiLinearForCausalLM":
        table |= read_kimi(file, keys)
        keys = {**keys, "attention.head_count_kv": 1}
    if "attention.indexer.top_k" in kind.fields:
        expect_sigmoid(file, keys)
    if kind.architecture == "GlmMoeDsaForCausalLM":
        table["indexer_types"] = _read_indexer_types(keys, table["num_hidden_layers"])
    if _KV_RANK in keys:
        return table | _read_latent(file, keys)
    if kind.architecture == "Gemma4ForCausalLM":
        fields = gemma4_config.read_gemma4(file, keys, table)
        return {**table, **fields}
    if kind.architecture == "NemotronHForCausalLM":
        return table | read_nemotron(file, keys, table)
    heads, hidden = table.get("num_attention_heads"), table.get("hidden_size")
    if type(heads) is int and type(hidden) is int and heads > 0:
        table.setdefault("head_dim", hidden // heads)
    table.setdefault("num_key_value_heads", heads)
    if kind.architecture == "Phi3ForCausalLM":
        return table | _read_phi3(file, keys, table)
    rows = file.get_shape(f"{find_attention(file)}attn_q.weight")[0]
    is_qwen = "full_attention_interval" in kind.fields  # whose heads have a gate behind them
    size = check_heads(file, heads, table.get("head_dim"), rows // 2 if is_qwen else rows)
    if is_qwen:
        table |= read_qwen(file, keys, size)
    if kind.architecture == "PhimoeForCausalLM":
        table |= _read_phi_moe(file, table, size)
    if kind.architecture == "Llama4ForCausalLM":
        if keys.get("attention.sliding_window", 1) == 0:  # MobileLLM, which has rope everywhere
            raise InvalidModel(f"'{file.path}' is a Llama 4 without chunks, which is not supported")
        table["use_qk_norm"] = table.get("num_local_experts") != _MAVERICK
    if kind.architecture == "Glm4MoeForCausalLM":
        table |= _read_glm4(file, keys, size)
    if kind.architecture == "MiniMaxM2ForCausalLM":
        expect_sigmoid(file, keys)
        table["rotary_dim"] = keys.get("rope.dimension_count")
    if kind.architecture == "Olmo3ForCausalLM" and _PATTERN in keys:
        pattern = gemma4_config.read_pattern(file, keys, table["num_hidden_layers"])
        table["layer_types"] = gemma4_config.name_layers(pattern)
    if kind.fields.items() >= GRANITE_SCALES.items():
        table.setdefault("attention_multiplier", size**-0.5)  # as in llama.cpp
        cached = table["num_key_value_heads"]
        if isinstance(cached, list) and cached and cached == cached[:1] * len(cached):
            table["num_key_value_heads"] = cached[0]  # of Granite 4, by layer
        is_hybrid = kind.architecture == "GraniteMoeHybridForCausalLM"
        if keys.get("rope.scaling.finetuned", True) is not True and not is_hybrid:
            raise InvalidModel(f"'{file.path}' has no positions, which is not supported for it")
    if (largest := LARGEST_GEMMAS.get(kind.architecture)) is not None:
        table["query_pre_attn_scalar"] = size
        if table["num_hidden_layers"] == largest and type(hidden) is int and type(heads) is int:
            table["query_pre_attn_scalar"] = hidden // heads
    return table


def _read_latent(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of latent attention, from files with one or two expansions."""
    block = find_attention(file)
    split = f"{block}{_SPLIT}" in file.tensors
    heads, rank, turned = (
        keys.get(key) for key in ("attention.head_count", _KV_RANK, "rope.dimension_count")
    )
    suffix = "_mla" if split else ""
    size, value = (keys.get(f"attention.{part}_length{suffix}") for part in ("key", "value"))
    query = "attn_q_b.weight" if "attention.q_lora_rank" in keys else "attn_q.weight"
    size = check_heads(file, heads, size, file.get_shape(block + query)[0])
    rows = file.get_shape(f"{block}attn_kv_a_mqa.weight")[0]
    if type(rank) is not int or type(turned) is not int or rank + turned != rows:
        raise InvalidModel(
            f"'{file.path}' compresses keys and values to {rank!r:.40} elements and turns "
            f"{turned!r:.40}; its tensor gives {rows}"
        )
    wanted = {"attention.head_count_kv": heads}
    if split:  # as the cache has them
        lengths = {"attention.key_length": rows, "attention.value_length": rank}
        wanted = {"attention.head_count_kv": 1, **lengths}
    file.expect(keys, wanted)
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": size - turned,
        "v_head_dim": value,
        "num_key_value_heads": heads,
        "head_dim": size,
    }


def _read_gating(file: GgufFile, keys: dict[str, Any]) -> int:
    """Return the scoring function of deepseek2's router, by default that of the oldest files."""
    kind = keys.get("expert_gating_func", 0)
    if kind == 0 and not any(_BIAS in name for name in file.tensors):
        return _SOFTMAX
    if kind not in (_SOFTMAX, SIGMOID):
        raise InvalidModel(
            f"'{file.path}' has expert_gating_func = {kind!r:.40}; supported: {_SOFTMAX} for "
            f"softmax and {SIGMOID} for sigmoid"
        )
    if kind == _SOFTMAX and keys.get("expert_group_count", 0) not in (0, 1):
        raise InvalidModel(
            f"'{file.path}' has expert_group_count = {keys['expert_group_count']!r:.40} with a "
            "softmax, for which llama.cpp and the original choose differently: not supported"
        )
    return int(kind)


def _complete_latent(
    file: GgufFile, config: DecoderConfig, frequencies: tuple[Decimal, ...]
) -> DecoderConfig:
    """Return the configuration completed from the file's tensors.

    The inner norms use the model's epsilon, as in llama.cpp.
    """
    assert config.latent is not None
    split = f"{find_attention(file)}{_SPLIT}" in file.tensors
    experts = config.experts
    if experts is not None:
        first = min(set(range(config.layers)) - experts.dense_layers)
        biased = f"blk.{first}.{_BIAS}.bias" in file.tensors
        experts = replace(experts, router=replace(experts.router, biased=biased))
    note = config.rope.note
    if str(file.metadata[_FAMILY]) == "mistral4" and config.growth is None:
        note = (
            "queries are not scaled by their positions, as in llama.cpp: the file does not say so"
        )
    return replace(
        config,
        rope=replace(config.rope, frequencies=frequencies, note=note),
        latent=replace(config.latent, norm_epsilon=config.norm_epsilon, split=split),
        experts=experts,
    )


def _read_glm4(file: GgufFile, keys: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the fields that GLM-4 files have in another form; ``size`` is a head's."""
    expect_sigmoid(file, keys)
    return {
        "partial_rotary_factor": read_share(file, keys, size),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _read_phi3(file: GgufFile, keys: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that Phi-3 files have in another form; q, k and v are one tensor."""
    heads, cached, size = (
        table.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    rows = file.get_shape("blk.0.attn_qkv.weight")[0]
    cached_rows = 2 * cached * size if type(cached) is int and type(size) is int else 0
    size = check_heads(file, heads, size, rows - cached_rows)
    share = read_share(file, {"rope.dimension_count": size, **keys}, size)
    fields: dict[str, Any] = {"partial_rotary_factor": share}
    if table.get("sliding_window") == 0:  # none
        fields["sliding_window"] = None
    if scaling := _read_long_factors(file, int(size * share) // 2):
        factor = keys.get("rope.scaling.attn_factor", 1.0)
        fields["rope_scaling"] = {**scaling, "attention_factor": factor}
    return fields


def _read_phi_moe(file: GgufFile, table: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the fields that Phi-MoE files have in another form; ``size`` is a head's."""
    fields: dict[str, Any] = {}
    if table.get("sliding_window") == 0:  # none
        fields["sliding_window"] = None
    if scaling := _read_long_factors(file, size // 2):
        scales = dict.fromkeys(("long_mscale", "short_mscale"), _PHI_MOE_SCALE)
        fields["rope_scaling"] = scaling | scales
    return fields


def _read_long_factors(file: GgufFile, pairs: int) -> dict[str, Any]:
    """Return LongRoPE's parameters; none if the file has no factors."""
    if not any(name in file.tensors for name in LONG_FACTORS):
        return {}
    short, long = (list(_read_factors(file, name, pairs)) for name in LONG_FACTORS)
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


def _read_indexer_types(keys: dict[str, Any], layers: Any) -> list[str]:
    """Return which blocks of a GLM-5 have indexers of their own; old files do not say it."""
    said, trained = keys.get(INDEXER_TYPES), keys.get("context_length")
    if not isinstance(said, list):
        is_old = type(trained) is int and trained < _FIRST_SHARED
        count = min(layers, tuning.MAX_LAYERS) if type(layers) is int else 0
        said = [is_old if said is None else said] * count
    return ["full" if one else "shared" for one in said]


def _check_keys(file: GgufFile, prefix: str, keys: dict[str, Any], config: DecoderConfig) -> None:
    """Raise InvalidModel where other keys of the file contradict the configuration."""
    experts = config.experts
    latent = config.latent
    size = config.head_dim if config.wide is None else config.wide.head_dim
    value = keys.get("attention.value_length") if latent else size
    turned: Any = latent.turned if latent else 2 * config.rope.pairs
    if config.unturned == frozenset(range(config.layers)):  # nothing is turned
        turned = keys.get("rope.dimension_count")
    wanted = {
        "attention.value_length": value,
        "rope.dimension_count": turned,
        "vocab_size": config.vocab,
        "expert_count": experts.count if experts else 0,
        "expert_used_count": experts.active if experts else 0,
        "expert_feed_forward_length": experts.intermediate if experts else 0,
        "tensor_data_layout": "Meta AI original pth",
        "attention.temperature_length": config.growth.positions if config.growth else None,
    }
    file.expect(keys, wanted, prefix)
    window = keys.get("attention.sliding_window")
    if config.local is not None or window == 0:
        return
    if window is not None and not (type(window) is int and window >= config.context):
        raise InvalidModel(
            f"'{file.path}' lets a token see {window!r:.40} others only, which is not supported "
            "for GGUF files: compile it with a context of at most that"
        )


def _read_scaling(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise InvalidModel(f"'{file.path}' scales positions by {kind!r:.40}; use linear or yarn")
    values = {name: keys[key] for key, name in _ROPE_FIELDS.items() if key in keys}
    if kind == "linear":
        values = {"factor": values.get("factor")}
    elif _KV_RANK in keys:
        weight = keys.get(YARN_WEIGHT)
        if type(weight) is not float or not 0 < weight < 1:
            raise InvalidModel(
                f"'{file.path}' has rope.scaling.yarn_log_multiplier = {weight!r:.40}, which "
                "compressed attention needs: convert it again"
            )
        values |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * weight)  # llama.cpp's legacy
    elif YARN_WEIGHT in keys:
        values |= {"mscale": 1.0, "mscale_all_dim": keys[YARN_WEIGHT]}
    return {"rope_type": kind, **values}


def _divide(file: GgufFile, config: DecoderConfig) -> tuple[Decimal, ...]:
    """Return the rope, its frequencies divided by the factors in the file, if there are some."""
    if ROPE_FACTORS not in file.tensors:
        return config.rope.frequencies
    if config.wide is not None:
        turned = gemma4_config.read_turned(file, ROPE_FACTORS, config.rope.pairs)
        still = (Decimal(0),) * (config.rope.pairs - turned)
        return config.rope.frequencies[:turned] + still
    return config.rope.divide(_read_factors(file, ROPE_FACTORS, config.rope.pairs)).frequencies


def _read_factors(file: GgufFile, name: str, pairs: int) -> tuple[float, ...]:
    """Return the numbers that a rope's frequencies are divided by."""
    factors = file.read_floats(name, pairs)
    if not all(1e-6 < factor < 1e6 for factor in factors):
        raise InvalidModel(f"'{file.path}' has a {name} that is no sensible number")
    return factors
