"""A published file here and in llama.cpp: perplexity on the same tokens, and speed.

    pip install --no-deps --target /tmp/peer xllamacpp==2026.10.11549
    PYTHONPATH=/tmp/peer python -m bench.measure.llama_peer [FILE.gguf]    # SmolLM2 without one

The text is docs/security.md, in windows that begin with an empty cache. Speed is that of one thread
by its CPU time, and that of two by a clock on the wall, which other work disturbs: uncut, in
alternating rounds, a prompt of 512 tokens in steps of 64, then 64 tokens one by one. llama.cpp
comes from a wheel that exports its C interface; it rounds activations to 8 bits, which we do not.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from splitup_deploy.cutting.build import prepare
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from bench.report import ROOT, say
from splitup.backend.runtime import TaskProgram
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.step import make_arrays, make_causal_step
from splitup.demo.models import MODELS

WINDOW: Final = 1_024  # tokens
WINDOWS: Final = 2
CHUNK: Final = 64
PROMPT, DECODED, ROUNDS = 512, 64, 5
CLOCKS: Final = {1: time.process_time, 2: time.perf_counter}  # by threads
_N_CTX, _N_BATCH, _N_UBATCH = 0, 1, 2  # places in llama_context_params

Logits = npt.NDArray[np.float32]


def main() -> None:
    """Print both perplexities and how far they are apart, and both speeds."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS["smollm2"].find()
    windows, peer = read_windows(path), Peer(path)
    for threads, clock in CLOCKS.items():
        rounds = [
            (time_here(path, windows[0], threads), peer.time(windows[0], threads))
            for _ in range(ROUNDS)
        ]
        for place, (name, tokens) in enumerate((("prompt", PROMPT), ("decoding", DECODED))):
            here, there = (
                [tokens / seconds[place] for seconds in column]
                for column in zip(*rounds, strict=True)
            )
            ratio = statistics.median(a / b for a, b in zip(here, there, strict=True))
            print(
                f"{path.name}, {name}, threads {threads} ({clock.__name__}): here "
                f"{statistics.median(here):.0f} tokens/s, llama.cpp "
                f"{statistics.median(there):.0f}, {ratio:.2f} times as fast",
                flush=True,
            )
    ours = compute_perplexity(compute_here(path, windows), windows)
    say(f"here {ours:.4f}")
    theirs = compute_perplexity(peer.compute(windows), windows)
    print(
        f"{path.name}, {WINDOWS} windows of {WINDOW:,} tokens: here {ours:.4f}, "
        f"llama.cpp {theirs:.4f}, {100 * (ours / theirs - 1):+.2f} %"
    )


def read_windows(path: Path) -> list[list[int]]:
    """Return the tokens of the text."""
    described = prepare(str(path), Sizes(WINDOW, CHUNK)).text
    assert described is not None
    tokenizer = ModelTokenizer(described.tokenizer, path.name)
    try:
        tokens = tokenizer.encode(re.sub(r"[#`*|]", "", (ROOT / "docs/security.md").read_text()))
    finally:
        tokenizer.close()
    windows = [tokens[place * WINDOW : (place + 1) * WINDOW] for place in range(WINDOWS)]
    assert all(len(window) == WINDOW for window in windows), "the text is too short"
    return windows


def compute_perplexity(logits: Iterator[Logits], windows: Sequence[Sequence[int]]) -> float:
    """Return e to the mean of what each next token's probability is worth."""
    lost: list[float] = []
    for rows, window in zip(logits, windows, strict=True):
        wide = rows[:-1].astype(np.float64)
        wide -= wide.max(axis=1, keepdims=True)
        chosen = wide[np.arange(len(wide)), window[1:]]
        lost += (np.log(np.exp(wide).sum(axis=1)) - chosen).tolist()
    return float(np.exp(np.mean(lost)))


def compute_here(path: Path, windows: Sequence[Sequence[int]]) -> Iterator[Logits]:
    """Yield the logits of every row of each window, by the uncut model."""
    program = _load(path)
    [output] = program.outputs
    for window in windows:
        state, found = program.new_state(), []
        for start in range(0, WINDOW, CHUNK):
            step = _make_step(program, window[start : start + CHUNK], start, range(CHUNK))
            found.append(bytes_to_array(output, program.run(state, step)[0]))
        yield np.concatenate(found)


def _make_step(
    program: TaskProgram, tokens: Sequence[int], start: int, outputs: Sequence[int]
) -> list[bytes]:
    arrays = make_arrays(make_causal_step(tokens, start, outputs), CHUNK)
    return [array_to_bytes(spec, arrays[spec.name]) for spec in program.inputs]


def time_here(path: Path, tokens: Sequence[int], threads: int) -> tuple[float, float]:
    """Return the seconds of reading a prompt, and of decoding."""
    program, clock = _load(path, threads), CLOCKS[threads]
    state, spent = program.new_state(), []
    for rows, first, end in ((CHUNK, 0, PROMPT), (1, PROMPT, PROMPT + DECODED)):
        steps = [
            _make_step(program, tokens[start : start + rows], start, [rows - 1])
            for start in range(first, end, rows)
        ]
        began_s = clock()
        for step in steps:
            program.run(state, step)
        spent.append(clock() - began_s)
    return spent[0], spent[1]


@functools.cache
def _load(path: Path, threads: int = 1) -> TaskProgram:
    return load_reference(str(path), Sizes(WINDOW, CHUNK), threads)


# ---- llama.cpp ---------------------------------------------------------------------------------


class _Parameters(ctypes.Structure):
    _fields_ = (("values", ctypes.c_uint32 * 64),)  # more than any of its structures has


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def _load_peer() -> Any:
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        raise SystemExit("xllamacpp is not installed; see the first lines of this file")
    (file,) = Path(found.origin).parent.glob("xllamacpp*.so")
    library = ctypes.PyDLL(str(file))
    pointer = ctypes.c_void_p
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(library, name).restype = _Parameters
    library.llama_model_load_from_file.restype = pointer
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
    library.llama_init_from_model.restype = pointer
    library.llama_init_from_model.argtypes = [pointer, _Parameters]
    library.llama_batch_init.restype = _Batch
    library.llama_batch_init.argtypes = [ctypes.c_int32] * 3
    library.llama_decode.argtypes = [pointer, _Batch]
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_get_logits_ith.argtypes = [pointer, ctypes.c_int32]
    library.llama_model_get_vocab.restype = pointer
    library.llama_model_get_vocab.argtypes = [pointer]
    library.llama_vocab_n_tokens.argtypes = [pointer]
    library.llama_free.argtypes = [pointer]
    library.llama_set_n_threads.argtypes = [pointer, ctypes.c_int32, ctypes.c_int32]
    library.llama_batch_free.argtypes = [_Batch]
    library.llama_get_memory.restype = pointer
    library.llama_get_memory.argtypes = [pointer]
    library.llama_memory_clear.argtypes = [pointer, ctypes.c_bool]
    return library


class Peer:
    """A file in llama.cpp."""

    def __init__(self, path: Path) -> None:
        self._library = _load_peer()
        parameters = self._library.llama_model_default_params()
        self._model = self._library.llama_model_load_from_file(str(path).encode(), parameters)
        vocab = self._library.llama_model_get_vocab(self._model)
        self._vocab = self._library.llama_vocab_n_tokens(vocab)

    @contextmanager
    def _open(self, threads: int = 1) -> Iterator[Any]:
        parameters = self._library.llama_context_default_params()
        for place in (_N_CTX, _N_BATCH, _N_UBATCH):
            parameters.values[place] = WINDOW
        context = self._library.llama_init_from_model(self._model, parameters)
        self._library.llama_set_n_threads(context, threads, threads)
        yield context
        self._library.llama_free(context)

    def _decode(
        self, context: Any, tokens: Sequence[int], start: int, *, wants_all: bool = False
    ) -> Logits:
        """Return the logits of the last token, or of all."""
        batch = self._library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = wants_all or place == len(tokens) - 1
        if self._library.llama_decode(context, batch):
            sys.exit("llama.cpp could not compute the tokens")
        wanted = range(len(tokens)) if wants_all else [len(tokens) - 1]
        rows = [self._library.llama_get_logits_ith(context, place) for place in wanted]
        found = np.stack([np.ctypeslib.as_array(row, (self._vocab,)).copy() for row in rows])
        self._library.llama_batch_free(batch)
        return found

    def compute(self, windows: Sequence[Sequence[int]]) -> Iterator[Logits]:
        """Yield the logits of every row of each window."""
        for window in windows:
            with self._open() as context:
                yield self._decode(context, window, 0, wants_all=True)

    def time(self, tokens: Sequence[int], threads: int) -> tuple[float, float]:
        """Return the seconds of reading a prompt, and of decoding."""
        clock = CLOCKS[threads]
        with self._open(threads) as context:
            self._decode(context, tokens[:CHUNK], WINDOW - CHUNK)  # its first call prepares more
            self._library.llama_memory_clear(self._library.llama_get_memory(context), True)
            began_s = clock()
            self._decode(context, tokens[:PROMPT], 0)
            middle_s = clock()
            for place in range(PROMPT, PROMPT + DECODED):
                self._decode(context, tokens[place : place + 1], place)
            return middle_s - began_s, clock() - middle_s


if __name__ == "__main__":
    main()
