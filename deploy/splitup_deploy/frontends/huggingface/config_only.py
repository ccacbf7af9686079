"""Models without weights: a config.json is enough to preview how a model would be cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from splitup.core import tuning
from splitup.core.errors import InvalidModel
from splitup.core.tensors import TensorSpec
from splitup_deploy.frontends.families.architectures import trace_language_model
from splitup_deploy.frontends.families.encoders import find_encoder
from splitup_deploy.frontends.huggingface.checkpoint import FLOAT_DTYPES, read_json
from splitup_deploy.frontends.huggingface.directory import load_vision_tower, read_decoder
from splitup_deploy.frontends.huggingface.encoder_directory import load_encoder_shapes
from splitup_deploy.frontends.huggingface.quantised_layers import QuantisationConfig
from splitup_deploy.frontends.source_model import Sizes, SourceModel
from splitup_deploy.frontends.weight_sources import Absent, WeightSource


def load_shapes(source: str, sizes: Sizes) -> SourceModel:
    """Trace a model from its config.json; only the shapes of its weights are known."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    whole = read_json(file, tuning.MAX_CONFIG_BYTES)
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
