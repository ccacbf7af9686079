"""The confined process of a model's tokenizer and chat template.

    {"load": true} and the file                    tokenizer.json
    {"encode": true, "special": b} and UTF-8       -> the tokens and their types; two texts are a
                                                   pair
    {"decode": n, "skip_special": b} and tokens    what those from place n on add to the text of
                                                   those before -> {"text": …}
    {"extend": n, "is_end": b} and tokens          the same of each that is certain (``_extend``)
    {"check": true} and the template               raises for one that is no Jinja
    {"render": n}, chat and what to render         -> the text; all three in UTF-8, two in JSON;
                                                   of more than n characters {"chars": …} instead

Tokens are uint32, little-endian. ``splitup.client.text.tokenizer`` starts it.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from splitup.core import tuning
from splitup.core.errors import InvalidInput, describe
from splitup.sandbox.confinement import serve_confined
from splitup.sandbox.memory import limit_growth
from splitup.sandbox.serving import Answer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKEN_BYTES: Final = 4
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"  # what libraries decode a part of a character to


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(data: bytes | memoryview) -> tuple[int, ...]:
    """Return the tokens of such bytes."""
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}I", data)


_Decode = Callable[[Sequence[int]], str]


def _continue(decode: _Decode, tokens: Sequence[int], place: int) -> str:
    """Return what tokens from ``place`` on add to the text of those before."""
    text, known = decode(tokens), decode(tokens[:place])
    if not text.startswith(known):
        known = known.rstrip(_UNFINISHED)  # which the tokens may have finished
    return text[len(known) :] if text.startswith(known) else decode(tokens[place:])


def _extend(decode: _Decode, tokens: Sequence[int], place: int, is_end: bool) -> dict[str, Any]:
    """Return what each token from ``place`` on adds to the text, as far as that is certain.

    ``texts`` are of the tokens up to ``settled``; later texts depend on the tokens from ``start``
    on: those that gave the last text, and more if these begin within a character.
    """
    texts: list[str] = []
    start, settled = 0, place
    for end in range(place + 1, len(tokens) + 1):
        text = _continue(decode, tokens[start:end], settled - start)
        if text.endswith(_UNFINISHED) and not (is_end and end == len(tokens)):
            continue
        texts += [""] * (end - settled - 1) + [text]
        if text and not decode(tokens[settled:end]).startswith(_UNFINISHED):
            start = settled
        settled = end
    return {"texts": texts, "start": start, "settled": settled}


class _Library:
    """The child's side."""

    def answer(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        try:
            if "render" in question:
                from splitup.client.text.chat_template import render_chat

                chat, asked = (json.loads(str(data, "utf-8")) for data in buffers)
                with limit_growth(tuning.TEMPLATE_MEMORY_BYTES):
                    text = render_chat(**chat, **asked)
                    if len(text) > question["render"]:
                        return {"chars": len(text)}, ()
                    return {}, [text.encode(errors="replace")]
            if "check" in question:
                from splitup.client.text.chat_template import check_template

                check_template(str(buffers[0], "utf-8"))
                return {}, ()
            if "load" in question:
                from tokenizers import Tokenizer

                self._tokenizer: Tokenizer = Tokenizer.from_str(str(buffers[0], "utf-8"))
                self._tokenizer.no_padding()  # which files of encoders ask for
                self._tokenizer.no_truncation()
                return {}, ()
            if "encode" in question:
                text, *rest = (str(data, "utf-8") for data in buffers)
                pair, special = rest[0] if rest else None, question["special"]
                if question["most"] is not None:
                    self._tokenizer.enable_truncation(question["most"])
                try:
                    found = self._tokenizer.encode(text, pair, add_special_tokens=special)
                finally:
                    self._tokenizer.no_truncation()
                return {}, [pack_tokens(found.ids), pack_tokens(found.type_ids)]
            tokens = unpack_tokens(buffers[0])
            skips = question.get("skip_special", True)
            decode = partial(self._tokenizer.decode, skip_special_tokens=skips)
            if "decode" in question:
                return {"text": _continue(decode, tokens, question["decode"])}, ()
            return _extend(decode, tokens, question["extend"], question["is_end"]), ()
        except InvalidInput:
            raise
        except MemoryError:
            raise InvalidInput("takes too much memory") from None
        except Exception as error:  # the library raises plain Exception, and worse
            raise InvalidInput(f"cannot be used: {describe(error)}") from None


def main() -> None:
    serve_confined(_Library().answer, memory_bytes=int(sys.argv[1]))


if __name__ == "__main__":
    main()
