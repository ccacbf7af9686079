"""The compiler: registration against the store's rate, a 70B dry run, quality of predictions."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup_oracle.gateway.access import Right
from splitup_oracle.gateway.presigning import Presigner

from bench.measure.prediction import run_bench
from bench.report import ROOT, Bar, Report, say
from bench.testbed.models import LLAMA_15M, shape_llama
from bench.testbed.network import run_network
from bench.testbed.run_python import run_python
from splitup.core.errors import Unavailable
from splitup.demo.models import find_example
from splitup.devnet.processes import find_program
from splitup.net.http import SignedClient
from splitup.net.object_transfer import put_object
from tests.deploy.llamas import save_llama

LARGE: Final = shape_llama(  # 324 M parameters in float32: 1.3 GB
    1_536, 4_096, layers=8, heads=12, kv_heads=12, tie_word_embeddings=False
)
LARGE_TARGET: Final = "300MB"
LARGEST_TENSOR_BYTES: Final = 4 * 32_000 * 1_536
PUT_BYTES: Final = 64 * 2**20  # size of an object for the store's bare rate
PUTS: Final = 8
COMPARED: Final = (  # label, configuration, target in bytes
    ("15 M", LLAMA_15M, 20_000_000),
    ("67 M", {**LARGE, "hidden_size": 384}, 60_000_000),
)
CHUNK: Final = 8
ROUNDS: Final = 9

_MEASURE: Final = """
import json, resource, subprocess, sys, time
begun = time.monotonic()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE)
peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
seconds = time.monotonic() - begun
out = done.stdout.decode()
print(json.dumps({"code": done.returncode, "out": out, "peak": peak, "s": seconds}))
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that ran to its end."""

    output: dict[str, Any]
    seconds: float
    peak_bytes: int


async def run_measured(*command: str | Path) -> Ran:
    """Run a program; return its JSON, time and peak memory. Raises Unavailable."""
    said = json.loads(await run_python("-c", _MEASURE, *map(str, command)))
    if said["code"]:
        raise Unavailable(
            f"{Path(command[0]).name} ended with {said['code']}: {said['out'][-400:]}"
        )
    return Ran(json.loads(said["out"]), said["s"], said["peak"])


async def run(quick: bool) -> Report:
    """Measure all three."""
    dry = await dry_run()
    cost_bars, cost = await asyncio.to_thread(compare_costs, 3 if quick else ROUNDS)
    return Report([*dry, *cost_bars, *await register()], {"cost": cost})


async def dry_run() -> list[Bar]:
    """Cut a model of 70B without its weights."""
    say("70B dry run")
    config = ROOT / "tests/deploy/configs/llama-70b.json"
    ran = await run_measured(
        *(find_program("splitup-deploy"), "inspect", config, "--target-vram", "12GB", "--json")
    )
    largest = max(task["vram_bytes"] for task in ran.output["tasks"])
    return [
        Bar("70B dry run at 12 GB", round(ran.seconds, 1), "s", at_most=30.0),
        Bar("its peak memory", round(ran.peak_bytes / 1e9, 2), "GB", at_most=2.0),
        Bar("its largest task", round(largest / 1e9, 2), "GB", at_most=12.0),
        Bar("its imbalance", round(100 * ran.output["imbalance"], 1), "%", at_most=10.0),
    ]


def compare_costs(rounds: int) -> tuple[list[Bar], list[dict[str, Any]]]:
    """Run three models cut and uncut in one process."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        models = [("example, 4 M", find_example(), 1_300_000)]
        for label, config, target in COMPARED:
            folder = Path(name) / label.replace(" ", "")
            save_llama(folder, config, scale=0.02)
            models.append((label, folder, target))
        rows = []
        for label, path, target in models:
            say(f"predicted against real: {label}")
            rows.append({"label": label, **run_bench(str(path), target, CHUNK, rounds)})
    bars = []
    for row in rows:
        excess = max(abs(row["memory_excess"][end]) for end in ("min", "max"))
        label, count = row["label"], row["tasks"]
        bars += [
            Bar(f"{label}: memory predicted too high or low", 100 * excess, "%", at_most=10.0),
            Bar(
                f"{label}: rank correlation of times",
                row["time_rank_correlation"],
                "",
                at_least=0.7,
            ),
            Bar(
                f"{label}: what cutting into {count} tasks adds",
                round(100 * row["cutting_overhead"], 1),
                "%",
                at_most=5.0,
            ),
        ]
    return bars, rows


async def register() -> list[Bar]:
    """Register a checkpoint of more than a gigabyte, twice."""
    async with run_network(1, 10_000_000) as (devnet, _):  # its node can hold no task
        say("writing a checkpoint of 1.3 GB")
        model = devnet.directory / "model"
        await asyncio.to_thread(save_llama, model, LARGE, shards=4, scale=0.02)
        before = await measure_puts(devnet.directory)
        command = (
            *(find_program("splitup-deploy"), "register", "--json", "--no-reference"),
            *("--model", model, "--name", "large", "--target-vram", LARGE_TARGET),
            *("--config", devnet.directory),
        )
        say("registering it")
        first = await run_measured(*command)
        say("registering it again")
        again = await run_measured(*command)
        after = await measure_puts(devnet.directory)
    sent = first.output["uploaded_bytes"]
    rate, floor = sent / first.seconds, (before + after) / 2
    beside = {
        "stored, GB": round(sent / 1e9, 2),
        "registration, MB/s (tracing, cutting, hashing and all)": round(rate / 1e6),
        "floor, the store's own PUTs, MB/s (before, after)": [
            round(before / 1e6),
            round(after / 1e6),
        ],
    }
    above = (first.peak_bytes - LARGEST_TENSOR_BYTES) / 1e9
    return [
        Bar(
            "registration's rate against PUT",
            round(rate / floor, 2),
            "×",
            at_least=0.5,
            beside=beside,
        ),
        Bar("its peak memory above the largest tensor", round(above, 2), "GB", at_most=1.0),
        Bar(
            "bytes that the second registration uploads",
            float(again.output["uploaded_bytes"]),
            "bytes",
            at_most=0.0,
            beside={"s": round(again.seconds, 1), "first, s": round(first.seconds, 1)},
        ),
    ]


async def measure_puts(network: Path) -> float:
    """Return the bytes per second of PUTs of random objects, two at a time."""
    file = network / "gateway-0" / "gateway.toml"
    config = tomllib.loads(await asyncio.to_thread(file.read_text))
    presigner = Presigner.open(config["s3_endpoint"], config["bucket"], Path(config["credentials"]))
    data = os.urandom(PUT_BYTES)
    async with SignedClient() as http:

        async def put_some() -> None:
            for _ in range(PUTS // 2):
                key = f"bench/{secrets.token_hex(8)}"
                await put_object(
                    http.session, presigner.presign(Right("PUT", key, PUT_BYTES)), data
                )

        begun = time.monotonic()
        await asyncio.gather(put_some(), put_some())
        return PUTS * PUT_BYTES / (time.monotonic() - begun)
