"""The recurrent layers of GGUF files: Qwen3.5, Qwen3-Next, Kimi Linear, Granite 4 and Nemotron-H.

Source: llama.cpp's converters; for Nemotron also src/models/nemotron-h.cpp. They store -exp(A_log)
in place of A_log. For Qwen3.5 value heads are reordered so that value head h uses key head
h mod key_heads, and the 1 is added to the weights of norms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from splitup.core import tuning
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.gguf.header import GgufFile

QWEN_FIELDS: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
QWEN_CHECKED: Final = ("ssm.inner_size", "rope.dimension_sections")
KIMI_CHECKED: Final = ("ssm.conv_kernel", "kda.head_dim")
GRANITE_FIELDS: Final = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
SIGMOID: Final = 2  # llama.cpp's number of a router's function


def find_attention(file: GgufFile) -> str:
    """Return the name prefix of the first block with attention; "blk.0." if all have it."""
    blocks = range(tuning.MAX_LAYERS)
    return next((f"blk.{n}." for n in blocks if f"blk.{n}.ssm_a" not in file.tensors), "blk.0.")


def read_qwen(file: GgufFile, keys: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the fields that Qwen3.5 files have in another form; ``size`` is a head's."""
    inner, heads = (keys.get(f"ssm.{part}") for part in ("inner_size", "time_step_rank"))
    if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
        raise InvalidModel(f"'{file.path}' has {heads!r:.40} value heads of {inner!r:.40} in all")
    return {
        "linear_value_head_dim": inner // heads,
        "partial_rotary_factor": read_share(file, keys, size),
    }


def read_share(file: GgufFile, keys: dict[str, Any], size: int) -> float:
    """Return which part of a head of ``size`` elements is turned."""
    turned = keys.get("rope.dimension_count")
    if type(turned) is not int or not 0 < turned <= size:
        raise InvalidModel(f"'{file.path}' turns {turned!r:.40} of a head's {size} elements")
    return turned / size


def check_heads(file: GgufFile, heads: Any, size: Any, rows: int) -> int:
    """Return a head's size; raises InvalidModel before a table is computed for absent heads."""
    if type(heads) is not int or type(size) is not int or heads * size != rows:
        raise InvalidModel(
            f"'{file.path}' says {heads!r:.40} heads of {size!r:.40}; its query has {rows} rows"
        )
    return size


def expect_sigmoid(file: GgufFile, keys: dict[str, Any]) -> None:
    """Raise InvalidModel for a router with another function."""
    if keys.get("expert_gating_func", 0) not in (0, SIGMOID):  # 0: not said
        raise InvalidModel(
            f"'{file.path}' has expert_gating_func = {keys['expert_gating_func']!r:.40}; "
            f"supported: {SIGMOID}, sigmoid"
        )


def read_kimi(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any]:
    """Return Kimi Linear's own fields; a layer without key and value heads is recurrent."""
    counts = keys.get("attention.head_count_kv")
    if not isinstance(counts, list) or not set(counts) <= {0, 1} or 1 not in counts:
        raise InvalidModel(
            f"'{file.path}' has attention.head_count_kv = {counts!r:.40}; a list of 0 and 1 is "
            "wanted, one per block"
        )
    expect_sigmoid(file, keys)
    layers: dict[int, list[int]] = {0: [], 1: []}
    for number, count in enumerate(counts, 1):
        layers[int(count)].append(number)
    return {
        "mla_use_nope": True,
        "linear_attn_config": {
            "num_heads": keys.get("attention.head_count"),
            "head_dim": keys.get("kda.head_dim"),
            "short_conv_kernel_size": keys.get("ssm.conv_kernel"),
            "full_attn_layers": layers[1],
            "kda_layers": layers[0],
        },
    }


def read_granite_hybrid(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any]:
    """Return Granite 4's own fields; a layer without key and value heads is recurrent."""
    inner, heads, hidden, counts = (
        keys.get(key)
        for key in (
            *("ssm.inner_size", "ssm.time_step_rank", "embedding_length"),
            "attention.head_count_kv",
        )
    )
    if not isinstance(counts, list) or len({*counts, 0}) != 2:
        raise InvalidModel(
            f"'{file.path}' has attention.head_count_kv = {counts!r:.40}; a list of 0 and one "
            "other number is wanted, one per block"
        )
    if (
        not (type(inner) is int and type(heads) is int and type(hidden) is int)
        or min(inner, heads, hidden) < 1
        or inner % heads
        or inner % hidden
    ):
        raise InvalidModel(
            f"'{file.path}' has {heads!r:.40} heads of {inner!r:.40} in all, for rows of "
            f"{hidden!r:.40}, which do not divide"
        )
    first = f"blk.{counts.index(0)}." if 0 in counts else ""
    return {
        "num_key_value_heads": max(counts),
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": f"{first}ssm_conv1d.bias" in file.tensors,
        "mamba_proj_bias": f"{first}ssm_in.bias" in file.tensors,
        "num_local_experts": keys.get("expert_count", 0),
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", True) else "nope",
    }


def complete_recurrent(file: GgufFile, config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with recurrent layers in the converter's form."""
    if config.recurrent is None:
        return config
    shape = config.recurrent
    is_reordered = not shape.selective and not shape.grouped_rates
    is_grouped = shape.grouped and any(  # as old converters left it
        f"blk.{layer}.ssm_in.weight" in file.tensors for layer in shape.layers
    )
    recurrent = replace(shape, exponentiated=True, converted=is_reordered, grouped=is_grouped)
    return replace(config, recurrent=recurrent, unit_norms=False)


# ---- Nemotron-H and Nemotron 3: what a block is follows from lists by block ----------------------


def read_nemotron(file: GgufFile, keys: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that has those of ``table``."""
    blocks = table["num_hidden_layers"]
    counts, widths = (
        _read_list(file, keys, key, blocks)
        for key in ("attention.head_count_kv", "feed_forward_length")
    )
    epsilon = table.get("rms_norm_eps")
    if keys.get("attention.layer_norm_epsilon", epsilon) != epsilon:
        raise InvalidModel(f"'{file.path}' has another layer_norm_epsilon than rms_epsilon")
    kinds = [
        "full_attention"
        if count
        else "linear_attention"
        if not width
        else "moe"
        if f"blk.{n}.ffn_gate_inp.weight" in file.tensors
        else "mlp"
        for n, (count, width) in enumerate(zip(counts, widths, strict=True))
    ]
    first = {kind: f"blk.{kinds.index(kind)}." for kind in kinds}
    heads, size = table.get("num_attention_heads"), table.get("head_dim")
    if "full_attention" in first:
        rows = file.get_shape(f"{first['full_attention']}attn_q.weight")[0]
        check_heads(file, heads, size, rows)
    inner, mamba = keys.get("ssm.inner_size"), table.get("mamba_num_heads")
    if type(inner) is not int or type(mamba) is not int or mamba < 1 or inner % mamba:
        raise InvalidModel(f"'{file.path}' has {mamba!r:.40} heads of {inner!r:.40} in all")
    recurrent, dense = first.get("linear_attention", ""), first.get("mlp", "")
    return {
        "layers_block_type": kinds,
        "intermediate_size": max(widths) or inner,
        "num_key_value_heads": max(counts) or heads,
        "mamba_head_dim": inner // mamba,
        "use_conv_bias": f"{recurrent}ssm_conv1d.bias" in file.tensors,
        "use_bias": f"{recurrent}ssm_in.bias" in file.tensors,
        "mlp_bias": f"{dense}ffn_up.bias" in file.tensors,
    }


def _read_list(file: GgufFile, keys: dict[str, Any], key: str, blocks: int) -> list[int]:
    """Return a list by block, of those that do not only predict further, one number or none."""
    found = keys.get(key)
    rows = found[:blocks] if isinstance(found, list) else []
    if (
        not rows
        or len(rows) != blocks
        or any(type(n) is not int for n in rows)
        or len({*rows, 0}) > 2
    ):
        raise InvalidModel(
            f"'{file.path}' has {key} = {found!r:.40}; a list of 0 and one other number is wanted, "
            "one per block"
        )
    return rows
