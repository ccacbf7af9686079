"""What models are called in the list of the market."""

from __future__ import annotations

from splitup.client.market.offers import _name_kind
from tests.builders import make_chain_manifest


def test_a_function_of_pixels_is_called_a_vision_tower() -> None:
    manifest = make_chain_manifest(1)
    assert _name_kind(manifest) == manifest.kind
    pixels = manifest.inputs[0].model_copy(update={"name": "pixels"})
    rows = manifest.outputs[0].model_copy(update={"name": "embeddings"})
    tower = manifest.model_copy(update={"inputs": (pixels,), "outputs": (rows,)})
    assert _name_kind(tower) == "vision-tower"
