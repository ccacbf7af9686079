"""Small quantised checkpoints in every format that is read, and the numbers they stand for.

Each function turns a matrix into the tensors of one format, by the format's own description, and
returns the float32 matrix that its formula gives for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.deploy.llamas import TINY, TOKENIZER, make_weights

Stored = dict[str, tuple[str, np.ndarray]]  # by the name's last part: safetensors' dtype, numbers
Quantise = Callable[[np.ndarray], tuple[Stored, np.ndarray]]
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "max_position_embeddings": 80,
}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def make_brain(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of bfloat16 numbers, and the numbers."""
    bits = (array.astype("<f4").view("<u4") >> 16).astype("<u2")
    return bits, (bits.astype("<u4") << 16).view("<f4")


def decode_float8(codes: np.ndarray) -> np.ndarray:
    """Return E4M3 numbers: a sign, four bits of exponent, three of mantissa."""
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(np.float64)
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    return np.where(codes & 128, -value, value).astype(np.float32)


def draw_float8(shape: tuple[int, ...]) -> np.ndarray:
    """Return random codes, of all numbers but NaN."""
    codes = np.random.default_rng(shape[0]).integers(0, 254, shape, dtype=np.uint8)
    return np.where(codes & 127 == 127, codes - 1, codes).astype(np.uint8)


def spread(scale: np.ndarray, rows: int, columns: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the scale of each element of a matrix, for blocks of rows and columns."""
    return np.repeat(np.repeat(scale, rows, 0), columns, 1)[: shape[0], : shape[1]]


def draw_scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).uniform(0.5, 1.5, shape).astype(np.float32)


def fp8_blocks(matrix: np.ndarray) -> tuple[Stored, np.ndarray]:
    shape, codes = matrix.shape, draw_float8(matrix.shape)
    scale = draw_scales(-(-shape[0] // 128), -(-shape[1] // 128)) * 2**-10
    value = decode_float8(codes) * spread(scale, 128, 128, shape)
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scale)}, value


def fp8_static(matrix: np.ndarray) -> tuple[Stored, np.ndarray]:
    codes, (bits, scale) = draw_float8(matrix.shape), make_brain(np.array(2**-10 * 1.3))
    stored = {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("BF16", bits)}
    return stored | {"activation_scale": ("BF16", bits)}, decode_float8(codes) * scale


def fp8_channels(matrix: np.ndarray) -> tuple[Stored, np.ndarray]:
    codes = draw_float8(matrix.shape)
    bits, scale = make_brain(draw_scales(len(matrix), 1) * 2**-10)
    stored = {"weight": ("F8_E4M3", codes), "weight_scale": ("BF16", bits)}
    return stored, decode_float8(codes) * scale


def int8_channels(matrix: np.ndarray) -> tuple[Stored, np.ndarray]:
    scale = draw_scales(len(matrix), 1) * np.float32(2**-8)
    q = np.random.default_rng(1).integers(-128, 128, matrix.shape).astype(np.int8)
    return {"weight": ("I8", q), "weight_scale": ("F32", scale)}, q * scale


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return int32 words of neighbouring numbers in a row, the first in the lowest bits."""
    parts = numbers.astype(np.uint32).reshape(len(numbers), -1, 32 // bits)
    words = np.zeros(parts.shape[:2], np.uint32)
    for place in range(32 // bits):
        words |= parts[:, :, place] << np.uint32(bits * place)
    return words.view(np.int32)


def draw_numbers(shape: tuple[int, ...], bits: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).integers(0, 2**bits, shape)


def packed(bits: int, group: int, *, is_symmetric: bool = True) -> Quantise:
    """Return compressed-tensors' pack-quantized."""

    def quantise(matrix: np.ndarray) -> tuple[Stored, np.ndarray]:
        rows, columns = matrix.shape
        q = draw_numbers(matrix.shape, bits)
        scale, value = make_brain(draw_scales(rows, columns // group) / 2**bits)
        stored: Stored = {
            "weight_packed": ("I32", pack(q, bits)),
            "weight_scale": ("BF16", scale),
            "weight_shape": ("I64", np.array([rows, columns])),
        }
        zero = np.full((rows, columns // group), 2 ** (bits - 1))
        if not is_symmetric:
            zero = draw_numbers(zero.shape, bits)
            stored["weight_zero_point"] = ("I32", np.ascontiguousarray(pack(zero.T, bits).T))
        return stored, ((q - np.repeat(zero, group, 1)) * np.repeat(value, group, 1)).astype("f4")

    return quantise


def gptq(bits: int, group: int, *, added: int = 1) -> Quantise:
    def quantise(matrix: np.ndarray) -> tuple[Stored, np.ndarray]:
        rows, columns = matrix.shape
        q, zero = draw_numbers((columns, rows), bits), draw_numbers((columns // group, rows), bits)
        scale = (draw_scales(columns // group, rows) / 2**bits).astype("<f2")
        stored: Stored = {
            "qweight": ("I32", np.ascontiguousarray(pack(q.T, bits).T)),
            "qzeros": ("I32", pack(zero, bits)),
            "scales": ("F16", scale),
            "g_idx": ("I32", (np.arange(columns) // group).astype("<i4")),
        }
        shift = np.repeat(zero + added & 2**bits - 1, group, 0)
        value = (q - shift) * np.repeat(scale, group, 0).astype(np.float32)
        return stored, np.ascontiguousarray(value.T.astype("f4"))

    return quantise


def awq(group: int) -> Quantise:
    def pack_columns(numbers: np.ndarray) -> np.ndarray:
        order = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_COLUMNS]
        return pack(order.reshape(len(numbers), -1), 4)

    def quantise(matrix: np.ndarray) -> tuple[Stored, np.ndarray]:
        rows, columns = matrix.shape
        q, zero = draw_numbers((columns, rows), 4), draw_numbers((columns // group, rows), 4)
        scale = (draw_scales(columns // group, rows) / 16).astype("<f2")
        stored: Stored = {
            "qweight": ("I32", pack_columns(q)),
            "qzeros": ("I32", pack_columns(zero)),
            "scales": ("F16", scale),
        }
        value = (q - np.repeat(zero, group, 0)) * np.repeat(scale, group, 0).astype(np.float32)
        return stored, np.ascontiguousarray(value.T.astype("f4"))

    return quantise


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
CASES: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8": ({**_FP8, "weight_block_size": [128, 128]}, fp8_blocks),
    "fp8-static": ({**_FP8, "activation_scheme": "static"}, fp8_static),
    "int4": (compressed("pack-quantized", group_size=32), packed(4, 32)),
    "int4-zeros": (
        compressed("pack-quantized", group_size=64, symmetric=False),
        packed(4, 64, is_symmetric=False),
    ),
    "int8-packed": (compressed("pack-quantized", num_bits=8, group_size=32), packed(8, 32)),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8_channels),
    "float8": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8_channels,
    ),
    "gptq": (_GPTQ, gptq(4, 32)),
    "gptq-8": ({**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, 64, added=0)),
    "awq": (_AWQ, awq(64)),
}


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Write a safetensors file of (dtype, numbers); numpy lacks some of the dtypes."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_quantised(
    directory: Path,
    quantisation: Mapping[str, Any],
    quantise: Quantise,
    *,
    replaced: Mapping[str, tuple[str, np.ndarray]] | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write a directory whose projections are quantised; return config.json and its weights.

    ``replaced`` are tensors to store in place of others, or besides.
    """
    config = {**TINY, **SHAPE, "quantization_config": dict(quantisation)}
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    weights = make_weights(config, scale=0.1)
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj"):
            tensors[name] = ("F32", array)
            continue
        stored, weights[name] = quantise(array)
        tensors |= {f"{stem}.{part}": numbers for part, numbers in stored.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(TOKENIZER)
    write_tensors(directory / "model.safetensors", tensors | dict(replaced or {}))
    return config, weights
