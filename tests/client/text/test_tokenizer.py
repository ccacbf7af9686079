"""A model's tokenizer in a process of its own, and files that are made to do harm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.limits import MIB
from splitup.decode.stop import StopFilter
from splitup.demo.models import find_example
from splitup.graph.manifest import ChatInfo
from splitup.sandbox.child import _Patience
from tests.builders import HANG_S
from tests.parameters import some_of

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
    tokens = tokenizer.encode(TEXT)
    single, batches = tokenizer.open_stream(tokens[:3]), tokenizer.open_stream(tokens[:3])
    one_by_one = [pair for token in tokens[3:] for pair in single.extend([token])]
    assert batches.extend(tokens[3:9]) + batches.extend(tokens[9:]) == one_by_one
    assert [token for token, _ in one_by_one] == tokens[3:]
    text = "".join(text for _, text in one_by_one)
    assert tokenizer.decode(tokens[:3]) + text == tokenizer.decode(tokens) == TEXT


WORDS = ("the", "cat", "sat", "on", "a", "mat")


def make_word_tokenizers() -> dict[str, Tokenizer]:
    """Return tokenizers that leave out the space before a text's first word."""
    plain = {word: place for place, word in enumerate(WORDS)}
    marked = {f"\u2581{word}": place for place, word in enumerate(WORDS)}
    space = Tokenizer(WordLevel(marked, unk_token="?"))
    space.decoder, space.pre_tokenizer = decoders.Metaspace(), pre_tokenizers.Metaspace()
    unigram = Tokenizer(Unigram([(word, -1.0) for word in marked], None))
    unigram.decoder, unigram.pre_tokenizer = decoders.Metaspace(), pre_tokenizers.Metaspace()
    pieces = Tokenizer(WordPiece({**plain, "[UNK]": 6, "##s": 7}))
    pieces.decoder, pieces.pre_tokenizer = decoders.WordPiece(), pre_tokenizers.BertPreTokenizer()
    llama = Tokenizer(BPE({**marked, "<0xE6>": 6, "<0xBC>": 7, "<0xA2>": 8}, []))
    space_first = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    llama.decoder = decoders.Sequence([*space_first, decoders.Strip(" ", 1, 0)])
    return {"metaspace": space, "unigram": unigram, "wordpiece": pieces, "llama": llama}


@pytest.mark.parametrize("name", make_word_tokenizers())
def test_the_first_word_after_a_prompt_keeps_its_space(name: str) -> None:
    with closing(ModelTokenizer(make_word_tokenizers()[name].to_str().encode(), name)) as tokenizer:
        prompt, rest = [0, 1], [2, 3, 4, 5]
        found = tokenizer.open_stream(prompt).extend(rest)
        assert found == [(2, " sat"), (3, " on"), (4, " a"), (5, " mat")]
        assert tokenizer.open_stream([]).extend(rest)[0] == (2, "sat")
        assert tokenizer.decode([2], after=[1]) == " sat"
        ends = StopFilter([" sat"])
        assert not ends.push(*found[0]) and ends.found


def test_an_unfinished_character_waits_for_its_rest_or_the_end() -> None:
    """Byte tokens are decoded together, so a context must not begin within a character."""
    with closing(ModelTokenizer(make_word_tokenizers()["llama"].to_str().encode(), "m")) as one:
        stream, han = one.open_stream([0]), [6, 7, 8]
        assert stream.extend(han[:2]) == []
        assert stream.extend(han[2:]) == [(6, ""), (7, ""), (8, "\u6f22")]
        for _ in range(20):
            assert stream.extend(han)[-1] == (8, "\u6f22")
        assert stream.extend([1, 6, 7], is_end=True) == [(1, " cat"), (6, ""), (7, "\ufffd\ufffd")]
        assert one.open_stream([0, 6]).extend([7, 8, 1])[1:] == [(8, "\u6f22"), (1, " cat")]
        after = one.open_stream([0, 6, 7]).extend([8, *han, 1])
        assert after == [(8, "\u6f22"), (6, ""), (7, ""), (8, "\u6f22"), (1, " cat")]


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


def test_a_tokenizer_that_gets_no_processor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped here, and said to wait for a processor, as on a busy machine."""
    with closing(ModelTokenizer(FILE, "m")) as tokenizer:
        monkeypatch.setattr(_Patience, "_read_queued_s", lambda _: time.monotonic())
        monkeypatch.setattr(ModelTokenizer._ask, "__kwdefaults__", {"timeout_s": 0.05})
        os.kill(tokenizer._child.pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (tokenizer._child.pid, signal.SIGCONT)).start()
        assert tokenizer.encode("a")


def test_a_process_whose_own_threads_have_the_processors_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Patience, "_read_queued_s", lambda _: time.monotonic())
    began, patience = time.monotonic(), _Patience(os.getpid(), 0.05)
    while patience.compute_left_s() > 0:
        assert time.monotonic() < began + HANG_S


def test_the_time_in_which_others_have_the_processor_is_known() -> None:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for loop in loops:
            os.sched_setaffinity(loop.pid, {min(os.sched_getaffinity(0))})
        began, patience = time.monotonic(), _Patience(loops[0].pid, 1)
        while patience.compute_left_s() + time.monotonic() < began + 1.05:
            assert time.monotonic() < began + HANG_S
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_s13_a_tokenizer_s_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replacements of one character by thousands: a gigabyte out of a short text."""
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60_000}
    content = json.loads(make_split("x"))
    content["normalizer"] = {"type": "Sequence", "normalizers": [grow, grow]}
    monkeypatch.setattr(tuning, "TOKENIZER_MEMORY_BYTES", 512 * limits.MIB)
    with closing(ModelTokenizer(json.dumps(content).encode(), "model evil")) as tokenizer:
        with pytest.raises(InvalidModel, match="ended its process"):
            tokenizer.encode("a")


async def test_s33_a_long_text_holds_up_no_stream(tokenizer: ModelTokenizer) -> None:
    text = TEXT * (tuning.LONG_TEXT_CHARS // len(TEXT) + 1)
    tokens = tokenizer.encode(text)
    async with asyncio.timeout(HANG_S):
        assert await tokenizer.read(len(text), lambda one: one.encode(text), "a") == tokens
        assert tokenizer._other is not None
        os.kill(tokenizer._other._child.pid, signal.SIGSTOP)
        long = asyncio.create_task(tokenizer.read(len(text), lambda one: one.encode(text), "a"))
        try:
            stream = tokenizer.open_stream(tokens[:3])
            found = await tokenizer.run(lambda: stream.extend(tokens[3:5]))
            assert [token for token, _ in found] == tokens[3:5]
            short = await tokenizer.read(len(TEXT), lambda one: one.encode(TEXT), "b")
            assert short == tokenizer.encode(TEXT) and not long.done()
        finally:
            os.kill(tokenizer._other._child.pid, signal.SIGCONT)
        assert await long == tokens
        os.kill(tokenizer._other._child.pid, signal.SIGKILL)  # the next one starts another
        with pytest.raises(InvalidInput, match="too much memory; shorten it"):
            await tokenizer.read(len(text), lambda one: one.encode(text), "a")
        assert await tokenizer.read(len(text), lambda one: one.encode(text), "a") == tokens
        assert tokenizer.is_running


async def test_s104_texts_of_one_key_hold_up_no_other(tokenizer: ModelTokenizer) -> None:
    done: list[str] = []

    async def read(principal: str) -> None:
        await tokenizer.read(len(TEXT), lambda one: one.encode(TEXT), principal)
        done.append(principal)

    os.kill(tokenizer._child.pid, signal.SIGSTOP)
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as group:
        try:
            for principal in [*("a" * 20), "b"]:
                group.create_task(read(principal))
            await asyncio.sleep(0)  # all of them wait
        finally:
            os.kill(tokenizer._child.pid, signal.SIGCONT)
    assert done.index("b") <= 2


def test_s90_a_token_is_no_long_text() -> None:
    library = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.decoder = decoders.Replace("a", "x" * (tuning.TOKEN_CHARS + 1))
    with closing(ModelTokenizer(library.to_str().encode(), "model packages")) as tokenizer:
        for ask in (tokenizer.decode, tokenizer.open_stream([1]).extend):
            with pytest.raises(InvalidModel, match="model packages makes 1025 characters of 1 tok"):
                ask([0])


def test_a_process_that_is_killed_is_named(tokenizer: ModelTokenizer) -> None:
    with closing(ModelTokenizer(FILE, "model packages")) as other:
        os.kill(other._child.pid, signal.SIGKILL)
        with pytest.raises(InvalidModel, match=r"model packages.*status -9"):
            other.encode("a")
    assert tokenizer.encode("a")


def test_a_conversation_is_rendered_apart(tokenizer: ModelTokenizer) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    chat = ChatInfo(template=template, bos_token="<s>", eos_token="")
    said = [{"role": "user", "content": "hé"}]
    assert tokenizer.render_chat(chat, said, context=8) == "<s>[user] hé"
    refusing = ChatInfo(template="{{ raise_exception('no') }}", bos_token="", eos_token="")
    with pytest.raises(InvalidModel, match="refuses the messages: no"):
        tokenizer.render_chat(refusing, [], context=8)


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
            tokenizer.render_chat(chat, [], context=8)


INDENTED = "('a\\n' * 10**4)|indent(10**5)"


@pytest.mark.parametrize("large", some_of(("'a' * 2**30", INDENTED), "'a' * 2**30"))
def test_s37_a_template_s_memory_is_bounded(tokenizer: ModelTokenizer, large: str) -> None:
    chat = ChatInfo(template=f"{{{{ ({large})|length }}}}", bos_token="", eos_token="")
    with pytest.raises(InvalidModel, match="takes too much memory"):
        tokenizer.render_chat(chat, [], context=8)
    small = ChatInfo(template="{{ 'a' * 2**20 }}", bos_token="", eos_token="")
    text = tokenizer.render_chat(small, [], context=2**15)
    assert text == "a" * 2**20, "and serves others as before"


def test_s37_what_a_template_makes_is_refused_before_it_is_sent(tokenizer: ModelTokenizer) -> None:
    chat = ChatInfo(template="{{ 'é' * (40 * 2**20) }}", bos_token="", eos_token="")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=r"1024 tokens, .* a text of 41943040 characters"):
            tokenizer.render_chat(chat, [], context=1_024)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    fitting = ChatInfo(template="{{ 'é' * 256 }}", bos_token="", eos_token="")
    assert tokenizer.render_chat(fitting, [], context=8) == "é" * 256
    with pytest.raises(InvalidInput, match=r"7 tokens, .* a text of 256 characters; shorten"):
        tokenizer.render_chat(fitting, [], context=7)


@pytest.mark.parametrize("bad", ["{% for %}", "{{ " + "(" * 30_000])
def test_a_template_is_checked_apart(bad: str) -> None:
    with closing(ModelTokenizer(FILE, "model packages")) as running:
        running.check_template("{{ messages }}")
        with pytest.raises(InvalidModel, match="chat template of model packages"):
            running.check_template(bad)
