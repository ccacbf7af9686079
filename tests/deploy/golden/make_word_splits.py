"""Write what llama.cpp makes of strange texts, for every way that GGUF files split them.

The vocabulary merges across all borders between words, so that every border shows. Of the tokens
only digests are stored, for one name of each way. llama.cpp comes from a wheel that exports its C
interface.

    pip install --no-deps --target /tmp/golden xllamacpp==2026.10.11549
    PYTHONPATH=.:deploy:/tmp/golden python tests/deploy/golden/make_word_splits.py
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from splitup_deploy.frontends.gguf.word_splits import SPLITS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.deploy.ggufs import write_gguf
from tests.deploy.strange_texts import STRANGE, digest_tokens

HERE = Path(__file__).parent
VOCAB_ONLY = 72  # where the field of that name lies in llama_model_params of this version


class Parameters(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * 256),)


def load_library() -> Any:
    found = importlib.util.find_spec("xllamacpp")
    assert found is not None and found.origin is not None
    (file,) = Path(found.origin).parent.glob("xllamacpp*.so")
    library = ctypes.PyDLL(str(file))
    pointer, size = ctypes.c_void_p, ctypes.c_int32
    library.llama_model_default_params.restype = Parameters
    library.llama_model_load_from_file.restype = pointer
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
    library.llama_model_get_vocab.restype = pointer
    library.llama_model_get_vocab.argtypes = [pointer]
    ints = ctypes.POINTER(ctypes.c_int32)
    flags = [ctypes.c_bool, ctypes.c_bool]
    library.llama_tokenize.argtypes = [pointer, ctypes.c_char_p, size, ints, size, *flags]
    return library


def encode(library: Any, path: Path, texts: list[str]) -> list[list[int]]:
    """Return the tokens that llama.cpp gives each text, without BOS."""
    parameters = library.llama_model_default_params()
    parameters.bytes[VOCAB_ONLY] = 1
    model = library.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, path
    vocab = library.llama_model_get_vocab(model)
    found = []
    for text in texts:
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 8))()
        count = library.llama_tokenize(vocab, data, len(data), room, len(room), False, True)
        found.append(list(room[:count]))
    return found


def train() -> dict[str, Any]:
    """Return the metadata of a vocabulary that has whole stretches of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1_000,
        min_frequency=1,
        max_token_length=12,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*STRANGE, *[text[1:] for text in STRANGE]], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def main() -> None:
    library, metadata = load_library(), train()
    sizes = {"context_length": 8, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8}
    heads = {"attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}
    head = {"general.architecture": "llama"}
    head |= {f"llama.{key}": value for key, value in (sizes | heads).items()}
    digests: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        for split in dict.fromkeys(SPLITS.values()):
            if not split.is_plain:
                name = next(name for name, other in SPLITS.items() if other == split)
                write_gguf(path, {**head, **metadata, "tokenizer.ggml.pre": name}, {})
                found = encode(library, path, STRANGE)
                digests[name] = [digest_tokens(ids) for ids in found]
    table = {"metadata": metadata, "digests": digests}
    (HERE / "word_splits.json").write_text(json.dumps(table, separators=(",", ":")))


if __name__ == "__main__":
    main()
