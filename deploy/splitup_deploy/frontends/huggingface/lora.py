"""LoRA adapters in PEFT's form, merged into a model's weights while these are read.

A weight W [out, in] becomes W + alpha / r * B A, with A [r, in] and B [out, r]. It is computed in
float32 and rounded once, to the dtype of W. Source: arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from splitup.core.errors import InvalidModel
from splitup.core.tensors import ITEM_BYTES, TensorSpec
from splitup.graph.arrays import decode_array, encode_array, round_array
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.huggingface.checkpoint import (
    FLOAT_DTYPES,
    DirectoryWeights,
    read_json,
    read_weight_file,
)
from splitup_deploy.frontends.weight_sources import WeightSource, name_some

_FILE: Final = "adapter_model.safetensors"
_MATRIX: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_KEY: Final = re.compile(r"[A-Za-z0-9_.]+")
# Fields about training, or that say again what the adapter's tensors say.
_HARMLESS: Final = tuple(
    """
    peft_type task_type auto_mapping base_model_name_or_path revision peft_version inference_mode
    target_modules exclude_modules layers_to_transform layers_pattern rank_pattern lora_dropout
    megatron_core qalora_group_size loftq_config eva_config corda_config lora_ga_config
    runtime_config ensure_weight_tying keywords
    """.split()
)
# Variations that compute something else.
_OFF: Final = tuple(
    """
    use_rslora use_dora modules_to_save fan_in_fan_out use_qalora use_bdlora lora_bias
    trainable_token_indices target_parameters layer_replication alora_invocation_tokens
    megatron_config arrow_config kasa_config velora_config monteclora_config
    """.split()
)
# How training began. Others ("pissa", "olora") change the model's own weights first, and a file
# does not say for which ones it is.
_STARTS: Final = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class _Merged:
    """A weight with its adapter, read row by row."""

    source: WeightSource
    low: WeightSource  # A
    high: WeightSource  # B
    scale: float

    def read(self) -> Iterator[bytes]:
        """Yield the rows; holds the adapter's two matrices."""
        low, high = (
            decode_array(one.spec, b"".join(one.read())).astype(np.float32)
            for one in (self.low, self.high)
        )
        dtype, columns = self.source.spec.dtype, self.source.spec.shape[1]
        row_bytes, done, rest = columns * ITEM_BYTES[dtype], 0, b""
        for chunk in self.source.read():
            data = rest + chunk
            count = len(data) // row_bytes
            rest = data[count * row_bytes :]
            rows = decode_array(TensorSpec("", dtype, (count, columns)), data[: count * row_bytes])
            change = np.zeros((count, columns), np.float32)
            for column, row in zip(high[done : done + count].T, low, strict=True):
                change += column[:, None] * row  # a product of matrices rounds as each machine does
            result = rows.astype(np.float32) + change * np.float32(self.scale)
            yield encode_array(dtype, round_array(dtype, result))
            done += count


def _merge(
    low: WeightSource, high: WeightSource, scale: float, source: WeightSource
) -> WeightSource:
    return replace(source, parts=(_Merged(source, low, high, scale),), names=())


def merge_adapter(directory: Path, weights: DirectoryWeights, rename: Callable[[str], str]) -> str:
    """Merge the adapter in a directory; return what to say of it. Raises InvalidModel."""
    find_alpha = _read_config(directory)
    path = directory / _FILE
    if not path.is_file():
        raise InvalidModel(f"'{directory}' has no {_FILE}: save the adapter with a newer PEFT")
    pairs: dict[str, dict[str, WeightSource]] = {}
    for name, source in read_weight_file(path).items():
        match = _MATRIX.fullmatch(name)
        if match is None or source.spec.dtype not in FLOAT_DTYPES or len(source.spec.shape) != 2:
            raise InvalidModel(
                f"'{path}' has a tensor '{name:.120}', {source.spec}, which is no matrix of a LoRA "
                "adapter for linear layers: not supported; one for the final hidden state is for "
                "'splitup adapter-host'"
            )
        pairs.setdefault(match[1], {})[match[2]] = source
    if not pairs:
        raise InvalidModel(f"'{path}' has no tensors")
    for module, pair in pairs.items():
        if len(pair) != 2:
            raise InvalidModel(f"'{path}' has one matrix of '{module:.120}'; two are wanted")
        low, high = pair["A"], pair["B"]
        rank = low.spec.shape[0]
        shape = (high.spec.shape[0], low.spec.shape[1])
        if rank < 1 or high.spec.shape[1] != rank:
            raise InvalidModel(f"'{path}' has {low.spec} and {high.spec} for '{module:.120}'")
        scale = find_alpha(module) / rank
        weights.change(
            rename(f"{module}.weight"),
            shape,
            partial(_merge, low, high, scale),
        )
    return f"the adapter '{directory}' is merged into {name_some(list(pairs))}"


def _read_config(directory: Path) -> Callable[[str], float]:
    """Return a function that gives a module's alpha."""
    table: dict[str, Any] = read_json(directory / "adapter_config.json")
    fields = Fields(table, "adapter_config.json")
    if fields.get("peft_type") != "LORA":
        raise fields.refuse("peft_type", "LORA")
    fields.skip(*_HARMLESS, "r")
    for key in _OFF:
        if fields.get(key):
            raise fields.refuse(key, "null or false: merge it with PEFT's merge_and_unload")
    fields.expect("bias", "none")
    if fields.get("init_lora_weights", True) not in _STARTS:
        raise fields.refuse(
            "init_lora_weights", f"{', '.join(map(str, _STARTS))}: others change the model itself"
        )
    alpha, patterns = fields.get_number("lora_alpha"), fields.get_fields("alpha_pattern")
    changed: dict[str, float] = {}
    for key in fields.get("alpha_pattern", {}) if patterns is not None else ():
        if patterns is None or _KEY.fullmatch(key) is None:
            raise fields.refuse("alpha_pattern", "names of modules, no patterns")
        changed[key] = patterns.get_number(key)
    fields.check_all_read()

    def find_alpha(module: str) -> float:
        return next((n for key, n in changed.items() if f".{module}".endswith(f".{key}")), alpha)

    return find_alpha
