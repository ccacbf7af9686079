"""Train small SentencePiece models, and write what they make of texts in all scripts.

The file has the metadata that llama.cpp's converter gives a GGUF file, and texts with their tokens.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install sentencepiece protobuf
    PYTHONPATH=. /tmp/golden/bin/python tests/deploy/golden/make_sentencepiece.py
"""

from __future__ import annotations

import io
import json
import random
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto

HERE = Path(__file__).parent
PAGES = Path(__file__).parents[3] / "docs"
WORDS = (
    "All human beings are born free. Все люди рождаются свободными. 人人生而自由。すべての人間は、"
    "生まれながらにして自由である。모든 인간은 태어날 때부터 자유롭다. يولد جميع الناس أحرارًا. "
    "सभी मनुष्यों को जन्मजात स्वतन्त्रता प्राप्त है। มนุษย์ทั้งหลายเกิดมามีอิสระ. Όλοι οι άνθρωποι γεννιούνται. "
    "כל בני האדם נולדו בני חורין. Բոլոր մարդիկ ծնվում են ազատ. ყველა ადამიანი იბადება თავისუფალი. "
    "எல்லா மனிதர்களும் பிறக்கின்றனர். ሰው ሁሉ ነፃ ሆኖ ይወለዳል። Tất cả mọi người sinh ra. 👩‍👩‍👧 😀 e\u0301 ﬁ Å"
)


def list_texts() -> list[str]:
    """Return texts with characters of every script, spaces, repetitions and lone bytes."""
    letters = [chr(n) for n in range(0x21, 0x2FFFF) if unicodedata.category(chr(n))[0] in "LMNPS"]
    chance = random.Random(3)
    mixed = [chance.choice(WORDS + "  \n\t" + letters[n]) for n in range(0, 60_000, 150)]
    repeated = [f"{c * n} {c * n}" for c in "aes人 -=" for n in (2, 3, 5, 8, 13)]
    odd = ["", " ", "  a  b ", "a\nb\r\n\tc", "\u2581x \u2581", "<0x41>", "\x00\x7f"]
    page = (PAGES / "glossary.md").read_text()[:2_000]
    return [WORDS, "".join(letters[::301]), "".join(mixed), page, *repeated, *odd]


RULES = "FB01\t66 69\nC5\t41 30A\n3000\t20\n"  # what texts become before


def train(has_prefix: bool, *, is_summed: bool = False) -> dict[str, Any]:
    """Return metadata and texts of one model; ``is_summed``: of the kind that T5 has."""
    lines = [line for page in sorted(PAGES.glob("*.md")) for line in page.read_text().split("\n")]
    made = io.BytesIO()
    rules = Path(tempfile.mkdtemp()) / "rules.tsv"
    rules.write_text(RULES)
    normalisation = (
        {"normalization_rule_tsv": str(rules)}
        if is_summed
        else {"normalization_rule_name": "identity"}
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines[:2_000], *[WORDS] * 5]),
        model_writer=made,
        model_type="unigram" if is_summed else "bpe",
        vocab_size=900,
        byte_fallback=not is_summed,
        **normalisation,
        remove_extra_whitespaces=is_summed,
        add_dummy_prefix=has_prefix,
        character_coverage=0.995,
        num_threads=1,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    count = model.vocab_size()
    kinds = [
        2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n) else 1
        for n in range(count)
    ]
    metadata = {
        "tokenizer.ggml.model": "t5" if is_summed else "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(n) for n in range(count)],
        "tokenizer.ggml.scores": [model.get_score(n) for n in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
    if is_summed:
        table = ModelProto.FromString(made.getvalue()).normalizer_spec.precompiled_charsmap
        metadata["tokenizer.ggml.precompiled_charsmap"] = list(table)
    return {"metadata": metadata, "texts": [[text, model.encode(text)] for text in list_texts()]}


if __name__ == "__main__":
    cases = {
        "llama": train(has_prefix=True),
        "gemma": train(has_prefix=False),
        "t5": train(has_prefix=True, is_summed=True),
    }
    (HERE / "sentencepiece.json").write_text(json.dumps(cases, separators=(",", ":")))
