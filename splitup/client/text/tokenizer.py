"""A model's tokenizer and chat template, in a confined process, because both are foreign.

The file is parsed by native code of a library, and the template is a program: both stay in
``splitup.client.text.tokenizer_process``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from splitup.client.text.tokenizer_process import TOKEN_BYTES, pack_tokens, unpack_tokens
from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.places import FairLock
from splitup.decode.texts import EncodedText
from splitup.graph.manifest import ChatInfo
from splitup.sandbox.child import Child, ChildDied, ChildFailed
from splitup.sandbox.serving import Buffers

_MODULE: Final = "splitup.client.text.tokenizer_process"
_PROMPT_TOKENS: Final = 64  # of a prompt's end: more than the text of what follows depends on
R = TypeVar("R")


class ModelTokenizer:
    """The parent's side: turns texts into tokens and back. Calls block; threads may share it."""

    def __init__(self, data: bytes, name: str) -> None:
        """Load a tokenizer.json; ``name`` says in errors whose it is.

        Raises InvalidModel when the library refuses the file or does not survive it.
        """
        self.data = data
        self._name = name
        self._child = Child(_MODULE, [str(tuning.TOKENIZER_MEMORY_BYTES)])
        self._other: ModelTokenizer | None = None  # for long texts
        self._turns = FairLock(), FairLock()  # of texts at this process, and at the other one
        try:
            self._ask({"load": True}, [data], timeout_s=tuning.TOKENIZER_LOAD_S)
        except (InvalidInput, ChildDied):
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Return whether its process is alive."""
        return self._child.is_running

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text. Raises InvalidModel."""
        return list(self._encode([text], add_special_tokens).tokens)

    def encode_typed(
        self, text: str, pair: str | None = None, *, most: int | None = None
    ) -> EncodedText:
        """Return the tokens of a text, or of a pair of texts, with their types.

        Beyond ``most`` tokens the end is cut off, but no special token. Raises InvalidModel.
        """
        return self._encode([text] if pair is None else [text, pair], True, most)

    def _encode(
        self, texts: Sequence[str], add_special_tokens: bool, most: int | None = None
    ) -> EncodedText:
        question = {"encode": True, "special": add_special_tokens, "most": most}
        _, found = self._ask(question, [text.encode(errors="replace") for text in texts])
        if len(found) != 2 or len(found[0]) % TOKEN_BYTES or len(found[0]) != len(found[1]):
            raise InvalidModel(f"the tokenizer of {self._name} gave no tokens")
        return EncodedText(*map(unpack_tokens, found))

    def decode(
        self, tokens: Sequence[int], *, after: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> str:
        """Return what tokens add to the text of those ``after`` which they come.

        Many tokenizers leave out the space before the first word of a text. Raises InvalidModel.
        """
        question = {"decode": len(after), "skip_special": skip_special_tokens}
        answer, _ = self._ask(question, [pack_tokens([*after, *tokens])])
        text = str(answer.get("text", ""))
        self._check_length(text, tokens)
        return text

    def check_template(self, template: str) -> None:
        """Raise InvalidModel for a chat template that is no Jinja, or that ends this process."""
        self._ask({"check": True}, [template.encode()], timeout_s=tuning.TOKENIZER_LOAD_S)

    def render_chat(
        self,
        chat: ChatInfo,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        context: int,
    ) -> str:
        """Return the text that a conversation becomes.

        Raises InvalidModel, and InvalidInput for a text that so many tokens cannot hold.
        """
        asked = {"messages": list(messages), "tools": tools, "variables": variables}
        said = [chat.model_dump_json().encode(), json.dumps(asked).encode()]
        answer, found = self._ask({"render": tuning.PROMPT_CHARS * context}, said)
        if not found:
            raise InvalidInput(
                f"the context of {self._name} is {context} tokens, and the messages become a text "
                f"of {answer.get('chars')} characters; shorten them"
            )
        return str(found[0], "utf-8", "replace")

    def open_stream(self, prompt: Sequence[int]) -> TokenStream:
        """Return a text that continues a prompt token by token, without special tokens."""
        return TokenStream(self, prompt)

    async def run(self, call: Callable[[], R]) -> R:
        """Make a call of these, which block, on the process's own thread."""
        try:
            return await self._child.run_apart(call)
        except ChildDied:
            return call()  # it blocks no longer, and says why

    async def read(
        self, length: int, call: Callable[[ModelTokenizer], R], principal: str = ""
    ) -> R:
        """Make a call about a text of so many characters.

        Turns go round by ``principal``. All streams wait for this process, so a long text goes to
        another one, which is started for the first of them. Raises InvalidModel, and InvalidInput
        for a text that ends that process.
        """
        here, there = self._turns
        if length <= tuning.LONG_TEXT_CHARS:
            async with here.hold(principal):
                return await self.run(partial(call, self))
        async with there.hold(principal):
            if self._other is None or not self._other.is_running:
                self._other = await asyncio.to_thread(ModelTokenizer, self.data, self._name)
            try:
                return await self._other.run(partial(call, self._other))
            except InvalidModel:
                if self._other.is_running:
                    raise
                raise InvalidInput(
                    f"a text of {length} characters takes the tokenizer of {self._name} too long, "
                    "or too much memory; shorten it"
                ) from None

    def _check_length(self, text: str, tokens: Sequence[int]) -> None:
        """Raise InvalidModel for a text that is far longer than so few tokens can be."""
        if len(text) > tuning.TOKEN_CHARS * len(tokens):
            raise InvalidModel(
                f"the tokenizer of {self._name} makes {len(text)} characters of {len(tokens)} "
                "tokens; do not trust this model"
            )

    def close(self) -> None:
        """End the process, and the one for long texts."""
        self._child.close()
        if self._other is not None:
            self._other.close()

    def _ask(
        self,
        question: Mapping[str, Any],
        buffers: Buffers = (),
        *,
        timeout_s: float = tuning.TOKENIZER_CALL_S,
    ) -> tuple[dict[str, Any], list[memoryview]]:
        is_chat = "render" in question or "check" in question
        what = "chat template" if is_chat else "tokenizer (tokenizer.json)"
        try:
            return self._child.ask(
                question, buffers, timeout_s=timeout_s, max_bytes=limits.MAX_TOKENIZER_BYTES
            )
        except ChildFailed as error:
            raise InvalidModel(f"the {what} of {self._name}: {error}") from None
        except ChildDied as error:
            raise InvalidModel(
                f"the {what} of {self._name} ended its process: {error}; do not trust this model"
            ) from None


class TokenStream:
    """A text that grows token by token."""

    def __init__(self, tokenizer: ModelTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # as many as the next ones' text depends on
        self._tokens = list(prompt[-_PROMPT_TOKENS:])
        self._settled = len(self._tokens)  # how many of them have been given

    def extend(self, tokens: Sequence[int], *, is_end: bool = False) -> list[tuple[int, str]]:
        """Take tokens; return those whose text is certain, each with what it adds to the text.

        Tokens of an unfinished character wait for the rest of it, or for the end of the text, where
        it becomes U+FFFD.
        """
        self._tokens += tokens
        if len(self._tokens) == self._settled:
            return []
        question = {"extend": self._settled, "is_end": is_end}
        answer, _ = self._tokenizer._ask(question, [pack_tokens(self._tokens)])
        texts, start, settled = (answer.get(key) for key in ("texts", "start", "settled"))
        if (
            not isinstance(texts, list)
            or type(start) is not int
            or type(settled) is not int
            or not 0 <= start <= settled <= len(self._tokens)
            or len(texts) != settled - self._settled
        ):
            raise InvalidModel(f"the tokenizer of {self._tokenizer._name} gave no texts")
        found = self._tokens[self._settled : settled]
        self._tokenizer._check_length("".join(map(str, texts)), found)
        del self._tokens[:start]
        self._settled = settled - start
        return list(zip(found, map(str, texts), strict=True))
