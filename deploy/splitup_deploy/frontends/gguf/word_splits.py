r"""How texts are split into words before bytes are merged, by the names that GGUF files give that.

The patterns are those of the models' own tokenizer.json files where llama.cpp quotes them, and else
those of its ``llama-vocab.cpp``. Both split alike; llama.cpp's approximate what its engine cannot
express (``\p{Lu}``, a look ahead for a word's end).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s+(?!\S)|\s+"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_WORDS: Final = f"{_CONTRACTIONS}|{_LETTERS}" + r"|\p{N}%s" + _REST
_THREES: Final = _WORDS % "{1,3}"
_SINGLES: Final = _WORDS % ""
_QWEN35: Final = _SINGLES.replace(r"\p{L}+", r"[\p{L}\p{M}]+", 1).replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_CASES: Final = (  # a word ends where a small letter is followed by a capital one
    r"[^\r\n\p{L}\p{N}]?[%(capital)s]*[%(small)s]+%(ending)s"
    r"|[^\r\n\p{L}\p{N}]?[%(capital)s]+[%(small)s]*%(ending)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n%(slash)s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_PARTS: Final = {
    "capital": r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
    "small": r"\p{Ll}\p{Lm}\p{Lo}\p{M}",
    "ending": "",
    "digits": "",
    "slash": "/",
}
_ENDING: Final = {"ending": f"{_CONTRACTIONS}?"}
_GPT4O: Final = _CASES % {**_TEKKEN_PARTS, **_ENDING, "digits": "{1,3}"}
_KIMI_K2: Final = r"\p{Han}+|" + _CASES % {
    "capital": r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
    "small": r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
    **_ENDING,
    "digits": "{1,3}",
    "slash": "",
}
_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"  # Chinese, Hiragana, Katakana
_MARKED: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK_V3: Final = (r"\p{N}{1,3}", _KANA, rf"{_MARKED}[\r\n]*|\s*[\r\n]+|{_SPACES}")
_IDEOGRAPHS: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LATIN_GREEK_CYRILLIC: Final = (  # letters that have cases, as DeepSeek-LLM lists them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90"
    "-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-"
    "\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN: Final = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_COUNTED: Final = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # threes, counted from a number's end
_DIGITS: Final = r"\p{N}"
_BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES: Final = r"[^\n]+|[\n]+"
_YOUTU: Final = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How one kind of tokenizer splits texts: by its patterns, one after another.

    ``normalised``: texts become NFC before. ``whole``: a word that is a token is not split.
    ``starts``: a text starts with BOS unless the file says no. ``is_plain``: characters are merged,
    not bytes, and spaces are written as SentencePiece does.
    """

    patterns: tuple[str, ...] = ()
    normalised: bool = False
    whole: bool = False
    starts: bool = False
    is_plain: bool = False


_LLAMA3: Final = WordSplit((_THREES,), whole=True, starts=True)
_BY_DIGIT: Final = WordSplit((_DIGITS, GPT2))
_KINDS: Final[dict[str, WordSplit]] = {
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 "
    "jina-v1-en jina-v2-code roberta-bpe mpt jais trillion granite-docling": WordSplit((GPT2,)),
    "olmo": WordSplit((GPT2,), normalised=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": _BY_DIGIT,
    "command-r": WordSplit((_DIGITS, GPT2), normalised=True),
    "default": WordSplit((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": WordSplit((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3,
    "dbrx smaug-bpe glm4 chatglm-bpe": WordSplit((_THREES,)),
    "qwen2 f2llmv2": WordSplit((_SINGLES,), normalised=True),
    "deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": WordSplit((_SINGLES,)),
    "qwen35": WordSplit((_QWEN35,), normalised=True),
    "ufakzeka": WordSplit((_SINGLES.removeprefix(f"{_CONTRACTIONS}|"),)),
    "laguna": WordSplit((_LINES, _SINGLES)),
    "minicpm5": WordSplit((r"\p{N}{1,3}", _WORDS % "+"), whole=True),
    "seed-coder": WordSplit((_SINGLES.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": WordSplit((_SINGLES.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    "exaone-moe": WordSplit(
        (
            f"{_CONTRACTIONS}|"
            r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    "jais-2": WordSplit(
        (
            _THREES.removesuffix(_SPACES)
            + "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1))
            + r"\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": WordSplit(_DEEPSEEK_V3),
    "spark2_5": WordSplit((*_DEEPSEEK_V3[:2], rf"{_MARKED}|[\r\n]|{_SPACES}", _DIGITS)),
    "afmoe": WordSplit((_COUNTED, _ASIAN, _DEEPSEEK_V3[2])),
    "deepseek-llm": WordSplit(
        (
            r"[\r\n]",
            rf"\s?[{_LATIN_GREEK_CYRILLIC}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _IDEOGRAPHS,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": WordSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, _DIGITS)),
    "kimi-k2": WordSplit((_KIMI_K2,)),
    "tekken": WordSplit((_CASES % _TEKKEN_PARTS,), whole=True, starts=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": WordSplit((_GPT4O,)),
    "granite-embed-multi-97m": WordSplit((_GPT4O,), whole=True),
    "tiny_aya cohere2moe": WordSplit((_COUNTED, _GPT4O)),
    "youtu": WordSplit((_YOUTU, _CASES % {**_TEKKEN_PARTS, **_ENDING}), whole=True),
    "superbpe": WordSplit((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "poro-chat bloom gpt3-finnish": WordSplit((_BLOOM,)),
    "viking": WordSplit((_BLOOM, _DIGITS)),
    "chameleon": WordSplit(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGITS,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        starts=True,
    ),
    "gemma4 granite-embed-multi-311m": WordSplit(is_plain=True, starts=True),
    "sarvam-moe": WordSplit(is_plain=True),
}
SPLITS: Final = {name: split for names, split in _KINDS.items() for name in names.split()}
