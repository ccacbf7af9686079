"""Directories of encoders: those of transformers, and those of sentence-transformers.

The latter have a ``modules.json``: the encoder, how rows are pooled, and whether vectors are
normalised. Without it rows are averaged, as sentence-transformers does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.decoder.row_operations import Weights
from splitup_deploy.frontends.encoder.step_function import Encoder, Pooling, trace_encoder
from splitup_deploy.frontends.families.config_fields import Fields
from splitup_deploy.frontends.families.encoders import EncoderFamily, Use
from splitup_deploy.frontends.huggingface.checkpoint import (
    DirectoryWeights,
    read_json,
    read_optional_json,
)
from splitup_deploy.frontends.source_model import Sizes, SourceModel, SourceText

DEFAULT_CONTEXT: Final = 512  # a step is paid for all its rows; most texts are shorter
_POOLING_MODES: Final = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
# Weights that neither a vector nor a reranker's score goes through.
_OTHERS: Final = dict.fromkeys(
    (
        *("cls.", "lm_head.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
        *("pooler.", "head.", "decoder."),
    ),
    "of a head for another use",
) | {"embeddings.position_ids": "which are counted here"}


def load_encoder(
    directory: Path, table: dict[str, Any], family: EncoderFamily, use: Use, sizes: Sizes
) -> SourceModel:
    """Trace an encoder; raises InvalidModel naming file and problem."""
    tokenizer = directory / "tokenizer.json"
    read_json(tokenizer, limits.MAX_TOKENIZER_BYTES)
    pooling: Pooling | None = None
    notes: list[str] = []
    if use == "text-embedding":
        pooling, notes = _read_modules(directory, str(table["architectures"][0]))
    encoder, note = _read_encoder(directory, table, family, use, sizes.context)
    if use == "text-ranking":
        _check_token_types(directory, encoder)
    weights = DirectoryWeights(directory, family.rename)
    traced = trace_encoder(encoder, weights, pooling, sizes.chunk)
    notes += [*note, *traced.notes, *weights.check_all_read(_OTHERS), *_describe_prompts(directory)]
    text = SourceText(tokenizer, (), encoder.sizes.vocab, encoder.sizes.context)
    return SourceModel(use, replace(traced, notes=tuple(notes)), text)


def _read_config(
    table: dict[str, Any], family: EncoderFamily, use: Use, context: int | None
) -> Encoder:
    """Read a config.json; raises InvalidModel naming what is not supported."""
    fields = Fields(table)
    if use == "text-ranking":
        labels = table.get("id2label")
        count = len(labels) if isinstance(labels, dict) else table.get("num_labels", 2)
        if count != 1:
            raise InvalidModel(
                f"config.json has {count!r:.20} labels: a reranker has one; a classifier of texts "
                "is not supported, export it to ONNX"
            )
    encoder = family.read(fields, context)
    fields.check_all_read()
    return encoder


def load_encoder_shapes(
    table: dict[str, Any], family: EncoderFamily, use: Use, sizes: Sizes, weights: Weights
) -> SourceModel:
    """Trace an encoder from its config.json alone; an embedding is the mean of its rows."""
    encoder, notes = _read_encoder(None, table, family, use, sizes.context)
    pooling = Pooling() if use == "text-embedding" else None
    traced = trace_encoder(encoder, weights, pooling, sizes.chunk)
    return SourceModel(use, replace(traced, notes=(*traced.notes, *notes)), None)


def _read_encoder(
    directory: Path | None,
    table: dict[str, Any],
    family: EncoderFamily,
    use: Use,
    context: int | None,
) -> tuple[Encoder, list[str]]:
    """Return the encoder for texts of at most ``context`` tokens, and what to say of that."""
    if context is not None:
        return _read_config(table, family, use, context), []
    whole = _read_config(table, family, use, None)
    trained = whole.sizes.context
    longest = trained if directory is None else _read_longest(directory, trained)
    context = min(longest, DEFAULT_CONTEXT)
    if context == trained:
        return whole, []
    note = f"texts of up to {context} tokens; the model has {trained} positions, see --context"
    return _read_config(table, family, use, context), [note]


def _check_token_types(directory: Path, encoder: Encoder) -> None:
    """Raise InvalidModel when the tokenizer gives pairs other token types than is usual."""
    path = directory / "tokenizer_config.json"
    names = read_optional_json(path).get("model_input_names")
    if isinstance(names, list) and ("token_type_ids" in names) != encoder.takes_types:
        what = "no token_type_ids" if encoder.takes_types else "token_type_ids"
        raise InvalidModel(
            f"'{path}' asks for {what}, which is unusual for this architecture and not supported"
        )


def _read_longest(directory: Path, trained: int) -> int:
    """Return the longest text that sentence-transformers gives the model."""
    path = directory / "sentence_bert_config.json"
    table = read_optional_json(path)
    if table.get("do_lower_case"):
        raise InvalidModel(f"'{path}' has do_lower_case: write the lower case into tokenizer.json")
    longest = table.get("max_seq_length")
    if longest is None:
        return trained
    if type(longest) is not int or longest < 1:
        raise InvalidModel(f"'{path}' has max_seq_length = {longest!r:.40}; an integer is wanted")
    return min(longest, trained)


def _read_modules(directory: Path, architecture: str) -> tuple[Pooling, list[str]]:
    """Return how rows become a vector."""
    path = directory / "modules.json"
    if not path.is_file():
        if architecture.endswith("ForMaskedLM"):
            raise InvalidModel(
                f"'{directory}' is a {architecture} without modules.json: it fills in words and "
                "gives no embeddings; save it with sentence-transformers"
            )
        return Pooling(), ["no modules.json: a text's vector is the mean of its rows"]
    modules = _read_module_list(path)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InvalidModel(
            f"'{path}' has the modules {', '.join(kinds)[:100]}; supported: Transformer, Pooling, "
            "and Normalize or nothing"
        )
    if modules[0][1]:
        raise InvalidModel(f"'{path}' has its Transformer in a folder: move its files beside it")
    return Pooling(_read_pooling(directory / modules[1][1]), len(kinds) == 3), []


def _read_module_list(path: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module."""
    try:
        if path.stat().st_size > tuning.MAX_CONFIG_BYTES:
            raise ValueError
        value = parse_json(path.read_bytes())
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in value]
    except OSError as error:
        raise InvalidModel(f"cannot read '{path}': {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidModel(f"'{path}' is no list of modules; fetch the model again") from None
    if bad := [folder for _, folder in found if folder and Path(folder).name != folder]:
        raise InvalidModel(f"'{path}' names a folder outside the model's: {bad[0]!r:.80}")
    return found


def _read_pooling(directory: Path) -> Any:
    path = directory / "config.json"
    table = read_json(path)
    modes = [key for key in table if key.startswith("pooling_mode_") and table[key]]
    names = [_POOLING_MODES.get(key, key) for key in modes]
    if "pooling_mode" in table:  # the newer spelling
        mode = table["pooling_mode"]
        names = list(mode) if isinstance(mode, list) else [mode]
    if names not in (["cls"], ["mean"]):
        raise InvalidModel(
            f"'{path}' pools by {', '.join(map(str, names)) or 'nothing':.80}; supported: mean, cls"
        )
    return names[0]


def _describe_prompts(directory: Path) -> list[str]:
    path = directory / "config_sentence_transformers.json"
    prompts = read_optional_json(path).get("prompts")
    found = prompts.items() if isinstance(prompts, dict) else ()
    named = [f"{name} {text!r:.60}" for name, text in found if text]
    if not named:
        return []
    return [f"its authors begin texts with these, nothing here does: {', '.join(named):.300}"]
