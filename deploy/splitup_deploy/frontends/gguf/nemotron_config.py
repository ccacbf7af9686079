"""Nemotron-H and Nemotron 3 in GGUF files: what a block is follows from lists by block.

Sources: llama.cpp's conversion/nemotron.py and src/models/nemotron-h.cpp.
"""

from __future__ import annotations

from typing import Any

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.gguf.header import GgufFile
from splitup_deploy.frontends.gguf.hybrid_config import check_heads


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
