"""What tokenizer_config.json changes in a tokenizer.json, as transformers reads both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup_deploy.frontends.huggingface.checkpoint import read_json

_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_GENERAL: Final = ("TokenizersBackend", "PreTrainedTokenizer", "LlamaTokenizer")  # take the file's


def read_tokenizer(directory: Path) -> tuple[Path | bytes, int | None]:
    """Return a directory's tokenizer.json, or its bytes where that has to be changed.

    The number is the special token that tokenizer_config.json calls EOS, None without one.
    Tokens that only stand in ``added_tokens_decoder`` are added, in the order of their ids, and get
    the next free ones, and flags there count. ``add_prefix_space`` counts for the classes that take
    bytes, but not for those that use tokenizer.json as it is. Where texts are split into bytes,
    bytes become text again: some published files decode as SentencePiece does. Raises InvalidModel.
    """
    path, other = directory / "tokenizer.json", directory / "tokenizer_config.json"
    table = read_json(path, limits.MAX_TOKENIZER_BYTES)
    config = read_json(other, tuning.MAX_CONFIG_BYTES) if other.is_file() else {}
    is_changed = _add_tokens(table, config.get("added_tokens_decoder"), other)
    is_changed |= _set_decoder(table)
    prefix, kind = config.get("add_prefix_space"), config.get("tokenizer_class")
    if isinstance(prefix, bool) and str(kind).removesuffix("Fast") not in (*_GENERAL, "None"):
        is_changed |= _set_prefix(table.get("pre_tokenizer"), prefix)
    eos_id = _find_special(table, config.get("eos_token"))
    if not is_changed:
        return path, eos_id
    return json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode(), eos_id


def _find_special(table: dict[str, Any], token: Any) -> int | None:
    """Return the id of a special token, which newer files hold as an object."""
    name = token.get("content") if isinstance(token, dict) else token
    added = table.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and name is not None and entry.get("content") == name:
            place = entry.get("id")
            return place if type(place) is int else None
    return None


def _add_tokens(table: dict[str, Any], tokens: Any, path: Path) -> bool:
    """Add tokens to a tokenizer.json, and say whether that changes it."""
    added, model = table.setdefault("added_tokens", []), table.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not tokens or not isinstance(vocab, list | dict) or not isinstance(added, list):
        return False
    places = {token.get("content"): place for place, token in enumerate(added)}
    known = vocab if isinstance(vocab, dict) else {item[0]: n for n, item in enumerate(vocab)}
    following = max([*known.values(), *(token.get("id", -1) for token in added)], default=-1) + 1
    is_changed = False
    try:
        rows = sorted((int(key), dict(token)) for key, token in tokens.items())
    except (AttributeError, TypeError, ValueError):
        raise InvalidModel(f"'{path}' has added_tokens_decoder, but no tokens by id") from None
    for _, token in rows:
        name = token.get("content")
        entry = {key: token.get(key, False) is True for key in _FLAGS}
        if name in places:
            old = added[places[name]]
            is_changed |= any(old.get(key, False) != flag for key, flag in entry.items())
            old.update(entry)
            continue
        place = known.get(name, following)
        following += place == following
        added.append({"id": place, "content": name, **entry})
        is_changed = True
    return is_changed


def _set_decoder(table: dict[str, Any]) -> bool:
    """Decode bytes where texts are split into bytes; say whether that changes anything."""
    if not _has_bytes(table.get("pre_tokenizer")) or _has_bytes(table.get("decoder")):
        return False
    flags = ("add_prefix_space", "trim_offsets", "use_regex")
    table["decoder"] = {"type": "ByteLevel", **dict.fromkeys(flags, True)}
    return True


def _has_bytes(step: Any) -> bool:
    """Say whether a step of a tokenizer, or one within it, is about bytes."""
    if not isinstance(step, dict):
        return False
    inner = step.get("pretokenizers", step.get("decoders"))
    if isinstance(inner, list):
        return any(map(_has_bytes, inner))
    return step.get("type") == "ByteLevel"


def _set_prefix(step: Any, prefix: bool) -> bool:
    """Set whether a text gets a space before it is split; say whether that changes anything."""
    if not isinstance(step, dict):
        return False
    inner = step.get("pretokenizers")
    if isinstance(inner, list):
        return any([_set_prefix(one, prefix) for one in inner])
    if step.get("type") != "ByteLevel" or step.get("add_prefix_space") == prefix:
        return False
    step["add_prefix_space"] = prefix
    return True
