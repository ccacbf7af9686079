"""An adapter's weights: read from a folder in PEFT's form, named by digest, made orthonormal.

``adapter_config.json`` has ``r``, ``lora_alpha`` and perhaps ``keywords`` and
``base_model_name_or_path``;
``adapter_model.safetensors`` one pair of tensors ``….lora_A.weight`` [r, width] and
``….lora_B.weight`` [width, r].

Equal weights give equal bytes of ciphertexts on every machine, so that answers can be compared.
Therefore all arithmetic here is rounded in one way: elementwise operations and ``math.fsum``, no
products of matrices, whose order of additions differs between processors.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from splitup.core.codec import parse_json
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.limits import MAX_NAME_CHARS
from splitup.core.tensors import SafeTensor, TensorSpec, validate_safetensors
from splitup.graph.arrays import decode_array
from splitup_private.adapters.layout import Floats, SlotLayout
from splitup_private.adapters.messages import AdapterInfo
from splitup_private.adapters.parameters import ANSWER_BITS, MAX_RANK, MAX_WIDTH, choose_parameters

_DOMAIN: Final = b"splitup-adapter\0"
_FLOATS: Final = ("float16", "bfloat16", "float32")
_MAX_CONFIG_BYTES: Final = 1 << 20
_DEPENDENT: Final = 1e-12  # of a row's length: less is left of it when others span it


@dataclass(frozen=True, slots=True)
class Adapter:
    """W = 2^``info.gain_bits`` · b a, with orthonormal rows a [rank, width] and b [width, rank]."""

    info: AdapterInfo
    a: Floats
    b: Floats

    def compute(self, hidden: npt.NDArray[Any]) -> Floats:
        """Return W h for a hidden state h [width], or for several [n, width], unencrypted."""
        return np.asarray(hidden @ self.a.T @ self.b.T) * 2.0**self.info.gain_bits


def load_adapter(folder: Path, name: str = "") -> Adapter:
    """Read a folder; by default the adapter has its name. Raises InvalidInput, InvalidModel."""
    config = _read_config(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    tensors = validate_safetensors(file)
    pairs = [[key for key in tensors if key.endswith(f".lora_{letter}.weight")] for letter in "AB"]
    if [len(keys) for keys in pairs] != [1, 1] or len(tensors) != 2:
        raise InvalidModel(
            f"{file} has no single pair of lora_A.weight and lora_B.weight: an adapter for "
            "encrypted hidden states changes the final hidden state alone; others are merged by "
            "'splitup-deploy register --adapter'"
        )
    a, b = [_read_tensor(file, keys[0], tensors[keys[0]]) for keys in pairs]
    rank = config["r"]
    if a.shape != (rank, a.shape[-1]) or b.shape != a.shape[::-1]:
        raise InvalidModel(
            f"{file} has A {list(a.shape)} and B {list(b.shape)}; r is {rank}, so they have to be "
            f"[{rank}, width] and [width, {rank}]"
        )
    adapter = make_adapter(a, b, config["lora_alpha"] / rank, name or folder.resolve().name)
    try:
        said = {name: config[name] for name in ("keywords", "base_model")}
        info = AdapterInfo.model_validate(adapter.info.model_dump() | said)
    except ValidationError:
        raise InvalidModel(
            f"{folder / 'adapter_config.json'}: 'keywords' are not up to 64 texts of 1 to 64 "
            "characters"
        ) from None
    return replace(adapter, info=info)


def make_adapter(a: npt.NDArray[Any], b: npt.NDArray[Any], scale: float, name: str) -> Adapter:
    """Return the adapter ``scale`` · B A, of A [rank, width] and B [width, rank].

    Raises InvalidModel for weights that are not finite, InvalidInput for sizes out of bounds.
    """
    rank, width = a.shape
    if not (1 <= rank <= MAX_RANK and rank <= width <= MAX_WIDTH):
        raise InvalidInput(
            f"the adapter '{name}' has rank {rank} and width {width}; the rank is 1 to {MAX_RANK} "
            f"and not above the width, the width at most {MAX_WIDTH}"
        )
    a, b = a.astype(np.float64), b.astype(np.float64) * scale
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InvalidModel(f"the adapter '{name}' has weights that are not finite")
    digest = hashlib.sha256(_DOMAIN + rank.to_bytes(4, "little") + width.to_bytes(4, "little"))
    for array in (a, b):
        digest.update(array.astype("<f8").tobytes())
    a, mixed = _make_orthonormal(a)
    b = sum((np.outer(b[:, row], mixed[row]) for row in range(rank)), np.zeros_like(b))
    longest = max(math.sqrt(math.fsum(row)) for row in (b * b).tolist())
    gain_bits = math.frexp(longest)[1]  # 2^gain_bits is above the longest row
    if not longest or abs(gain_bits) > 64:
        raise InvalidModel(f"the adapter '{name}' changes nothing, or too much: |W| ≈ {longest:g}")
    b = b * 2.0**-gain_bits
    parameters = choose_parameters(width)
    bound = SlotLayout(width, rank, parameters.degree // 2).compute_answer_bound(b)
    spare_bits = math.floor(-math.log2(bound))
    info = AdapterInfo(
        adapter=digest.hexdigest(),
        name=name,
        width=width,
        rank=rank,
        gain_bits=gain_bits,
        answer_bits=gain_bits - spare_bits,
        parameters=parameters,
    )
    return Adapter(info, a, b)


def get_total_bits(info: AdapterInfo) -> int:
    """Return the bits by which the products with a and b scale a hidden state together."""
    return ANSWER_BITS + info.gain_bits - info.answer_bits


def _make_orthonormal(a: Floats) -> tuple[Floats, Floats]:
    """Return orthonormal rows Q and a matrix R, with A = R Q; dependent rows become zero.

    Gram-Schmidt, twice.
    """
    rank = len(a)
    q, r = np.zeros_like(a), np.zeros((rank, rank))
    for row in range(rank):
        rest = a[row]
        for _ in range(2):
            for other in range(row):
                part = math.fsum((rest * q[other]).tolist())
                rest = rest - part * q[other]
                r[row, other] += part
        length = math.sqrt(math.fsum((rest * rest).tolist()))
        if length > _DEPENDENT * math.sqrt(math.fsum((a[row] * a[row]).tolist())):
            r[row, row] = length
            q[row] = rest / length
    return q, r


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            value = parse_json(file.read(_MAX_CONFIG_BYTES))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; name a PEFT folder") from None
    except (ValueError, RecursionError):
        raise InvalidModel(f"{path} is not JSON") from None
    rank, alpha = (value.get(key) for key in ("r", "lora_alpha")) if type(value) is dict else (0, 0)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise InvalidModel(f"{path} has no numbers 'r' and 'lora_alpha'")
    if value.get("bias", "none") != "none" or value.get("use_rslora") or value.get("use_dora"):
        raise InvalidModel(f"{path} asks for biases, rsLoRA or DoRA, which are not supported")
    keywords = value.get("keywords", [])
    if type(keywords) is not list:
        raise InvalidModel(f"{path}: 'keywords' are not in a list")
    base = value.get("base_model_name_or_path")  # a path of its author's machine, perhaps
    base = base[:MAX_NAME_CHARS] if type(base) is str else ""
    return {"r": rank, "lora_alpha": alpha, "keywords": tuple(keywords), "base_model": base}


def _read_tensor(file: Path, key: str, tensor: SafeTensor) -> npt.NDArray[Any]:
    if tensor.dtype not in _FLOATS or len(tensor.shape) != 2:
        raise InvalidModel(f"{file}: '{key}' is no matrix of {', '.join(_FLOATS)}")
    with file.open("rb") as opened:
        opened.seek(tensor.start)
        data = opened.read(tensor.end - tensor.start)
    return decode_array(TensorSpec(key, tensor.dtype, tensor.shape), data)
