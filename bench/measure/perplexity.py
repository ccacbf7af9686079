"""Perplexity of SmolLM2's published file, here and in llama.cpp, on the same tokens.

    pip install --no-deps --target /tmp/peer xllamacpp==2026.10.11549
    PYTHONPATH=/tmp/peer python -m bench.measure.perplexity

The text is docs/security.md, in windows that begin with an empty cache. llama.cpp comes from a
wheel that exports its C interface; it rounds activations to 8 bits, which we do not.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from splitup_deploy.cutting.build import prepare
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from bench.report import ROOT, say
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.tensors import array_to_bytes, bytes_to_array
from splitup.decode.step import make_arrays, make_causal_step
from splitup.demo.models import MODELS

WINDOW: Final = 1_024  # tokens
WINDOWS: Final = 2
CHUNK: Final = 64
_N_CTX, _N_BATCH, _N_UBATCH = 0, 1, 2  # places in llama_context_params

Logits = npt.NDArray[np.float32]


def main() -> None:
    """Print both perplexities and how far they are apart."""
    path = MODELS["smollm2"].find()
    windows = read_windows(path)
    ours = compute_perplexity(compute_here(path, windows), windows)
    say(f"here {ours:.4f}")
    peer = compute_perplexity(compute_in_peer(path, windows), windows)
    print(
        f"{path.name}, {WINDOWS} windows of {WINDOW:,} tokens: here {ours:.4f}, "
        f"llama.cpp {peer:.4f}, {100 * (ours / peer - 1):+.2f} %"
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
    program = load_reference(str(path), Sizes(WINDOW, CHUNK))
    [output] = program.outputs
    for window in windows:
        state, found = program.new_state(), []
        for start in range(0, WINDOW, CHUNK):
            step = make_causal_step(window[start : start + CHUNK], start, range(CHUNK))
            arrays = make_arrays(step, CHUNK)
            rows = [array_to_bytes(spec, arrays[spec.name]) for spec in program.inputs]
            found.append(bytes_to_array(output, program.run(state, rows)[0]))
        yield np.concatenate(found)


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
    return library


def compute_in_peer(path: Path, windows: Sequence[Sequence[int]]) -> Iterator[Logits]:
    """Yield the logits of every row of each window, by llama.cpp."""
    library = _load_peer()
    model = library.llama_model_load_from_file(
        str(path).encode(), library.llama_model_default_params()
    )
    vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    for window in windows:
        count = len(window)
        parameters = library.llama_context_default_params()
        for place in (_N_CTX, _N_BATCH, _N_UBATCH):
            parameters.values[place] = count
        context = library.llama_init_from_model(model, parameters)
        batch = library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for place, token in enumerate(window):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = 1
        if library.llama_decode(context, batch):
            sys.exit("llama.cpp could not compute the window")
        rows = [library.llama_get_logits_ith(context, place) for place in range(count)]
        yield np.stack([np.ctypeslib.as_array(row, (vocab,)).copy() for row in rows])
        library.llama_free(context)


if __name__ == "__main__":
    main()
