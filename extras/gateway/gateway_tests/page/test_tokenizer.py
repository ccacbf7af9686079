"""The page's tokenizer gives Python's tokens and texts, on a corpus of all scripts."""

from __future__ import annotations

import random
import sys
import unicodedata
from contextlib import closing
from typing import Any

from gateway_tests.page.device import run_on_device
from tokenizers import Tokenizer

from splitup.client.text.tokenizer import ModelTokenizer
from splitup.demo.models import find_example
from tests.client.text.test_tokenizer import make_word_tokenizers

FILE = (find_example() / "tokenizer.json").read_text()
WRITTEN = [
    "",
    " ",
    "   two  spaces ",
    "tabs\tand\r\nlines\n\n",
    "don't, we'll, I'VE: 3.14 and 1,000,000 or 0x1F",
    "snake_case camelCase kebab-case http://a.b/c?d=e#f",
    "ünïcode, naïve, Ångström, ﬁne, ① ½ ² İstanbul ẞ ß",
    "e\u0301 composed é, \u1100\u1161\u11a8 각",
    "漢字かなカナ 한국어 ไทย हिन्दी العربية עברית Ελληνικά Кириллица ქართული አማርኛ தமிழ்",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ©️ ☺︎",
    "\u200b\u200d\ufeff\u00ad\u2028\u2029\u00a0\u3000\x00\x01\x7f\x85",
    "\ufffd broken \ufffe \uffff \U0010ffff",
    "\u202eright to left\u202c",
    "<|endoftext|> <s> </s> [UNK] <unk> <pad>",
    "a" * 300,
    "ab" * 150 + "!" * 40,
]
COMPARE = """
    return given.map(({ file, texts, lists }) => {
        const tokenizer = new page.ModelTokenizer(file);
        return {
            encoded: texts.map((text) => tokenizer.encode(text)),
            plain: texts.map((text) => tokenizer.encode(text, false)),
            decoded: lists.map((tokens) => tokenizer.decode(tokens)),
            streamed: lists.map((tokens) => {
                const stream = tokenizer.openStream(tokens.slice(0, 3));
                const parts = tokens.slice(3).map((token) => stream.extend(token));
                return parts.join("") + stream.extend(null);
            }),
        };
    });
"""


def make_corpus() -> list[str]:
    """Return texts with characters of all blocks, and with mixtures of them."""
    known = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
    ]
    dice = random.Random(15)
    texts = ["".join(known[place : place + 40]) for place in range(0, len(known), 1_000)]
    words = [word for text in WRITTEN for word in text.split(" ")]
    for _ in range(100):
        parts = [
            dice.choice(words) if dice.random() < 0.6 else "".join(dice.choices(known, k=3))
            for _ in range(dice.randrange(1, 12))
        ]
        texts.append(dice.choice(["", " ", "\n"]).join(parts))
    return WRITTEN + texts


def test_texts_and_tokens_are_those_of_python() -> None:
    library = Tokenizer.from_str(FILE)
    texts = make_corpus()
    dice = random.Random(16)
    vocab = library.get_vocab_size()
    lists = [[dice.randrange(vocab) for _ in range(dice.randrange(20))] for _ in range(100)]
    lists += [library.encode(text).ids for text in texts[:200]]
    [found] = run_on_device(COMPARE, [{"file": FILE, "texts": texts, "lists": lists}])
    for text, encoded, plain in zip(texts, found["encoded"], found["plain"], strict=True):
        assert encoded == library.encode(text).ids, repr(text)
        assert plain == library.encode(text, add_special_tokens=False).ids, repr(text)
    for tokens, decoded in zip(lists, found["decoded"], strict=True):
        assert decoded == library.decode(tokens), tokens
    with closing(ModelTokenizer(FILE.encode(), "example")) as tokenizer:
        for tokens, streamed in zip(lists[:40] + lists[-40:], streams(found), strict=True):
            stream = tokenizer.open_stream(tokens[:3])
            pairs = [pair for token in tokens[3:] for pair in stream.extend([token])]
            pairs += stream.extend([], is_end=True)
            assert streamed == "".join(text for _, text in pairs), tokens


def streams(found: dict[str, Any]) -> list[str]:
    return [*found["streamed"][:40], *found["streamed"][-40:]]


def test_half_characters_become_question_marks() -> None:
    [found] = run_on_device(COMPARE, [{"file": FILE, "texts": ["a\ud800b", "\udc00"], "lists": []}])
    library = Tokenizer.from_str(FILE)
    assert found["encoded"] == [library.encode("a?b").ids, library.encode("?").ids]


def test_texts_of_other_kinds_of_tokenizers_grow_as_in_python() -> None:
    built = make_word_tokenizers()
    lists = [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [5, 4, 0]]
    given = [{"file": one.to_str(), "texts": [], "lists": lists} for one in built.values()]
    for name, one in zip(built, run_on_device(COMPARE, given), strict=True):
        library = built[name]
        assert one["decoded"] == [library.decode(tokens) for tokens in lists], name
