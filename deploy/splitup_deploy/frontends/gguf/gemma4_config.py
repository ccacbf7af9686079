"""Gemma 4 in GGUF files: lists by layer, and names of their own for sizes of layers with a window.

Sources: llama.cpp's conversion/gemma.py and src/models/gemma4.cpp.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.gguf.header import GgufFile

# What a file's factors say of a pair of elements that is not rotated.
UNTURNED: Final = struct.unpack("<f", struct.pack("<f", 1e30))[0]
_TOKEN_TABLE: Final = "per_layer_token_embd.weight"


def read_gemma4(file: GgufFile, keys: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that has those of ``table``."""
    layers = table["num_hidden_layers"]
    pattern = read_pattern(file, keys, layers)
    near, far = keys.get("attention.key_length_swa"), keys.get("attention.key_length")
    heads, cached = table.get("num_attention_heads"), table.get("num_key_value_heads")
    counts = cached if isinstance(cached, list) else [cached] * layers
    for key in ("attention.value_length", "rope.dimension_count"):
        file.expect(keys, {key: far, f"{key}_swa": near})
    _check_blocks(file, heads, [(near if is_near else far) for is_near in pattern], counts)
    rows = {str(n): {"num_key_value_heads": counts[n], "head_dim": far} for n in _find(pattern, 0)}
    local = [counts[n] for n in _find(pattern, 1)] or counts
    if len(set(local)) != 1:
        raise InvalidModel(f"'{file.path}' has {local!r:.40} key heads; one number is supported")
    first = f"blk.{_find(pattern, 0)[0]}." if False in pattern else "blk.0."
    ropes = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": table.pop("rope_theta", 1_000_000.0),
            "partial_rotary_factor": 1.0,  # the factors say which pairs are not turned
        },
        "sliding_attention": {"rope_theta": keys.get("rope.freq_base_swa", 10_000.0)},
    }
    vectors = file.get_shape(_TOKEN_TABLE)[0] if _TOKEN_TABLE in file.tensors else 1
    return {
        **_read_widths(file, table, layers),
        "head_dim": near,
        "num_key_value_heads": local[0],
        "per_layer_config": rows,
        "attention_k_eq_v": f"{first}attn_v.weight" not in file.tensors,
        "layer_types": name_layers(pattern),
        "rope_parameters": ropes,
        "enable_moe_block": table.get("num_experts", 0) != 0,
        "vocab_size_per_layer_input": vectors,
    }


def read_pattern(file: GgufFile, keys: dict[str, Any], layers: int) -> list[bool]:
    """Return for each block whether it has a window."""
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers or not set(pattern) <= {True, False}:
        raise InvalidModel(
            f"'{file.path}' has attention.sliding_window_pattern = {pattern!r:.40}; a list of yes "
            "and no is wanted, one per block"
        )
    return pattern


def name_layers(pattern: list[bool]) -> list[str]:
    """Return what a config.json calls these blocks."""
    return [f"{'sliding' if is_near else 'full'}_attention" for is_near in pattern]


def read_turned(file: GgufFile, name: str, count: int) -> int:
    """Return how many of ``count`` pairs of a head are turned.

    Their factors are 1, those of the others too large to turn anything.
    """
    factors = file.read_floats(name, count)
    turned = factors.count(1.0)
    if factors != (1.0,) * turned + (UNTURNED,) * (count - turned):
        raise InvalidModel(f"'{file.path}' has {name} of other numbers than 1 and 1e30")
    return turned


def _find(pattern: list[bool], kind: int) -> list[int]:
    return [layer for layer, is_near in enumerate(pattern) if is_near == kind]


def _check_blocks(file: GgufFile, heads: Any, sizes: list[Any], counts: list[Any]) -> None:
    """Raise InvalidModel before a table is computed for absent heads."""
    if len(counts) != len(sizes):
        raise InvalidModel(f"'{file.path}' has key heads for {len(counts)} blocks")
    for layer, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        rows = file.get_shape(f"blk.{layer}.attn_q.weight")[0]
        if any(type(n) is not int or n < 1 for n in (heads, size, count)) or heads * size != rows:
            raise InvalidModel(
                f"'{file.path}' says {heads!r:.40} heads of {size!r:.40}, {count!r:.40} of keys; "
                f"the query of block {layer} has {rows} rows"
            )


def _read_widths(file: GgufFile, table: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the width of MLPs, which may be twice as wide where keys are borrowed."""
    width, borrowed = table.get("intermediate_size"), table.get("num_kv_shared_layers")
    widths = width if isinstance(width, list) else [width] * layers
    if type(borrowed) is not int or not 0 <= borrowed < layers or len(widths) != layers:
        raise InvalidModel(f"'{file.path}' borrows keys in {borrowed!r:.40} of {layers} blocks")
    own, others = widths[: layers - borrowed], widths[layers - borrowed :]
    one = own[0] if type(own[0]) is int else 0
    is_double = bool(others) and others[0] == 2 * one
    if own != [one] * len(own) or others != [one * (1 + is_double)] * borrowed:
        raise InvalidModel(
            f"'{file.path}' has feed_forward_length = {width!r:.40}; one number is supported, and "
            "twice that where keys are borrowed"
        )
    return {"intermediate_size": one, "use_double_wide_mlp": is_double}
