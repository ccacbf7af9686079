"""Chat templates, checked when a model is compiled."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from splitup.client.text.tokenizer import check_chat_template
from splitup.core import limits
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo


def make_chat(template: Any, bos_token: Any, eos_token: Any) -> ChatInfo:
    """Return a model's chat template; raise InvalidModel for one that cannot be used."""
    try:
        chat = ChatInfo(template=template, bos_token=bos_token, eos_token=eos_token)
    except ValidationError:
        raise InvalidModel(
            "the model's chat template, or its BOS or EOS token, is no text, or too long (at most "
            f"{limits.MAX_CHAT_TEMPLATE_CHARS} characters)"
        ) from None
    check_chat_template(chat.template)
    return chat
