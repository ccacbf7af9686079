"""GGUF files of the Llama family: llama (with Mistral and Mixtral), qwen2, qwen3 and qwen3moe.

Quantised weights stay as they are in the file, uint8 blocks, and are dequantised inside the graph.
The metadata are read as a config.json of the same family would be. Where the tokenizer is a
byte-level BPE it becomes a tokenizer.json; with any other one the model is compiled as a function
of token ids.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from splitup.errors import InvalidModel
from splitup.tensors import TensorSpec
from splitup_deploy.frontends import moe
from splitup_deploy.frontends.decoder import DecoderConfig, trace_decoder
from splitup_deploy.frontends.families import ARCHITECTURES
from splitup_deploy.frontends.fields import Fields
from splitup_deploy.frontends.gguf_file import GgufFile, GgufTensor, read_gguf
from splitup_deploy.frontends.gguf_tokenizer import make_tokenizer
from splitup_deploy.frontends.model import Sizes, SourceModel, Text
from splitup_deploy.weights import FileSlice, Part, WeightSource

FAMILIES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_MIXTRAL: Final = "MixtralForCausalLM"  # a llama with experts
_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.([0-9]+)\.(\w+)")
_EXPERT_TENSORS: Final = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
# a family's metadata key -> the field of config.json with the same meaning
_FIELDS: Final = {
    "block_count": "num_hidden_layers",
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
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_CHECKED: Final = (
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
_TENSORS: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_PLAIN: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_RADIANS: Final = 16  # models turn by at most 1; the series for sines is slow far from 0
_ROPE_FACTORS: Final = "rope_freqs.weight"  # how Llama 3.1's scaling is written down


def is_gguf_file(source: str) -> bool:
    """Say whether ``source`` is an existing file called *.gguf."""
    return source.endswith(".gguf") and Path(source).is_file()


def load_gguf(source: str, sizes: Sizes) -> SourceModel:
    """Trace a GGUF file; raises InvalidModel naming the file and what is not supported."""
    file = read_gguf(Path(source))
    family = file.metadata.get("general.architecture")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InvalidModel(
            f"'{source}' has the architecture {family!r:.40}; supported: {', '.join(FAMILIES)}"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise InvalidModel(f"'{source}' is one of several parts; merge them with llama-gguf-split")
    config = read_config(file, family, sizes.context)
    weights = GgufWeights(file, config, interleaved=family == "llama")
    traced = trace_decoder(config, weights, sizes.chunk, moe.choose_feed_forward(config))
    weights.check_all_read((_ROPE_FACTORS,))
    tokenizer = make_tokenizer(file.metadata, config.vocab)
    if tokenizer is None:
        return SourceModel("function", traced, None)
    text = Text(tokenizer, _read_eos_ids(file, config.vocab), config.vocab, config.context)
    return SourceModel("text-generation", traced, text)


def read_config(file: GgufFile, family: str, context: int | None) -> DecoderConfig:
    """Read the metadata of a family; raises InvalidModel for a key that may change the results."""
    prefix = f"{family}."
    keys = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    for key in keys:
        if key not in _FIELDS and key not in _ROPE_FIELDS and key not in _CHECKED:
            raise InvalidModel(f"'{file.path}' has the key '{prefix}{key:.80}', which is unknown")
    table: dict[str, Any] = {name: keys[key] for key, name in _FIELDS.items() if key in keys}
    table["vocab_size"] = _get_shape(file, "token_embd.weight")[0]
    table["tie_word_embeddings"] = "output.weight" not in file.tensors
    table["rope_scaling"] = _read_scaling(file, keys)
    heads, hidden = table.get("num_attention_heads"), table.get("hidden_size")
    if type(heads) is int and type(hidden) is int and heads > 0:
        table.setdefault("head_dim", hidden // heads)
    table.setdefault("num_key_value_heads", heads)
    rows, size = _get_shape(file, "blk.0.attn_q.weight")[0], table.get("head_dim")
    # before any table is computed for heads that the file does not have
    if type(heads) is not int or type(size) is not int or heads * size != rows:
        raise InvalidModel(
            f"'{file.path}' says {heads!r:.40} heads of {size!r:.40}; its query has {rows} rows"
        )
    architecture = FAMILIES[family]
    if family == "llama" and keys.get("expert_count", 0) != 0:
        architecture = _MIXTRAL
    table.update(_read_experts(keys, architecture))
    fields = Fields(table, f"'{file.path}'")
    config = {**ARCHITECTURES, **moe.ARCHITECTURES}[architecture](fields, context)
    fields.check_all_read()
    experts = config.experts if isinstance(config, moe.MoeConfig) else None
    for key, wanted in (
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
        ("vocab_size", config.vocab),
        ("expert_count", experts.count if experts else 0),
        ("expert_used_count", experts.active if experts else 0),
        ("expert_feed_forward_length", experts.intermediate if experts else 0),
        ("tensor_data_layout", "Meta AI original pth"),
    ):
        if keys.get(key, wanted) != wanted:
            raise InvalidModel(
                f"'{file.path}' has {prefix}{key} = {keys[key]!r:.40}; supported: {wanted}"
            )
    window = keys.get("attention.sliding_window")
    if window is not None and not (type(window) is int and window >= config.context):
        raise InvalidModel(
            f"'{file.path}' lets a token see {window!r:.40} others only, which is not supported "
            "for GGUF files: compile it with a context of at most that"
        )
    frequencies = _divide(file, config)
    if max(frequencies) > MAX_RADIANS:
        raise InvalidModel(
            f"'{file.path}' turns heads by more than {MAX_RADIANS} radians per position: "
            "its rope.freq_base or factors are wrong"
        )
    return replace(
        config,
        rope=replace(config.rope, frequencies=frequencies),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )


def _read_experts(keys: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the fields of experts, as a config.json of the architecture has them."""
    count, active = keys.get("expert_count"), keys.get("expert_used_count")
    if architecture == _MIXTRAL:
        return {"num_local_experts": count, "num_experts_per_tok": active}
    if architecture != FAMILIES["qwen3moe"]:
        return {}
    return {
        "num_experts": count,
        "num_experts_per_tok": active,
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "norm_topk_prob": True,  # the architecture has no key for it
    }


def _read_scaling(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise InvalidModel(f"'{file.path}' scales positions by {kind!r:.40}; use linear or yarn")
    values = {name: keys[key] for key, name in _ROPE_FIELDS.items() if key in keys}
    if kind == "linear":
        values = {"factor": values.get("factor")}
    return {"rope_type": kind, **values}


def _divide(file: GgufFile, config: DecoderConfig) -> tuple[Decimal, ...]:
    """Return the rope's frequencies, divided by the factors in the file if there are some."""
    tensor = file.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return config.rope.frequencies
    if tensor.format.name != "F32" or tensor.shape != (config.rope.pairs,):
        raise InvalidModel(f"'{file.path}' has {_ROPE_FACTORS} of another shape than its heads")
    data = b"".join(FileSlice(file.path, tensor.start, tensor.end).read())
    factors = struct.unpack(f"<{config.rope.pairs}f", data)
    if not all(1e-6 < factor < 1e6 for factor in factors):
        raise InvalidModel(f"'{file.path}' has a {_ROPE_FACTORS} that is no sensible number")
    return config.rope.divide(factors).frequencies


def _get_shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise InvalidModel(f"'{file.path}' has no tensor '{name}'")
    return file.tensors[name].shape


def _read_eos_ids(file: GgufFile, vocab: int) -> tuple[int, ...]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {file.metadata.get(f"tokenizer.ggml.{name}") for name in names} - {None}
    if not all(type(item) is int and 0 <= item < vocab for item in ids):
        raise InvalidModel(f"'{file.path}' ends texts with a token that does not exist")
    return tuple(sorted(item for item in ids if isinstance(item, int)))


@dataclass(frozen=True, slots=True)
class SplitHeads:
    """Rows of a file with every head's pairs side by side, read with them half a head apart.

    The converter of the llama architecture reorders query and key heads so that elements 2i and
    2i + 1 turn together; the step function turns i and i + head_dim / 2.
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


class GgufWeights:
    """The tensors of a file by their Hugging Face names."""

    def __init__(self, file: GgufFile, config: DecoderConfig, *, interleaved: bool) -> None:
        self._file, self._head_dim, self._interleaved = file, config.head_dim, interleaved
        self._asked: set[str] = set()
        experts = config.experts if isinstance(config, moe.MoeConfig) else None
        self._experts = experts.count if experts else 0

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape.

        A quantised one has dtype uint8 and shape [rows, blocks, bytes per block].
        """
        tensor, expert = self._find(name)
        whole = shape if expert is None else (self._experts, *shape)
        if tensor.shape != whole:
            raise InvalidModel(
                f"tensor '{tensor.name}' in '{self._file.path}' is {list(tensor.shape)}; "
                f"the metadata want {list(whole)}"
            )
        part: Part = FileSlice(self._file.path, tensor.start, tensor.end)
        if expert is not None:
            size = (tensor.end - tensor.start) // self._experts
            start = tensor.start + expert * size
            part = FileSlice(self._file.path, start, start + size)
        turned = ".self_attn.q_proj." in name or ".self_attn.k_proj." in name
        if self._interleaved and turned:
            row_bytes = (tensor.end - tensor.start) // shape[0]
            part = SplitHeads(
                FileSlice(self._file.path, tensor.start, tensor.end), row_bytes, self._head_dim
            )
        form = tensor.format
        if form.name in _PLAIN:
            return WeightSource(TensorSpec(name, _PLAIN[form.name], shape), (part,))
        blocks = (*shape[:-1], shape[-1] // form.elements, form.nbytes)
        return WeightSource(TensorSpec(name, "uint8", blocks), (part,), form.name)

    def can_join(self, names: list[str]) -> bool:
        """Say whether these weights are stored in the same way."""
        return len({self._find(name)[0].format for name in names}) == 1

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return weights of (name, rows) put under each other, called ``name``."""
        sources = [self.get(part, rows, *shape[1:]) for part, rows in parts]
        first = sources[0].spec
        spec = TensorSpec(name, first.dtype, (shape[0], *first.shape[1:]))
        joined = tuple(part for source in sources for part in source.parts)
        return WeightSource(spec, joined, sources[0].encoding)

    def check_all_read(self, allowed: tuple[str, ...]) -> None:
        """Raise InvalidModel for a tensor that nobody asked for: it would change the results."""
        for name in self._file.tensors:
            if name not in self._asked and name not in allowed:
                raise InvalidModel(
                    f"'{self._file.path}' has a tensor '{name}' for which its architecture has no "
                    "use here: it is an unknown variation"
                )

    def _find(self, name: str) -> tuple[GgufTensor, int | None]:
        """Return the tensor that holds a weight, and which of its experts' that is."""
        stem, _, kind = name.rpartition(".")
        expert = None
        if stem in _TENSORS:
            place = _TENSORS[stem]
        else:
            layer, _, rest = stem.removeprefix("model.layers.").partition(".")
            if (match := _EXPERT.fullmatch(rest)) is not None:
                expert, rest = int(match[1]), _EXPERT_TENSORS[match[2]]
            place = f"blk.{layer}.{_LAYER_TENSORS.get(rest, rest)}"
        found = f"{place}.{kind}"
        self._asked.add(found)
        _get_shape(self._file, found)
        return self._file.tensors[found], expert
