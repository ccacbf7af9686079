"""What a request's text may be before anybody encodes it."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_gateway.apis.requests import ChatRequest, parse_request
from splitup_gateway.errors import ApiError
from splitup_gateway.preparing import count_prompt

from splitup.client.text.tokenizer import ModelTokenizer
from splitup.demo.models import find_example
from splitup.graph.manifest import ChatInfo

SAID = {"model": "m", "messages": [{"role": "user", "content": "a b"}]}


LONG = pytest.param("{{ messages[0].content * 2**20 }}", marks=pytest.mark.long)


@pytest.mark.parametrize("template", ["{{ 'a' * 2**20 }}", LONG])
async def test_s37_a_conversation_that_becomes_too_long_is_refused(template: str) -> None:
    with closing(ModelTokenizer((find_example() / "tokenizer.json").read_bytes(), "m")) as one:
        chat = ChatInfo(template=template, bos_token="", eos_token="")
        info = SimpleNamespace(chat=chat, context=64, images=None)
        model: Any = SimpleNamespace(name="m", info=info, tokenizer=one)
        with pytest.raises(ApiError, match="shorten them") as caught:
            await count_prompt(model, parse_request(ChatRequest, SAID))
        assert caught.value.code == "context_length_exceeded"
        info.context = 2**17
        assert await count_prompt(model, parse_request(ChatRequest, SAID)) > 0
