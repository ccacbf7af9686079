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


def read_tokenizer(directory: Path) -> Path | bytes:
    """Return a directory's tokenizer.json, or its bytes where tokenizer_config.json changes it.

    Tokens that only stand in ``added_tokens_decoder`` are added, in the order of their ids, and get
    the next free ones, and flags there count. ``add_prefix_space`` counts for the classes that take
    bytes, but not for those that use tokenizer.json as it is. Raises InvalidModel.
    """
    path, other = directory / "tokenizer.json", directory / "tokenizer_config.json"
    table = read_json(path, limits.MAX_TOKENIZER_BYTES)
    if not other.is_file():
        return path
    config = read_json(other, tuning.MAX_CONFIG_BYTES)
    is_changed = _add_tokens(table, config.get("added_tokens_decoder"), other)
    prefix, kind = config.get("add_prefix_space"), config.get("tokenizer_class")
    if isinstance(prefix, bool) and str(kind).removesuffix("Fast") not in (*_GENERAL, "None"):
        is_changed |= _set_prefix(table.get("pre_tokenizer"), prefix)
    if not is_changed:
        return path
    return json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()


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
