"""The fields of a config.json that all families of encoders share."""

from __future__ import annotations

from typing import Final

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.row_operations import Activation
from splitup_deploy.frontends.encoder.step_function import EncoderSizes
from splitup_deploy.frontends.families.config_fields import Fields

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Of training, or of heads that are not read; ``sentence_transformers`` says what is done with a
# reranker's scores afterwards.
_TRAINING: Final = (
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "dropout"),
    *("gradient_checkpointing", "qa_dropout", "seq_classif_dropout", "embedding_dropout"),
    *("mlp_dropout", "initializer_cutoff_factor", "tie_word_embeddings", "sentence_transformers"),
    *("cls_token_id", "mask_token_id", "output_past", "directionality", "type_pad_id"),
)


def ignore_training(fields: Fields) -> None:
    """Read the fields that change no result."""
    fields.skip(*_TRAINING)


def read_activation(fields: Fields, key: str) -> Activation:
    """Return an activation; raises InvalidModel for one that is not known."""
    name = fields.get(key, "gelu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise fields.refuse(key, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def check_sizes(sizes: EncoderSizes, trained: int) -> None:
    """Raise InvalidModel for heads that do not divide, and for a context that is not possible."""
    if sizes.hidden % sizes.heads:
        raise InvalidModel(
            f"config.json asks for {sizes.heads} heads of {sizes.hidden} elements, which do not "
            "divide"
        )
    if not 1 <= sizes.context <= min(trained, limits.MAX_CONTEXT):
        raise InvalidModel(
            f"context {sizes.context} is not possible; "
            f"the model takes 1 to {min(trained, limits.MAX_CONTEXT)} positions"
        )
