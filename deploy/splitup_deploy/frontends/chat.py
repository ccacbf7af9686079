"""Tokenizers and chat templates, checked when a model is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from splitup.client.text.tokenizer import ModelTokenizer, check_chat_template
from splitup.core import limits
from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo

_WAYS_OUT: Final = {
    "text": "to compile the model as a function of token ids nevertheless: --without text",
    "chat": "to compile a model that completes texts but takes no chats: --without chat",
}
_good: set[str] = set()  # digests of tokenizers that the library has read


@contextmanager
def offer_way_out(part: Literal["text", "chat"]) -> Iterator[None]:
    """Name the flag that goes on without a tokenizer or template, where that cannot be used."""
    try:
        yield
    except InvalidModel as error:
        raise InvalidModel(f"{error}; {_WAYS_OUT[part]}") from None


def check_tokenizer(tokenizer: Path | bytes) -> None:
    """Raise InvalidModel for a tokenizer.json that users' clients could not read."""
    data = tokenizer if isinstance(tokenizer, bytes) else tokenizer.read_bytes()
    digest = compute_digest(data)
    if digest not in _good:
        with offer_way_out("text"):
            ModelTokenizer(data, "the model").close()
        _good.add(digest)


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
