"""Texts that tokenizers disagree about: spaces, digits, scripts, marks, emoji, code, control."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

STRANGE = [  # each in one line
    "",
    " ",
    "  a  b   c ",
    "\t\tif x:\n\t\t\treturn  y\r\n\r\n\r\n",
    "\n\n\n \n  \n",
    "0 12 345 6789 1234567 12,345.678e-9",
    "½ ² Ⅻ ٣٤٥ १२३४ 12a3",
    "I'M DON'T WE'LL he'd 'tis it'S y'all've o'clock 'ſ",
    "汉字とかなカタカナ한국어。「引用」、！？…",
    "👩‍👩‍👧‍👦 😀🏳️‍🌈 🇩🇪 ✌🏽",
    "e\u0301 a\u0308\u0323 क्षत्रिय ก็ำ Z\u0351\u0349a",
    "\u202eالعربية שָׁלוֹם\u202c mixed RTL 123 ١٢٣",
    "\x00\x01\x07\x1b[31m\x7f\x85\u200b\ufeff\u00ad",
    'def f(x: int) -> str:\n    return f"{x!r:>{10}}"  # ok\n',
    "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "camelCaseHTTPServer snake_case ÀÉÎ ǅungla ʰʷ MIXEDcase",
    "a\u00a0b\u2003c\u3000d\u2028e",
    "https://x.org/a?b=c&d=%20#e user@mail.com C:\\dir\\f.txt",
    "!!!???...---===>>> <<<*** ((())) [[[]]] {{{}}} $$$ €£¥ ^^^ ~~~ ``` |||",
    "ﬁ ﬀ Å Å ①②③ ㎏ ﾊﾝｶｸ Ｆｕｌｌ",
    "Ελληνικά Кириллица Հայերեն ქართული አማርኛ தமிழ் မြန်မာ ខ្មែរ ລາວ",
    "x" * 70 + " " * 40 + "y",
    "\u2581x \u2581 <0x41> Ġ Ċ",
    "𝒜𝓫𝔠 𐐀𐐨 𠀀𪛖 🂡\U000e0041\uffff",
]


def digest_tokens(tokens: Sequence[int]) -> str:
    """Return what stands for a text's tokens in a golden file."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:6]
