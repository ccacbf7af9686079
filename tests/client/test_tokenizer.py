"""A model's tokenizer in a process of its own, and files that are made to do harm."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from splitup.client.tokenizer import ModelTokenizer, check_chat_template
from splitup.core import limits, tuning
from splitup.core.errors import InvalidModel
from splitup.demo.run import find_example
from splitup.graph.manifest import ChatInfo

FILE = (find_example() / "tokenizer.json").read_bytes()
TEXT = "Network monitoring – ünïcode 漢字 🙂, tools"


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[ModelTokenizer]:
    with closing(ModelTokenizer(FILE, "model packages")) as running:
        yield running


def test_texts_and_tokens_are_the_library_s(tokenizer: ModelTokenizer) -> None:
    library = Tokenizer.from_str(FILE.decode())
    for special in (True, False):
        tokens = library.encode(TEXT, add_special_tokens=special).ids
        assert tokenizer.encode(TEXT, add_special_tokens=special) == tokens
        assert tokenizer.decode(tokens, skip_special_tokens=special) == library.decode(
            tokens, skip_special_tokens=special
        )
    assert tokenizer.encode("") == library.encode("").ids
    assert tokenizer.encode("\ud800") == library.encode("?").ids  # half a character


def test_streams_decode_batches_as_single_tokens(tokenizer: ModelTokenizer) -> None:
    library = Tokenizer.from_str(FILE.decode())
    tokens = library.encode(TEXT).ids
    plain = DecodeStream(skip_special_tokens=True)
    wanted = [plain.step(library, token) or "" for token in tokens]
    one, other = tokenizer.open_stream(), tokenizer.open_stream()
    assert one.decode(tokens[:9]) + other.decode(tokens) + one.decode(tokens[9:]) == (
        wanted[:9] + wanted + wanted[9:]
    )


def test_a_file_that_is_no_tokenizer_is_refused_by_name() -> None:
    for data in (b"{}", b"\xff", b"[" * 100_000):
        with pytest.raises(InvalidModel, match=r"tokenizer \(tokenizer.json\) of model evil"):
            ModelTokenizer(data, "model evil")


def make_split(pattern: str) -> bytes:
    """Return a tokenizer.json that splits texts at a pattern."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    model = {"type": "BPE", "vocab": {"a": 0, "!": 1}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    return json.dumps({**content, "pre_tokenizer": {**split, "invert": False}}).encode()


def test_s13_a_tokenizer_that_panics_ends_its_own_process_alone() -> None:
    """The native library panics when its pattern gives up; ``except Exception`` misses a panic."""
    with closing(ModelTokenizer(make_split(r"(a+)+\1c"), "model evil")) as tokenizer:
        with pytest.raises(InvalidModel, match="of model evil ended its process"):
            tokenizer.encode("a" * 5_000 + "!")
        assert not tokenizer.is_running
        with pytest.raises(InvalidModel, match="has ended"):
            tokenizer.encode("a")


def test_s13_a_tokenizer_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ModelTokenizer(FILE, "model evil")) as tokenizer:
        os.kill(tokenizer._child.pid, signal.SIGSTOP)  # as good as an endless loop
        with pytest.raises(InvalidModel, match=r"no answer within 0.2 s; do not trust"):
            monkeypatch.setattr(ModelTokenizer._ask, "__kwdefaults__", {"timeout_s": 0.2})
            tokenizer.encode("a" * 40 + "!")
        assert not tokenizer.is_running


def test_s13_a_tokenizer_s_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replacements of one character by thousands: a gigabyte out of a short text."""
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60_000}
    content = json.loads(make_split("x"))
    content["normalizer"] = {"type": "Sequence", "normalizers": [grow, grow]}
    monkeypatch.setattr(tuning, "TOKENIZER_MEMORY_BYTES", 512 * limits.MIB)
    with closing(ModelTokenizer(json.dumps(content).encode(), "model evil")) as tokenizer:
        with pytest.raises(InvalidModel, match="ended its process"):
            tokenizer.encode("a")


def test_a_process_that_is_killed_is_named(tokenizer: ModelTokenizer) -> None:
    with closing(ModelTokenizer(FILE, "model packages")) as other:
        os.kill(other._child.pid, signal.SIGKILL)
        with pytest.raises(InvalidModel, match=r"model packages.*status -9"):
            other.encode("a")
    assert tokenizer.encode("a")


def test_a_conversation_is_rendered_apart(tokenizer: ModelTokenizer) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    chat = ChatInfo(template=template, bos_token="<s>", eos_token="")
    assert tokenizer.render_chat(chat, [{"role": "user", "content": "hé"}]) == "<s>[user] hé"
    refusing = ChatInfo(template="{{ raise_exception('no') }}", bos_token="", eos_token="")
    with pytest.raises(InvalidModel, match="refuses the messages: no"):
        tokenizer.render_chat(refusing, [])


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "1+" * 30_000 + "1 }}",  # overflows the stack of Python's own compiler
        "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}"
        "{% endfor %}{{ ns.t }}",
    ],
)
def test_s13_a_template_that_ends_its_process_is_named(template: str) -> None:
    chat = ChatInfo(template=template, bos_token="", eos_token="")
    with closing(ModelTokenizer(FILE, "model evil")) as tokenizer:
        with pytest.raises(InvalidModel, match="chat template of model evil"):
            tokenizer.render_chat(chat, [])


def test_a_template_is_checked_apart() -> None:
    check_chat_template("{{ messages }}")
    for bad in ("{% for %}", "{{ " + "(" * 30_000):
        with pytest.raises(InvalidModel, match="chat template cannot be used"):
            check_chat_template(bad)
