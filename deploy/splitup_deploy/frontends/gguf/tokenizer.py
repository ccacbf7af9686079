"""Convert a GGUF file's tokenizer to a tokenizer.json, if it is a BPE.

Of a byte-level one ("gpt2") GGUF names how text is split before merging ("pre"); the patterns are
those of llama.cpp's ``llama_model_loader``/``unicode_regex_split`` and of the models' own
tokenizer.json files. One of SentencePiece ("llama") has a score for every token and no merges: of
all neighbours that are a token together, those of the highest score are merged first.
"""

from __future__ import annotations

import json
import math
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
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_SPACE: Final = "\u2581"  # what SentencePiece writes for a space
_BPE: Final = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
_LONGEST: Final = 128  # characters of a token that is made by merging; models' longest has 48
# Phi-3's other special tokens take the spaces that follow them.
_PHI3_KEEPS_SPACES: Final = ("<unk>", "<s>", "<|endoftext|>")


def make_tokenizer(metadata: Metadata, vocab: int) -> bytes | None:
    """Return a tokenizer.json, or None when the tokenizer is of another kind.

    Raises InvalidModel when it claims to be a BPE and is not consistent.
    """
    kind, split = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    is_byte_level = kind == "gpt2" and split in _SPLITS
    tokens = _get_list(metadata, "tokens", str)
    kinds = _get_list(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    if not is_byte_level and (kind != "llama" or _BYTE not in kinds):
        return None
    ids = {token: index for index, token in enumerate(tokens)}
    _expect(len(ids) == len(tokens) == len(kinds) == vocab, "has not one token per embedding")
    form = _make_byte_level(metadata, ids) if is_byte_level else _make_scored(metadata, ids, kinds)
    takes_spaces = not is_byte_level and metadata.get("general.architecture") == "phi3"
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
                "rstrip": takes_spaces and token not in _PHI3_KEEPS_SPACES,
                "normalized": False,
                "special": kinds[index] == _CONTROL,
            }
            for index, token in enumerate(tokens)
            if kinds[index] in (_CONTROL, _USER)
        ],
        **form,
    }
    return json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()


def _make_byte_level(metadata: Metadata, ids: dict[str, int]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that merge bytes, written as printable characters."""
    split = metadata["tokenizer.ggml.pre"]
    assert isinstance(split, str)  # it is a key
    merges = _get_list(metadata, "merges", str)
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
    plain = {**byte_level, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if normalised else None,
        "pre_tokenizer": splitter,
        "post_processor": _make_post_processor(metadata, list(ids), starts) or plain,
        "decoder": plain,
        "model": {
            **_BPE,
            "ignore_merges": whole,
            "vocab": ids,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _make_scored(metadata: Metadata, ids: dict[str, int], kinds: list[Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that merge characters, and bytes where none is known.

    ``tokenizers`` wants every pair that is merged, in order. Of equal scores it merges those of the
    first pair, SentencePiece those further left.
    """
    scores = _get_list(metadata, "scores", float)
    _expect(len(scores) == len(ids) and all(map(math.isfinite, scores)), "lacks scores")
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    found = {token for token, kind in zip(ids, kinds, strict=True) if kind == _BYTE}
    _expect(found == names, "has not one token per byte")
    pieces = {token for token, kind in zip(ids, kinds, strict=True) if kind == _NORMAL}
    _expect(max(map(len, pieces), default=0) <= _LONGEST, "has a token that is too long")
    merges = [
        (-scores[ids[piece]], ids[piece[:cut]], ids[piece[cut:]])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort()
    tokens = list(ids)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    _expect(type(prefix) is bool, "says neither yes nor no to a space before a text")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefix else [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _make_post_processor(metadata, tokens, starts=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_BPE,
            "unk_token": next(
                (tokens[n] for n, kind in enumerate(kinds) if kind == _UNKNOWN), None
            ),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [[tokens[left], tokens[right]] for _, left, right in merges],
        },
    }


def _make_post_processor(
    metadata: Metadata, tokens: list[str], starts: bool
) -> dict[str, Any] | None:
    """Return the post-processor that puts BOS before a text, if the model wants one."""
    wanted = metadata.get("tokenizer.ggml.add_bos_token", starts)
    _expect(type(wanted) is bool, "says neither yes nor no to a BOS token")
    if not wanted:
        return None
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
