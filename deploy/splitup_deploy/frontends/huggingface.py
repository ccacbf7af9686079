"""Hugging Face directories of the Llama family: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from splitup import limits
from splitup.codec import parse_json
from splitup.errors import InvalidModel
from splitup.tensors import SafeTensor, TensorSpec, validate_safetensors
from splitup_deploy.frontends.llama import LlamaConfig, trace_llama
from splitup_deploy.frontends.model import SourceModel, Text
from splitup_deploy.weights import FileSlice, WeightSource

ARCHITECTURES: Final = ("LlamaForCausalLM",)
FLOAT_DTYPES: Final = ("float32", "float16", "bfloat16")


def is_huggingface_directory(source: str) -> bool:
    """Say whether ``source`` is a directory, which only this front end reads."""
    return Path(source).is_dir()


def load_huggingface(source: str, context: int | None = None) -> SourceModel:
    """Trace a Hugging Face directory; raises InvalidModel naming file and problem."""
    directory = Path(source)
    table = _read_json(directory / "config.json", limits.MAX_CONFIG_BYTES)
    config = parse_config(table, context)
    tokenizer = directory / "tokenizer.json"
    _read_json(tokenizer, limits.MAX_TOKENIZER_BYTES)
    text = Text(tokenizer, _read_eos_ids(directory, table), config.vocab, config.context)
    traced = trace_llama(config, DirectoryWeights(directory))
    return SourceModel("text-generation", traced, text)


def parse_config(table: dict[str, Any], context: int | None) -> LlamaConfig:
    """Read a config.json, in its old and new spellings; raises InvalidModel."""
    names = table.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise InvalidModel(
            f"architecture {names!r:.80} is not supported; these are: {', '.join(ARCHITECTURES)}"
        )
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if table.get(key, plain) != plain:
            raise InvalidModel(
                f"config.json asks for {key} = {table[key]!r:.40}; supported: {plain}"
            )
    hidden = _get_integer(table, "hidden_size")
    heads = _get_integer(table, "num_attention_heads")
    trained = _get_integer(table, "max_position_embeddings")
    config = LlamaConfig(
        layers=_get_integer(table, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_get_integer(table, "intermediate_size"),
        heads=heads,
        kv_heads=_get_integer(table, "num_key_value_heads", heads),
        head_dim=_get_integer(table, "head_dim", hidden // heads),
        vocab=_get_integer(table, "vocab_size"),
        context=trained if context is None else context,
        norm_epsilon=_get_number(table, "rms_norm_eps", 1e-6),
        rope_theta=_get_rope_theta(table),
        tied=table.get("tie_word_embeddings", False) is True,
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise InvalidModel(
            f"config.json asks for {config.heads} heads of {config.head_dim} on "
            f"{config.kv_heads} key-value heads, which do not divide"
        )
    if not 1 <= config.context <= min(trained, limits.MAX_CONTEXT):
        raise InvalidModel(
            f"context {config.context} is not possible; "
            f"the model takes 1 to {min(trained, limits.MAX_CONTEXT)} positions"
        )
    return config


class DirectoryWeights:
    """The tensors of a directory's safetensors files, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = _read_shards(index)
        else:
            files = ["model.safetensors"]
        self._tensors: dict[str, tuple[Path, SafeTensor]] = {}
        for name in files:
            path = directory / name
            if not path.is_file():
                raise InvalidModel(
                    f"'{directory}' has no {name}; weights must be in safetensors files"
                )
            for key, tensor in validate_safetensors(path).items():
                self._tensors[key] = (path, tensor)

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return one weight; raises InvalidModel when it is absent or has another shape."""
        if name not in self._tensors:
            raise InvalidModel(f"'{self._directory}' has no weight '{name}' that config.json wants")
        path, tensor = self._tensors[name]
        if tensor.shape != shape or tensor.dtype not in FLOAT_DTYPES:
            raise InvalidModel(
                f"weight '{name}' in '{path}' is {tensor.dtype}{list(tensor.shape)}; "
                f"config.json wants {list(shape)} in one of {', '.join(FLOAT_DTYPES)}"
            )
        spec = TensorSpec(name, tensor.dtype, shape)
        return WeightSource(spec, (FileSlice(path, tensor.start, tensor.end),))

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return weights of (name, rows) put under each other, called ``name``."""
        sources = [self.get(part, rows, *shape[1:]) for part, rows in parts]
        dtypes = {source.spec.dtype for source in sources}
        if len(dtypes) != 1:
            raise InvalidModel(f"the parts of '{name}' have different dtypes: {sorted(dtypes)}")
        spec = TensorSpec(name, dtypes.pop(), shape)
        return WeightSource(spec, tuple(part for source in sources for part in source.parts))


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > limit:
            raise InvalidModel(f"'{path}' has {size} bytes; more than {limit} is no real one")
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise InvalidModel(f"cannot read '{path}': {error.strerror}") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidModel(f"'{path}' is no JSON object; fetch or export the model again")
    return value


def _read_shards(index: Path) -> list[str]:
    table = _read_json(index, limits.MAX_SAFETENSORS_HEADER_BYTES).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise InvalidModel(f"'{index}' has no weight_map; export the model again")
    names = sorted(set(table.values()))
    if bad := [name for name in names if Path(name).name != name]:
        raise InvalidModel(f"'{index}' names a file outside the model's directory: {bad[0]!r:.80}")
    return names


def _get_integer(table: dict[str, Any], key: str, default: int | None = None) -> int:
    value = table.get(key, default)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= limits.MAX_DIMENSION:
        raise InvalidModel(f"config.json has {key} = {value!r:.40}; a positive integer is wanted")
    return value


def _get_number(table: dict[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise InvalidModel(f"config.json has {key} = {value!r:.40}; a positive number is wanted")
    return float(value)


def _get_rope_theta(table: dict[str, Any]) -> float:
    """Read ``rope_theta`` from the top (old) or from ``rope_parameters`` (new)."""
    for key in ("rope_parameters", "rope_scaling"):
        inner = table.get(key)
        if inner is None:
            continue
        kind = inner.get("rope_type", inner.get("type")) if isinstance(inner, dict) else inner
        if kind != "default":
            raise InvalidModel(f"config.json asks for {key} {kind!r:.40}; supported: 'default'")
        if "rope_theta" in inner:
            return _get_number(inner, "rope_theta", 10000.0)
    return _get_number(table, "rope_theta", 10000.0)


def _read_eos_ids(directory: Path, table: dict[str, Any]) -> tuple[int, ...]:
    value = table.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        value = _read_json(generation, limits.MAX_CONFIG_BYTES).get("eos_token_id", value)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > limits.MAX_PORTS or not all(
        type(item) is int and 0 <= item < limits.MAX_DIMENSION for item in ids
    ):
        raise InvalidModel(f"'{directory}' has eos_token_id = {value!r:.40}; integers are wanted")
    return tuple(sorted(set(ids)))
