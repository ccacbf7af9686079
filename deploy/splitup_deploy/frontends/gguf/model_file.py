"""The tensors of a GGUF file, by the names that its family's weights have at Hugging Face.

Quantised weights stay uint8 blocks, as in the file, and are dequantised inside the graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.gguf.config import LONG_FACTORS, ROPE_FACTORS
from splitup_deploy.frontends.gguf.family_table import Family
from splitup_deploy.frontends.gguf.header import GgufFile, GgufTensor
from splitup_deploy.frontends.weight_sources import (
    FilePart,
    FileSlice,
    StoredWeights,
    WeightSource,
    describe_left_out,
)

_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.([0-9]+)\.(\w+)")
_EXPERT_TENSORS: Final = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_HALVES: Final = ("ffn_gate_exps", "ffn_up_exps")
_BOTH: Final = "ffn_gate_up_exps"
_TENSORS: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_LAYER_TENSORS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.proj": "ffn_gate_inp",
    **{
        f"{module}.{part}_proj": f"ffn_{part}_shexp"
        for module in ("mlp.shared_expert", "mlp.shared_experts", "block_sparse_moe.shared_experts")
        for part in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.fc1_latent_proj": "ffn_latent_down",
    "mlp.fc2_latent_proj": "ffn_latent_up",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "mamba.in_proj": "ssm_in",
    **{
        f"{module}.{part}": f"ssm_{part.removesuffix('_proj')}"
        for module in ("linear_attn", "mamba")
        for part in ("conv1d", "norm", "out_proj")
    },
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}
# names that do not end in weight or bias
_PARAMETERS: Final = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "mamba.D": "ssm_d",
    "mlp.router.scale": "ffn_gate_inp.scale",
    "mlp.router.per_expert_scale": "ffn_down_exps.scale",
    ".layer_scalar": "layer_output_scale.weight",
    **{f"mlp.experts.{part}_proj_bias": f"ffn_{part}_exps.bias" for part in ("gate", "up", "down")},
    **{f"{module}.A_log": "ssm_a" for module in ("linear_attn", "self_attn", "mamba")},
    **{f"{module}.dt_bias": "ssm_dt.bias" for module in ("linear_attn", "self_attn", "mamba")},
}
_PLAIN: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class SplitHeads:
    """Rows of query or key heads, read in the order that the step function's rope expects.

    The converter of the llama architecture reorders the heads so that rope rotates element 2i with
    2i + 1; the step function rotates i with i + head_dim / 2.
    """

    source: FileSlice
    row_bytes: int
    head_dim: int

    def read(self) -> Iterator[bytes]:
        """Yield the rows, one head at a time."""
        head_bytes = self.row_bytes * self.head_dim
        for start in range(self.source.start, self.source.end, head_bytes):
            data = b"".join(FileSlice(self.source.path, start, start + head_bytes).read())
            rows = [data[at : at + self.row_bytes] for at in range(0, head_bytes, self.row_bytes)]
            yield b"".join(rows[0::2] + rows[1::2])


class GgufWeights(StoredWeights):
    """The tensors of a file by their Hugging Face names."""

    def __init__(
        self, file: GgufFile, config: DecoderConfig | None = None, family: Family | None = None
    ) -> None:
        """Find the tensors of a decoder of a family; of another model, a subclass names them."""
        self._file, self._names = file, {} if family is None else family.names
        self._turned = config.head_dim if config and family and family.interleaved else 0
        # the configuration has read the factors
        self._asked = set() if config is None else {ROPE_FACTORS, *LONG_FACTORS}
        self._experts = config.experts.count if config and config.experts else 0

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape.

        A quantised one has dtype uint8 and shape [rows, blocks, bytes per block].
        """
        tensor, expert, half = self._find(name)
        whole = shape if expert is None else (self._experts, *shape)
        if half is not None:
            whole = (self._experts, 2 * shape[0], *shape[1:])
        stored = tensor.shape
        if name.endswith(".mamba.norm.weight"):  # a row for each group
            stored = (math.prod(stored),)
        if _squeeze(stored) != _squeeze(whole):
            raise InvalidModel(
                f"tensor '{tensor.name}' in '{tensor.path}' is {list(tensor.shape)}; "
                f"the metadata want {list(whole)}"
            )
        part: FilePart = FileSlice(tensor.path, tensor.start, tensor.end)
        if expert is not None:
            size = (tensor.end - tensor.start) // self._experts
            start = tensor.start + expert * size
            if half is not None:
                size //= 2
                start += half * size
            part = FileSlice(tensor.path, start, start + size)
        is_turned = ".self_attn.q_proj." in name or ".self_attn.k_proj." in name
        if self._turned and is_turned:
            row_bytes = (tensor.end - tensor.start) // shape[0]
            part = SplitHeads(
                FileSlice(tensor.path, tensor.start, tensor.end), row_bytes, self._turned
            )
        form = tensor.format
        if form.name in _PLAIN:
            return WeightSource(TensorSpec(name, _PLAIN[form.name], shape), (part,))
        blocks = (*shape[:-1], shape[-1] // form.elements, form.nbytes)
        return WeightSource(TensorSpec(name, "uint8", blocks), (part,), form.name)

    def can_join(self, names: list[str]) -> bool:
        """Say whether these weights have the same storage format."""
        return len({self._find(name)[0].format for name in names}) == 1

    def check_all_read(self, others: Mapping[str, str]) -> tuple[str, ...]:
        """Return what to say of tensors that were left out (``describe_left_out``)."""
        return describe_left_out(
            (name for name in self._file.tensors if name not in self._asked),
            others,
            f"'{self._file.path}' has a tensor",
            "its architecture has no use here: it is an unknown variation",
        )

    def _find(self, name: str) -> tuple[GgufTensor, int | None, int | None]:
        """Return the tensor that holds a weight, which of its experts that is, and which half.

        An expert's gate and up projection may be the halves of one matrix.
        """
        stem, _, kind = name.rpartition(".")
        expert, half = None, None
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        if stem in _TENSORS:
            found = f"{_TENSORS[stem]}.{kind}"
        elif (parameter := _PARAMETERS.get(f"{rest}.{kind}")) is not None:
            found = f"blk.{layer}.{parameter}"
        else:
            if (match := _EXPERT.fullmatch(rest)) is not None:
                expert, rest = int(match[1]), _EXPERT_TENSORS[match[2]]
                if rest in _HALVES and f"blk.{layer}.{_BOTH}.{kind}" in self._file.tensors:
                    half, rest = _HALVES.index(rest), _BOTH
            place = _LAYER_TENSORS.get(rest, rest)
            found = f"blk.{layer}.{self._names.get(place, place)}.{kind}"
        return self.take(found), expert, half

    def take(self, name: str) -> GgufTensor:
        """Return a tensor by its own name; then it counts as read. Raises InvalidModel."""
        self._asked.add(name)
        self._file.get_shape(name)
        return self._file.tensors[name]


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without axes of length one, which converters drop."""
    return tuple(size for size in shape if size != 1)
