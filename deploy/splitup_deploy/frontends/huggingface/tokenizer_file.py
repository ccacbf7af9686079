"""A directory's tokenizer and chat template: what tokenizer_config.json changes in other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.chat import choose_template, make_chat
from splitup_deploy.frontends.huggingface.checkpoint import read_json, read_optional_json
from splitup_deploy.frontends.own_files import check_own

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
    config = read_optional_json(other)
    prefix, kind = config.get("add_prefix_space"), config.get("tokenizer_class")
    try:
        is_changed = _add_tokens(table, config.get("added_tokens_decoder"))
        is_changed |= _set_decoder(table)
        if isinstance(prefix, bool) and str(kind).removesuffix("Fast") not in (*_GENERAL, "None"):
            is_changed |= _set_prefix(table.get("pre_tokenizer"), prefix)
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")) if is_changed else ""
        data = text.encode()  # half a character has no code
    except (AttributeError, LookupError, TypeError, ValueError):
        raise InvalidModel(
            f"'{path}' or added_tokens_decoder in '{other}' lists no tokens by id; fetch them again"
        ) from None
    return data or path, _find_special(table, config.get("eos_token"))


def _find_special(table: dict[str, Any], token: Any) -> int | None:
    name = _get_content(token)
    added = table.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and name is not None and entry.get("content") == name:
            place = entry.get("id")
            return place if type(place) is int else None
    return None


def _add_tokens(table: dict[str, Any], tokens: Any) -> bool:
    """Add tokens to a tokenizer.json, and say whether that changes it."""
    added, model = table.setdefault("added_tokens", []), table.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not tokens or not isinstance(vocab, list | dict) or not isinstance(added, list):
        return False
    places = {token.get("content"): place for place, token in enumerate(added)}
    known = vocab if isinstance(vocab, dict) else {item[0]: n for n, item in enumerate(vocab)}
    following = max([*known.values(), *(token.get("id", -1) for token in added)], default=-1) + 1
    is_changed = False
    rows = sorted((int(key), dict(token)) for key, token in tokens.items())
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


def read_chat(directory: Path) -> tuple[ChatInfo | None, tuple[str, ...]]:
    """Return a directory's chat template, None without one, and what to say of others.

    Files count before tokenizer_config.json, as in transformers, and chat_template.json, of older
    processors, where nothing else has a template. Raises InvalidModel.
    """
    table = read_optional_json(directory / "tokenizer_config.json")
    template, notes = choose_template(_find_templates(directory, table))
    if template is None:
        return None, notes
    names = (_get_content(table.get(key)) for key in ("bos_token", "eos_token"))
    return make_chat(template, *("" if name is None else name for name in names)), notes


def _find_templates(directory: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return the templates by their names; one without a name is called "default"."""
    found: dict[str, Any] = {}
    if (template := _read_file(directory / "chat_template.jinja", directory)) is not None:
        found["default"] = template
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_file(path, directory)
    if found:
        return found
    template = table.get("chat_template")
    if template is None:
        template = read_optional_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        return {str(entry.get("name")): entry.get("template") for entry in named}
    return {} if template is None else {"default": template}


def _read_file(path: Path, directory: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with check_own(path, directory).open(encoding="utf-8") as file:
            return file.read(limits.MAX_CHAT_TEMPLATE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModel(f"'{path}' cannot be read: {error}") from None


def _get_content(token: Any) -> Any:
    """Return a special token's text, which newer files hold as an object."""
    return token.get("content") if isinstance(token, dict) else token
