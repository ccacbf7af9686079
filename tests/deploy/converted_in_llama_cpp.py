"""GGUF files as the tests write them, in llama.cpp: whether they are what its own reader expects.

    pip install --no-deps --target /tmp/peer xllamacpp==2026.10.11549
    PYTHONPATH=/tmp/peer python -m tests.deploy.converted_in_llama_cpp

Prints the largest difference of a logit from ours, as a share of the largest. llama.cpp keeps keys
and values in 16 bits and looks up GELU in a table of 16 bits, so it is not zero. Of Phi-MoE it is
large: llama.cpp has a softmax for its router, and root mean squares for its layer norms. So it is
of a DistilBERT reranker, to which llama.cpp gives another activation. All tokens of encoders have
the first type here, as always in llama.cpp.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from splitup_deploy.frontends.source_model import Sizes

from bench.measure.llama_peer import Peer
from splitup.decode.texts import EncodedText, make_text_arrays
from tests.deploy import encoderggufs
from tests.deploy.checkpoints import TOKENS, Case, iter_shapes
from tests.deploy.converted import CASES, save_converted
from tests.deploy.encoders import TEXTS
from tests.deploy.frontends.test_converted import (
    SIZES,
    change_case,
    make_gemma_4_e,
    make_llama_4,
    make_mistral_4,
)
from tests.deploy.reference_program import load_graph
from tests.deploy.steps import feed

Shapes = Mapping[str, tuple[int, ...]]


def _change(case: Case, shapes: Shapes, **change: Any) -> Case:
    return replace(case, change={**case.change, **change}, shapes=lambda _: iter(shapes.items()))


def _make_gemma_4_e() -> Case:
    """Return the case with the last layers of both kinds that have keys next to each other."""
    case = make_gemma_4_e()
    shapes = {
        name: tuple(96 if "layers.2.mlp" in name and size == 48 else size for size in shape)
        for name, shape in iter_shapes(case)
    }
    return _change(case, shapes, num_kv_shared_layers=4)


def _make_olmo_3() -> Case:
    """Return the case with four layers, the last without a window, and YaRN's usual factor."""
    case = CASES["olmo3"]
    shapes = {
        name.replace(f"layers.{layer}.", f"layers.{layer + more}."): shape
        for name, shape in iter_shapes(case)
        for layer in (0, 1)
        for more in (0, 2)
        if f"layers.{1 - layer}." not in name
    }
    kinds = 3 * ["sliding_attention"] + ["full_attention"]
    scaling = {**case.config["rope_scaling"], "attention_factor": 0.1 * math.log(4) + 1}
    return _change(case, shapes, num_hidden_layers=4, layer_types=kinds, rope_scaling=scaling)


def _list_unbiased(name: str) -> Shapes:
    """Return a case's shapes without biases of Mamba's projections, which llama.cpp has not."""
    rows = dict(iter_shapes(CASES[name]))
    biases = [
        f".{module}.{part}_proj.bias" for module in ("mixer", "mamba") for part in ("in", "out")
    ]
    return {n: shape for n, shape in rows.items() if not n.endswith(tuple(biases))}


def _make_granite_hybrid() -> Case:
    return _change(CASES["granite-hybrid"], _list_unbiased("granite-hybrid"), mamba_proj_bias=False)


def _make_nemotron_h() -> Case:
    return _change(CASES["nemotron-h"], _list_unbiased("nemotron-h"), use_bias=False)


def _make_nemotron_3() -> Case:
    """Return the case behind a recurrent layer, without which llama.cpp has no state."""
    shapes = {n: s for n, s in _list_unbiased("nemotron-h").items() if "layers.0." in n}
    for name, shape in iter_shapes(CASES["nemotron-3"]):
        later = name.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.1.")
        shapes = {**shapes, later: shape}
    pattern = "ME*"
    return _change(
        CASES["nemotron-3"],
        shapes,
        use_bias=False,
        num_hidden_layers=len(pattern),
        hybrid_override_pattern=pattern,
    )


def _widen_indexer(name: str) -> Case:
    """Return the case with an indexer of the width that llama.cpp turns at once."""
    case, width = CASES[name], 64
    c, shapes = case.config, dict(iter_shapes(case))
    for weight, (rows, *rest) in shapes.items():
        if "indexer" in weight and "weights_proj" not in weight:
            shapes[weight] = (rows // c["index_head_dim"] * width, *rest)
    return _change(case, shapes, index_head_dim=width)


def _make_qwen_3_next() -> Case:
    """Return the case with values as wide as keys."""
    case = CASES["qwen3-next"]
    sizes = {"conv1d": (64, 1, 4), "in_proj_qkvz": (96, 32), "norm": (8,), "out_proj": (32, 32)}
    shapes = {
        name: sizes[name.split(".")[-2]]
        if ".linear_attn." in name and name.split(".")[-2] in sizes
        else shape
        for name, shape in iter_shapes(case)
    }
    return _change(case, shapes, linear_value_head_dim=8)


_CHANGED: Final[dict[str, Callable[[], Case]]] = {
    "gemma4-e": _make_gemma_4_e,
    "granite-4-dense": lambda: change_case("granite-4-dense", intermediate_size=20),
    "granite-hybrid": _make_granite_hybrid,
    "llama4": make_llama_4,
    "nemotron-h": _make_nemotron_h,
    "nemotron-3": _make_nemotron_3,
    "olmo3": _make_olmo_3,
    "mistral4": lambda: make_mistral_4(0.0),
    "deepseek-v3.2": lambda: _widen_indexer("deepseek-v3.2"),
    "glm-5": lambda: _widen_indexer("glm-5"),
    "qwen3-next": _make_qwen_3_next,
}


def compare(name: str) -> float:
    """Return the largest difference of a logit, as a share of the largest."""
    case = _CHANGED[name]() if name in _CHANGED else CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        save_converted(path, name, case)
        ours = feed(load_graph(str(path), SIZES), TOKENS)
        (theirs,) = Peer(path).compute([TOKENS])
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


class EncoderPeer(Peer):
    """A file of an encoder in llama.cpp."""

    def encode(self, tokens: tuple[int, ...], width: int) -> np.ndarray:
        """Return the vector of one text, or a reranker's score: [width]."""
        library, pointer = self._library, ctypes.c_void_p
        library.llama_get_embeddings_seq.restype = ctypes.POINTER(ctypes.c_float)
        library.llama_get_embeddings_seq.argtypes = [pointer, ctypes.c_int32]
        library.llama_set_embeddings.argtypes = [pointer, ctypes.c_bool]
        with self._open() as context:
            library.llama_set_embeddings(context, True)
            self._feed(context, tokens)
            found = library.llama_get_embeddings_seq(context, 0)
            return np.ctypeslib.as_array(found, (width,)).copy()

    def _feed(self, context: int, tokens: tuple[int, ...]) -> None:
        batch = self._library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert self._library.llama_decode(context, batch) == 0
        self._library.llama_batch_free(batch)


def compare_encoder(name: str) -> float:
    """Return the largest difference of a vector's number, or of a score, as a share."""
    case, family = encoderggufs.CASES[name], "modern-bert" if "modern" in name else "bert"
    texts = [EncodedText(text.tokens, (0,) * len(text.tokens)) for text in TEXTS]
    change = {"tokenizer.ggml.token_type_count": 1 if "xlm" in name else 2}
    if case.pooling is None:
        change[f"{family}.pooling_type"] = 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        encoderggufs.save_encoder_gguf(path, name, change)
        program = load_graph(str(path), Sizes(chunk=sum(len(text.tokens) for text in texts)))
        arrays = make_text_arrays(texts)
        given = [arrays[spec.name].tobytes() for spec in program.inputs]
        (data,) = program.run(program.new_state(), given)
        ours = np.frombuffer(data, np.float32).reshape(len(texts), -1)
        peer = EncoderPeer(path)
        theirs = np.stack([peer.encode(text.tokens, ours.shape[1]) for text in texts])
    if case.pooling is not None:
        theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


if __name__ == "__main__":
    for name in CASES:
        print(f"{name:20} {compare(name):.0e}", flush=True)
    for name in encoderggufs.CASES:
        print(f"{name:20} {compare_encoder(name):.0e}", flush=True)
