"""All supported encoders, by the name of their model in ``architectures``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from splitup_deploy.frontends.encoder.step_function import Encoder
from splitup_deploy.frontends.families import bert, modernbert
from splitup_deploy.frontends.families.config_fields import Fields

Use = Literal["text-embedding", "text-ranking"]


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """How a family's configuration is read, and what its weights are called here."""

    read: Callable[[Fields, int | None], Encoder]
    rename: Callable[[str], str]


_FAMILIES: Final = {
    "Bert": EncoderFamily(bert.read_bert, bert.rename_weight),
    "Roberta": EncoderFamily(bert.read_roberta, bert.rename_weight),
    "XLMRoberta": EncoderFamily(bert.read_roberta, bert.rename_weight),
    "DistilBert": EncoderFamily(bert.read_distilbert, bert.rename_weight),
    "MPNet": EncoderFamily(bert.read_mpnet, bert.rename_weight),
    "ModernBert": EncoderFamily(modernbert.read_modernbert, modernbert.rename_weight),
}
# Many directories for embeddings name the class that the model was first trained as.
_USES: Final[dict[str, Use]] = {
    "Model": "text-embedding",
    "ForMaskedLM": "text-embedding",
    "ForSequenceClassification": "text-ranking",
}
ENCODERS: Final[dict[str, tuple[EncoderFamily, Use]]] = {
    f"{name}{suffix}": (family, use)
    for name, family in _FAMILIES.items()
    for suffix, use in _USES.items()
}


def find_encoder(table: dict[str, Any]) -> tuple[EncoderFamily, Use] | None:
    """Return what a config.json says is an encoder, and what it is for; None for another model."""
    names = table.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    return ENCODERS.get(names[0])
