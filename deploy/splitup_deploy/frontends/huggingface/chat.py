"""The chat template of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.chat import choose_template, make_chat
from splitup_deploy.frontends.huggingface.checkpoint import read_json


def read_chat(directory: Path) -> tuple[ChatInfo | None, tuple[str, ...]]:
    """Return a directory's chat template, None without one, and what to say of others.

    Files count before tokenizer_config.json, as in transformers, and chat_template.json, of older
    processors, where nothing else has a template. Raises InvalidModel.
    """
    path = directory / "tokenizer_config.json"
    table = read_json(path, tuning.MAX_CONFIG_BYTES) if path.is_file() else {}
    template, notes = choose_template(_find_templates(directory, table))
    if template is None:
        return None, notes
    tokens = (_get_token(table, name) for name in ("bos_token", "eos_token"))
    return make_chat(template, *tokens), notes


def _find_templates(directory: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return the templates by their names; one without a name is called "default"."""
    found: dict[str, Any] = {}
    if (template := _read_file(directory / "chat_template.jinja")) is not None:
        found["default"] = template
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_file(path)
    if found:
        return found
    template = table.get("chat_template")
    older = directory / "chat_template.json"
    if template is None and older.is_file():
        template = read_json(older, tuning.MAX_CONFIG_BYTES).get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        return {str(entry.get("name")): entry.get("template") for entry in named}
    return {} if template is None else {"default": template}


def _read_file(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(limits.MAX_CHAT_TEMPLATE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModel(f"'{path}' cannot be read: {error}") from None


def _get_token(table: dict[str, Any], name: str) -> Any:
    """Return a special token's text, "" when there is none; newer files hold it as an object."""
    token = table.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return "" if token is None else token
