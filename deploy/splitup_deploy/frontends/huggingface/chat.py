"""The chat template of a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.chat import make_chat
from splitup_deploy.frontends.huggingface.checkpoint import read_json


def read_chat(directory: Path) -> ChatInfo | None:
    """Return the template of chat_template.jinja or tokenizer_config.json, None without one.

    Of several named templates the one called "default" counts. Raises InvalidModel.
    """
    path = directory / "tokenizer_config.json"
    table = read_json(path, tuning.MAX_CONFIG_BYTES) if path.is_file() else {}
    template = _read_file(directory / "chat_template.jinja") or table.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        found = [entry.get("template") for entry in named if entry.get("name") == "default"]
        template = found[0] if found else None
    if template is None:
        return None
    return make_chat(template, _get_token(table, "bos_token"), _get_token(table, "eos_token"))


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
