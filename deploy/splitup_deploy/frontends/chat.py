"""Tokenizers and chat templates, checked when a model is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, Literal

from pydantic import ValidationError

from splitup.core import limits
from splitup.core.codec import compute_digest
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.source_model import SourceText

_WAYS_OUT: Final = {
    "text": "to compile the model as a function of token ids nevertheless: --without text",
    "chat": "to compile a model that completes texts but takes no chats: --without chat",
}
_good: set[tuple[str, str]] = set()  # digests of tokenizers, and templates, that were checked


@contextmanager
def offer_way_out(part: Literal["text", "chat"]) -> Iterator[None]:
    """Name the flag that goes on without a tokenizer or template, where that cannot be used."""
    try:
        yield
    except InvalidModel as error:
        raise InvalidModel(f"{error}; {_WAYS_OUT[part]}") from None


def check_text(text: SourceText | None) -> None:
    """Raise InvalidModel for a tokenizer.json or chat template that clients could not use."""
    if text is None:
        return
    data = text.tokenizer if isinstance(text.tokenizer, bytes) else text.tokenizer.read_bytes()
    template = "" if text.chat is None else text.chat.template
    if (checked := (compute_digest(data), template)) in _good:
        return
    from splitup.client.text.tokenizer import ModelTokenizer  # asyncio, which only this needs

    with offer_way_out("text"):
        tokenizer = ModelTokenizer(data, "the model")
    with closing(tokenizer), offer_way_out("chat"):
        if text.chat is not None:
            tokenizer.check_template(template)
    _good.add(checked)


def choose_template(found: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return the template of several named ones, and what to say of those that are not used.

    Chats with tools get "tool_use" where there is one, all others "default", as in transformers.
    """
    default, with_tools = found.get("default"), found.get("tool_use")
    others = sorted(str(name)[:40] for name in found.keys() - {"default", "tool_use"})
    notes = (f"chat templates that are not used: {', '.join(others)}",) if others else ()
    if with_tools is None:
        return default, notes
    if default is None:
        default = "{{ raise_exception('it only has a template for chats with tools') }}"
    if not isinstance(default, str) or not isinstance(with_tools, str):
        return default, notes
    # a tag takes the line's end behind it; "+" keeps the spaces before it
    chosen = "{%% if tools is not none %%}\n%s{%%+ else %%}\n%s{%%+ endif %%}"
    return chosen % (with_tools.removesuffix("\n"), default.removesuffix("\n")), notes


def make_chat(template: Any, bos_token: Any, eos_token: Any) -> ChatInfo:
    """Return a model's chat template; raise InvalidModel for what is no text, or too long."""
    try:
        return ChatInfo(template=template, bos_token=bos_token, eos_token=eos_token)
    except ValidationError:
        raise InvalidModel(
            "the model's chat template, or its BOS or EOS token, is no text, or too long (at most "
            f"{limits.MAX_CHAT_TEMPLATE_CHARS} characters)"
        ) from None
