"""Convert a GGUF file's tokenizer to a tokenizer.json.

Of a BPE with merges ("gpt2", "gemma4") GGUF names how text is split before merging ("pre"). One of
SentencePiece ("llama") has a score for every token and no merges: of all neighbours that are a
token together, those of the highest score are merged first. "t5" has scores too, and takes the
tokens with the highest sum; "bert" takes the longest token that a word begins with.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, Final

from splitup.core.errors import InvalidModel
from splitup.graph.manifest import ChatInfo
from splitup_deploy.frontends.chat import choose_template, make_chat
from splitup_deploy.frontends.gguf.header import MAX_ARRAY, Metadata
from splitup_deploy.frontends.gguf.word_splits import GPT2, SPLITS

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
# As in the originals: of these models' special tokens, only this one takes the spaces before it.
_TAKES_SPACES_BEFORE: Final = {"bert": "<mask>", "modern-bert": "[MASK]"}
# Special tokens that end a text or a turn: many files name only one of theirs. As in llama.cpp.
_ENDS: Final = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "</s>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<EOT>", "[EOT]", "[EOS]", "[e~["),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
_HARMONY: Final = {"<|return|>", "<|call|>"}  # beside these "<|end|>" only ends a message


def make_tokenizer(metadata: Metadata, vocab: int) -> bytes:
    """Return a tokenizer.json. Raises InvalidModel for an unknown or inconsistent tokenizer."""
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _MAKERS:
        raise InvalidModel(_say_unknown("model", kind))
    tokens = _get_list(metadata, "tokens", str)
    kinds = _get_list(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    _expect(len(ids) == len(tokens) == len(kinds) == vocab, "has not one token per embedding")
    form = _MAKERS[kind](metadata, ids, kinds)
    family = metadata.get("general.architecture")
    takes_spaces = kind == "llama" and family == "phi3"
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": token == _TAKES_SPACES_BEFORE.get(str(family)),
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


def find_end_tokens(metadata: Metadata) -> set[int]:
    """Return the special tokens whose names say that they end a text or a turn."""
    tokens, kinds = _get_list(metadata, "tokens", str), _get_list(metadata, "token_type", int)
    found = {
        token: place
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in _ENDS and kind in (_CONTROL, _USER)
    }
    if found.keys() >= _HARMONY:
        found.pop("<|end|>", None)
    return set(found.values())


def _make_merged(metadata: Metadata, ids: dict[str, int], kinds: list[Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that merge bytes, written as printable characters."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if metadata["tokenizer.ggml.model"] == "gemma4":
        name = "gemma4"
    if not isinstance(name, str) or name not in SPLITS:
        raise InvalidModel(_say_unknown("pre", name))
    split = SPLITS[name]
    merges = []
    for merge in _get_list(metadata, "merges", str):
        left, right = merge[: (cut := merge.find(" ", 1))], merge[cut + 1 :]
        _expect(left in ids and right in ids and left + right in ids, "merges unknown tokens")
        merges.append([left, right])
    if split.is_plain:
        if name == "gemma4":  # whose first files say no, which makes the model worse
            metadata = {**metadata, "tokenizer.ggml.add_bos_token": True}
        return _make_plain(metadata, ids, kinds, merges, prefix=False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    patterns, last = split.patterns, split.patterns[-1]
    splitter: dict[str, Any] = {**byte_level, "use_regex": last == GPT2}
    if last == GPT2:
        patterns = patterns[:-1]  # it is the library's own
    if patterns:
        splitter = {"type": "Sequence", "pretokenizers": [*map(_make_split, patterns), splitter]}
    plain = {**byte_level, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if split.normalised else None,
        "pre_tokenizer": splitter,
        "post_processor": _make_post_processor(metadata, list(ids), split.starts) or plain,
        "decoder": plain,
        "model": {**_BPE, "ignore_merges": split.whole, "vocab": ids, "merges": merges},
    }


def _make_split(pattern: str) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def _make_scored(metadata: Metadata, ids: dict[str, int], kinds: list[Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that merge characters, and bytes where none is known.

    ``tokenizers`` wants every pair that is merged, in order. Of equal scores it merges those of the
    first pair, SentencePiece those further left.
    """
    scores = _get_scores(metadata, ids)
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    found = {token for token, kind in zip(ids, kinds, strict=True) if kind == _BYTE}
    _expect(found == names, "has not one token per byte")
    pieces = {token for token, kind in zip(ids, kinds, strict=True) if kind == _NORMAL}
    _expect(max(map(len, pieces), default=0) <= _LONGEST, "has a token that is too long")
    found_merges = (
        (-scores[ids[piece]], ids[piece[:cut]], ids[piece[cut:]])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    )
    merges = sorted(itertools.islice(found_merges, MAX_ARRAY + 1))
    _expect(len(merges) <= MAX_ARRAY, f"merges more than {MAX_ARRAY} pairs")
    tokens = list(ids)
    pairs = [[tokens[left], tokens[right]] for _, left, right in merges]
    return _make_plain(metadata, ids, kinds, pairs, _get_flag(metadata, "add_space_prefix", True))


def _make_plain(
    metadata: Metadata, ids: dict[str, int], kinds: list[Any], merges: list[Any], prefix: bool
) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that merge characters, and bytes where none is known."""
    tokens = list(ids)
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
            "merges": merges,
        },
    }


def _make_summed(metadata: Metadata, ids: dict[str, int], kinds: list[Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that take the tokens with the highest sum of scores."""
    scores = _get_scores(metadata, ids)
    unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else None
    table = bytes(n & 255 for n in _get_list(metadata, "precompiled_charsmap", int))
    normalizers: list[dict[str, Any]] = []
    if table:
        encoded = base64.b64encode(table).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if _get_flag(metadata, "remove_extra_whitespaces", True):
        normalizers += [
            {"type": "Strip", "strip_left": False, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": _SPACE},
        ]
    prefix = _get_flag(metadata, "add_space_prefix", True)
    spaces = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if prefix else "never",
        "split": True,
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": spaces,
        "post_processor": _make_post_processor(metadata, list(ids), starts=False, ends=True),
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": list(zip(ids, scores, strict=True)),
            "byte_fallback": _BYTE in kinds,
        },
    }


def _make_words(metadata: Metadata, ids: dict[str, int], kinds: list[Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that take the longest token a word begins with.

    GGUF writes a space before tokens that begin words, and nothing before those within. Texts stand
    between BOS and SEP whatever the file says, as in llama.cpp.
    """
    names = [
        token if kind == _CONTROL else token[1:] if token[:1] == _SPACE else f"##{token}"
        for token, kind in zip(ids, kinds, strict=True)
    ]
    table = {name: index for index, name in enumerate(names)}
    _expect(len(table) == len(ids), "has a token twice")
    small = _get_flag(metadata, "normalizer.lowercase", True)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 100)
    if type(unknown) is not int or not 0 <= unknown < len(names):
        raise InvalidModel("the GGUF tokenizer lacks a token for unknown words")
    around = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", 101),
        "eos_token_id": metadata.get("tokenizer.ggml.seperator_token_id", 102),
        **{"add_bos_token": True, "add_eos_token": True, "add_sep_token": False},
    }
    around = {f"tokenizer.ggml.{key}": value for key, value in around.items()}
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": _get_flag(metadata, "normalizer.strip_accents", small),
            "lowercase": small,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _make_post_processor(around, names, starts=True, ends=True),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": names[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": table,
        },
    }


_MAKERS: Final[dict[str, Callable[[Metadata, dict[str, int], list[Any]], dict[str, Any]]]] = {
    "gpt2": _make_merged,
    "gemma4": _make_merged,
    "llama": _make_scored,
    "t5": _make_summed,
    "bert": _make_words,
}


def _make_post_processor(
    metadata: Metadata, tokens: list[str], starts: bool, ends: bool = False
) -> dict[str, Any] | None:
    """Return what puts BOS before a text, EOS behind each, and SEP between two, None for nothing.

    ``starts`` and ``ends`` hold where the file says nothing. SEP is EOS where there is none.
    """
    around: list[list[str]] = []
    special: dict[str, Any] = {}
    for flag, name, wanted in (
        ("add_bos_token", "bos_token", starts),
        ("add_eos_token", "eos_token", ends),
        ("add_sep_token", "seperator_token", False),
    ):
        if not _get_flag(metadata, flag, wanted):
            around.append([])
            continue
        place = metadata.get(f"tokenizer.ggml.{name}_id")
        if place is None and name == "seperator_token":
            place = metadata.get("tokenizer.ggml.eos_token_id")
        if type(place) is not int or not 0 <= place < len(tokens):
            what = name.removesuffix("_token").upper()
            raise InvalidModel(f"the GGUF tokenizer wants a {what} token that does not exist")
        around.append([token := tokens[place]])
        special[token] = {"id": token, "ids": [place], "tokens": [token]}
    before, behind, between = around
    if not before and not behind:
        return None

    def write(text: str, kind: int, before: list[str]) -> list[Any]:
        parts = [*before, None, *behind]
        return [
            {"SpecialToken": {"id": part, "type_id": kind}}
            if part is not None
            else {"Sequence": {"id": text, "type_id": kind}}
            for part in parts
        ]

    single = write("A", 0, before)
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single + write("B", 1, between),
        "special_tokens": special,
    }


def read_chat(metadata: Metadata) -> tuple[ChatInfo | None, tuple[str, ...]]:
    """Return the file's chat template, None without one, and what to say of others."""
    start = "tokenizer.chat_template"
    found = {
        key.removeprefix(start).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key == start or key.startswith(f"{start}.")
    }
    template, notes = choose_template(found)
    if template is None:
        return None, notes
    tokens = _get_list(metadata, "tokens", str)

    def name(key: str) -> str:
        place = metadata.get(f"tokenizer.ggml.{key}")
        return tokens[place] if type(place) is int and 0 <= place < len(tokens) else ""

    return make_chat(template, name("bos_token_id"), name("eos_token_id")), notes


def _get_scores(metadata: Metadata, ids: dict[str, int]) -> list[Any]:
    scores = _get_list(metadata, "scores", float)
    _expect(len(scores) == len(ids) and all(map(math.isfinite, scores)), "lacks scores")
    return scores


def _get_flag(metadata: Metadata, name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise InvalidModel(f"the GGUF tokenizer's {name} says neither yes nor no")
    return value


def _say_unknown(key: str, value: Any) -> str:
    return f"tokenizer.ggml.{key} is {json.dumps(value)[:40]}, which is not known"


def _get_list(metadata: Metadata, name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise InvalidModel(f"the GGUF tokenizer's {name} are no list of {kind.__name__}")
    return value


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidModel(f"the GGUF tokenizer {problem}; convert the model again")
