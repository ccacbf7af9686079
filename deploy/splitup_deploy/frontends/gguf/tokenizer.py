"""Convert a GGUF file's tokenizer to a tokenizer.json, if it is a byte-level BPE.

GGUF names how text is split before merging ("pre"); the patterns are those of llama.cpp's
``llama_model_loader``/``unicode_regex_split`` and of the models' own tokenizer.json files.
"""

from __future__ import annotations

import json
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.chat import make_chat
from splitup_deploy.frontends.gguf.header import Metadata

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35: Final = (
    (_WORDS % "")
    .replace(r"\p{L}+", r"[\p{L}\p{M}]+", 1)
    .replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
)
_CASES: Final = (  # a word ends where a small letter is followed by a capital one
    r"[^\r\n\p{L}\p{N}]?[%(capital)s]*[%(small)s]+%(ending)s"
    r"|[^\r\n\p{L}\p{N}]?[%(capital)s]+[%(small)s]*%(ending)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n%(slash)s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = _CASES % {
    "capital": r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
    "small": r"\p{Ll}\p{Lm}\p{Lo}\p{M}",
    "ending": "",
    "digits": "",
    "slash": "/",
}
_KIMI_K2: Final = r"\p{Han}+|" + _CASES % {
    "capital": r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
    "small": r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
    "ending": f"{_CONTRACTIONS}?",
    "digits": "{1,3}",
    "slash": "",
}
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese characters, Hiragana, Katakana
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# pre-tokenizer -> its patterns, applied one after another (GPT-2's own if there are none), whether
# text is normalised (NFC) before, whether a word that is a token is not split, and whether a text
# starts with BOS by default
_SPLITS: Final[dict[str, tuple[tuple[str, ...], bool, bool, bool]]] = {
    "gpt-2": ((), False, False, False),
    "olmo": ((), True, False, False),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), ((_WORDS % "{1,3}",), False, True, True)),
    "glm4": ((_WORDS % "{1,3}",), False, False, False),
    "qwen2": ((_WORDS % "",), True, False, False),
    "qwen35": ((_QWEN35,), True, False, False),
    "deepseek-v3": (_DEEPSEEK_V3, False, False, False),
    "kimi-k2": ((_KIMI_K2,), False, False, False),
    "tekken": ((_TEKKEN,), False, True, True),
}
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5


def make_tokenizer(metadata: Metadata, vocab: int) -> bytes | None:
    """Return a tokenizer.json, or None when the tokenizer is of another kind.

    Raises InvalidModel when it claims to be a byte-level BPE and is not consistent.
    """
    split = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or split not in _SPLITS:
        return None
    assert isinstance(split, str)  # it is a key
    tokens = _get_list(metadata, "tokens", str)
    merges = _get_list(metadata, "merges", str)
    kinds = _get_list(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    _expect(len(ids) == len(tokens) == len(kinds) == vocab, "has not one token per embedding")
    for merge in merges:
        left, _, right = merge.partition(" ")
        _expect(left in ids and right in ids and left + right in ids, "merges unknown tokens")
    patterns, normalised, whole, starts = _SPLITS[split]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splitter: dict[str, Any] = {**byte_level, "use_regex": True}
    if patterns:
        words: list[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in patterns
        ]
        splitter["use_regex"] = False
        splitter = {"type": "Sequence", "pretokenizers": [*words, splitter]}
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kinds[index] == _CONTROL,
            }
            for index, token in enumerate(tokens)
            if kinds[index] in (_CONTROL, _USER)
        ],
        "normalizer": {"type": "NFC"} if normalised else None,
        "pre_tokenizer": splitter,
        "post_processor": _make_post_processor(metadata, tokens, starts, byte_level),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole,
            "vocab": ids,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()


def _make_post_processor(
    metadata: Metadata, tokens: list[Any], starts: bool, byte_level: dict[str, Any]
) -> dict[str, Any]:
    """Return the post-processor that puts BOS before a text, if the model has one."""
    wanted = metadata.get("tokenizer.ggml.add_bos_token", starts)
    _expect(type(wanted) is bool, "says neither yes nor no to a BOS token")
    if not wanted:
        return {**byte_level, "use_regex": True}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if type(bos) is not int or not 0 <= bos < len(tokens):
        raise InvalidModel("the GGUF tokenizer wants a BOS token that does not exist")
    name = tokens[bos]
    begin, body = {"SpecialToken": {"id": name, "type_id": 0}}, {"id": "A", "type_id": 0}
    second = {"id": "B", "type_id": 1}
    return {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": body}],
        "pair": [begin, {"Sequence": body}, begin, {"Sequence": second}],
        "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}},
    }


def read_chat(metadata: Metadata) -> ChatInfo | None:
    """Return the file's chat template and special tokens, or None without a template."""
    template = metadata.get("tokenizer.chat_template")
    if template is None:
        return None
    tokens = _get_list(metadata, "tokens", str)

    def name(key: str) -> str:
        place = metadata.get(f"tokenizer.ggml.{key}")
        return tokens[place] if type(place) is int and 0 <= place < len(tokens) else ""

    return make_chat(template, name("bos_token_id"), name("eos_token_id"))


def _get_list(metadata: Metadata, name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise InvalidModel(f"the GGUF tokenizer's {name} are no list of {kind.__name__}")
    return value


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidModel(f"the GGUF tokenizer {problem}; convert the model again")
