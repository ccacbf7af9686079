"""Hugging Face directories: config.json, weights, tokenizer.json.

Without weights a config.json is enough to preview how a model would be cut.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.decoder.decoder_config import DecoderConfig
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.families import vision_towers
from splitup_deploy.frontends.families.architectures import (
    ARCHITECTURES,
    BORROWED,
    FURTHER,
    UNUSED_INDEXER,
    OpenDecoder,
    find_renaming,
    read_text,
    trace_language_model,
)
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.encoders import find_encoder
from splitup_deploy.frontends.families.text_towers import (
    OTHER_MODULES,
    find_text_tower,
    rename_weight,
)
from splitup_deploy.frontends.huggingface.checkpoint import (
    FLOAT_DTYPES,
    DirectoryWeights,
    read_json,
    read_optional_json,
)
from splitup_deploy.frontends.huggingface.encoder_directory import (
    load_encoder,
    load_encoder_shapes,
)
from splitup_deploy.frontends.huggingface.lora import merge_adapter
from splitup_deploy.frontends.huggingface.quantised_layers import QuantisationConfig
from splitup_deploy.frontends.huggingface.tokenizer_file import read_chat, read_tokenizer
from splitup_deploy.frontends.source_model import Sizes, SourceModel
from splitup_deploy.frontends.weight_sources import Absent, WeightSource


def load_huggingface(source: str, sizes: Sizes | None = None) -> SourceModel:
    """Trace a Hugging Face directory; raises InvalidModel naming file and problem."""
    sizes = sizes or Sizes()
    directory = Path(source)
    whole = read_json(directory / "config.json")
    if sizes.vision:
        weights = DirectoryWeights(directory, vision_towers.rename_weight)
        model = load_vision_tower(whole, sizes, weights)
        notes = weights.check_all_read(vision_towers.OTHER_WEIGHTS)
        return replace(model, traced=replace(model.traced, notes=(*model.traced.notes, *notes)))
    if (found := find_encoder(whole)) is not None:
        if sizes.adapter is not None:
            raise InvalidModel(f"'{source}' is an encoder: adapters are for models that write text")
        if sizes.without is not None:
            raise InvalidModel(f"'{source}' is an encoder, which takes texts: leave out --without")
        return load_encoder(directory, whole, *found, sizes)
    return open_decoder(directory, sizes).trace(sizes)


def load_vision_tower(whole: dict[str, Any], sizes: Sizes, weights: Weights) -> SourceModel:
    """Trace the tower for images that a config.json describes; raises InvalidModel."""
    if sizes != Sizes(vision=True):
        raise InvalidModel("--vision compiles no text: leave out --context, --chunk and --adapter")
    tower = vision_towers.read_vision_tower(split_quantisation(whole)[0])
    return SourceModel("function", vision_towers.trace_vision_tower(tower, weights), None)


def open_decoder(directory: Path, sizes: Sizes) -> OpenDecoder:
    """Read the configuration of a decoder, and find its weights; raises InvalidModel."""
    whole = read_json(directory / "config.json")
    table, config, quantisation = read_decoder(whole, sizes)
    if sizes.images is not None:
        _check_preprocessing(directory)

    def read_tokens() -> tuple[Path | bytes, tuple[int, ...]]:
        tokenizer, eos_id = read_tokenizer(directory)
        return tokenizer, _read_eos_ids(directory, table, eos_id)

    text, notes = read_text(config, sizes, read_tokens, lambda: read_chat(directory))
    if (directory / "modules.json").is_file():  # as of an embedding model that is a decoder
        unread = "modules.json is not read: the model generates text and gives no embeddings"
        notes = (unread, *notes)
    if adapters := sorted(path.name for path in directory.glob("adapter_model.*")):
        raise InvalidModel(
            f"'{directory}' has an adapter, {adapters[0]:.80}: move it and its adapter_config.json "
            "to a directory of their own, and give that with --adapter"
        )
    is_tower = table["architectures"] != whole["architectures"]
    own = find_renaming(table["architectures"][0])

    def rename(name: str) -> str:
        return own(rename_weight(name) if is_tower else name)

    weights = DirectoryWeights(directory, rename, quantisation)
    if sizes.adapter is not None:
        notes += (merge_adapter(sizes.adapter, weights, rename),)
    config = _find_own_head(config, weights)
    others = dict.fromkeys(_list_further_blocks(table, config, weights), FURTHER)
    if config.latent is not None and config.latent.indexer is None:
        blocks = (f"model.layers.{layer}.self_attn." for layer in range(config.layers))
        others |= {f"{block}indexer.": UNUSED_INDEXER for block in blocks}
    for layer in config.borrowed.layers if config.borrowed is not None else ():
        parts = ("k_proj", "v_proj", "k_norm")  # which published files have nevertheless
        others |= {f"model.layers.{layer}.self_attn.{part}.": BORROWED for part in parts}
    if is_tower:
        why = "it takes text only" if config.images is None else "register them with --vision"
        others |= dict.fromkeys(OTHER_MODULES, f"of the towers for images: {why}")
    return OpenDecoder(config, weights, text, others, notes)


def read_decoder(
    whole: dict[str, Any], sizes: Sizes
) -> tuple[dict[str, Any], DecoderConfig, QuantisationConfig | None]:
    """Read the config.json of a decoder; the table is that of its text tower alone."""
    plain, quantisation = split_quantisation(whole)
    table = find_text_tower(plain)
    config = parse_config(table, sizes.context)
    if sizes.images is not None:
        images = vision_towers.read_images(plain, sizes.images, config)
        config = replace(config, images=images)
    return table, config, quantisation


def _check_preprocessing(directory: Path) -> None:
    """Raise InvalidModel for another way to pixels than ``client.images.image_prompts``."""
    path = directory / "preprocessor_config.json"
    table = read_optional_json(path)
    wanted: dict[str, tuple[Any, ...]] = {
        "image_mean": ([0.5, 0.5, 0.5],),
        "image_std": ([0.5, 0.5, 0.5],),
        "rescale_factor": (1 / 255,),
        "resample": (2,),
        "do_pan_and_scan": (None, False),
    }
    for key, values in wanted.items():
        if key in table and table[key] not in values:
            raise InvalidModel(
                f"{path.name} has {key} = {table[key]!r:.40}; supported: {values[-1]!r}"
            )


def split_quantisation(
    whole: dict[str, Any],
) -> tuple[dict[str, Any], QuantisationConfig | None]:
    """Return a config.json without what it says of quantised weights, and that."""
    if isinstance(whole.get("quantization"), dict):
        raise InvalidModel(
            "config.json has 'quantization': the weights are quantised by MLX, which is not "
            "supported; give the directory that they were made from, or one with another format"
        )
    table = dict(whole)
    inner = table.get("text_config")
    found = [table.pop("quantization_config", None)]
    if isinstance(inner, dict):
        table["text_config"] = inner = dict(inner)
        found.append(inner.pop("quantization_config", None))
    found = [one for one in found if one is not None]
    if not found:
        return table, None
    if not isinstance(found[0], dict) or any(one != found[0] for one in found):
        raise Fields(whole).refuse("quantization_config", "one object")
    return table, QuantisationConfig(found[0])


def parse_config(table: dict[str, Any], context: int | None) -> DecoderConfig:
    """Read a config.json, in its old and new spellings; raises InvalidModel."""
    names = table.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(ARCHITECTURES):
        named = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
        raise InvalidModel(
            f"architecture {named[:80]!r} is not supported; those that are: splitup-deploy families"
        )
    fields = Fields(table)
    config = ARCHITECTURES[names[0]](fields, context)
    fields.check_all_read()
    return config


def _find_own_head(config: DecoderConfig, weights: DirectoryWeights) -> DecoderConfig:
    """Return a configuration with a head of its own, if the file has one beside the embedding.

    So does Hugging Face, whatever ``tie_word_embeddings`` says.
    """
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    if not config.tied or head not in weights:
        return config
    if table not in weights:  # of two that are one, either may be stored
        weights.stand_in(table, head)
    elif not weights.is_copy(head, table):
        return replace(config, tied=False)
    return config


def _list_further_blocks(
    table: dict[str, Any], config: DecoderConfig, weights: DirectoryWeights
) -> tuple[str, ...]:
    """Return the name prefixes of blocks that only predict tokens further ahead.

    Such a block has a norm for the token before it; a usual block behind the last is no such one.
    """
    count = table.get("num_nextn_predict_layers")
    last = config.layers + min(count, tuning.MAX_LAYERS) if type(count) is int else 0
    blocks = (f"model.layers.{layer}." for layer in range(config.layers, last))
    found = tuple(block for block in blocks if f"{block}enorm.weight" in weights)
    is_named = table.get("mtp_num_hidden_layers") or last > config.layers
    return (*found, "mtp.") if is_named else found


def _read_eos_ids(
    directory: Path, table: dict[str, Any], of_tokenizer: int | None
) -> tuple[int, ...]:
    """Return the tokens that end a text; ``of_tokenizer`` is one, of which others may not know."""
    generation = read_optional_json(directory / "generation_config.json")
    value = generation.get("eos_token_id", table.get("eos_token_id"))
    ids = [*value] if isinstance(value, list) else [] if value is None else [value]
    ids += [] if of_tokenizer is None else [of_tokenizer]
    if len(ids) > limits.MAX_PORTS or not all(
        type(item) is int and 0 <= item < limits.MAX_DIMENSION for item in ids
    ):
        raise InvalidModel(f"'{directory}' has eos_token_id = {value!r:.40}; integers are wanted")
    return tuple(sorted(set(ids)))


# ---- models without weights --------------------------------------------------------------------


def load_shapes(source: str, sizes: Sizes) -> SourceModel:
    """Trace a model from its config.json; only the shapes of its weights are known."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    whole = read_json(file)
    if sizes.vision:
        return load_vision_tower(whole, sizes, ShapeWeights(whole))
    if (found := find_encoder(whole)) is not None:
        return load_encoder_shapes(whole, *found, sizes, ShapeWeights(whole))
    table, config, quantisation = read_decoder(whole, sizes)
    weights = ShapeWeights(table, quantisation)
    traced = trace_language_model(config, weights, sizes.chunk, sizes.cache)
    return SourceModel("text-generation", traced, None)


class ShapeWeights:
    """Weights without bytes: shapes, and the dtype or the quantisation that config.json names."""

    def __init__(
        self, table: dict[str, Any], quantisation: QuantisationConfig | None = None
    ) -> None:
        dtype = table.get("dtype", table.get("torch_dtype", "float32"))
        if dtype not in FLOAT_DTYPES:
            raise InvalidModel(
                f"config.json has dtype {dtype!r:.40}; one of {', '.join(FLOAT_DTYPES)} is wanted"
            )
        self._dtype = str(dtype)
        self._quantisation = quantisation

    def get(self, name: str, *shape: int) -> WeightSource:
        """Return a weight without bytes."""
        if self._quantisation is not None and len(shape) == 2:
            found = self._quantisation.make_shape(name, *shape, self._dtype)
            if found is not None:
                return found
        return WeightSource(TensorSpec(name, self._dtype, shape), (Absent(),))

    def can_join(self, names: list[str]) -> bool:
        """Return True: weights that are joined have the same storage format."""
        return True

    def join(self, name: str, parts: list[tuple[str, int]], *shape: int) -> WeightSource:
        """Return the weights (name, rows) concatenated along the rows, called ``name``."""
        first = self.get(parts[0][0], *shape)
        return replace(first, spec=replace(first.spec, name=name))
