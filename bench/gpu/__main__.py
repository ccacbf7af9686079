"""Measure one GPU and write a report: ``make gpu``, or ``python -m bench.gpu [FOLDER] [STEP…]``.

    device       what it is, and a small task in a confined process, as nodes run tasks
    tests        tasks of every kind against the reference, in this process's device
    determinism  the same steps in two processes: equal bytes
    bandwidth    a copy within the device's memory, counting bytes read and written
    MODEL        a random Llama: load, a step of one token, a step of 64, memory as predicted
    MODEL-peer   the same in tinygrad's own jitted model
    split        15 M in one process, and over four nodes with a worker each on this device

DEV names the device, by default CUDA. Each step is a process of its own. What has been measured at
the same commit on the same device is not measured again. FOLDER, by default ``gpu-report``, gets
``report.json`` and ``report.md``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.gpu.random_model import CHUNK, CONFIGS
from bench.report import ROOT, describe_machine, say

_TESTS: Final = (
    *("tests/backend/on_device.py", "tests/backend/test_runtime.py"),
    *("tests/backend/test_batching.py", "tests/deploy/frontends/on_device_models.py"),
)
_OPEN: Final = """
import json
from splitup.backend.runtime import describe_device
print(json.dumps(describe_device().to_dict()))
"""
_DEVICE: Final = """
import json
from splitup.backend.devices.device_check import run_apart
print(json.dumps(run_apart()))
"""
_BANDWIDTH: Final = """
import json, time
from splitup.backend.runtime import describe_device
name = describe_device().device
from tinygrad.device import Buffer, Device
from tinygrad.dtype import dtypes
device, count, best = Device[name], 2**30, 1e9
if not hasattr(device.allocator, "_transfer"):
    raise SystemExit(f"{name} copies nothing within its memory")
source, target = (Buffer(name, count, dtypes.uint8).ensure_allocated() for _ in range(2))
for _ in range(8):
    device.synchronize()
    begun = time.perf_counter()
    device.allocator._transfer(target._buf, source._buf, count, device, device)
    device.synchronize()
    best = min(best, time.perf_counter() - begun)
print(json.dumps({"gb_per_s": round(2 * count / best / 1e9)}))
"""
_SPLIT: Final = """
import json, pathlib, tempfile
from bench.modes.split import measure_size
from bench.testbed.models import LLAMA_15M
from splitup.core import event_loop
with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
    found = event_loop.run(measure_size(pathlib.Path(name), "15 M", LLAMA_15M, 4))
print(json.dumps(found))
"""
_MODEL: Final = ("-m", "bench.gpu.random_model")
_LIMIT_S: Final = 180.0

Row = dict[str, Any]


def ask(*arguments: str) -> Row:
    """Return the JSON object that a Python process prints last, or its error."""
    begun = time.monotonic()
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {_LIMIT_S:g} s"}
    row: Row
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        row = {"error": re.sub(r"^[\w.]+: ", "", lines[-1])[:300]}
    else:
        row = json.loads(done.stdout.strip().splitlines()[-1])
    return {**row, "seconds": round(time.monotonic() - begun, 1)}


def run_tests() -> Row:
    """Run the tests of a device; return how many passed, failed and were skipped."""
    begun = time.monotonic()
    workers = str(min(12, os.cpu_count() or 1))
    options = ("-q", "-p", "no:cacheprovider", "-n", workers, "-W", "default")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *_TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or ["pytest does not start"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    seconds = round(time.monotonic() - begun, 1)
    return {"result": lines[-1].strip("= "), "failed": failed, "seconds": seconds}


def check_determinism() -> Row:
    """Compute the same steps in two processes."""
    rows = [ask(*_MODEL, "ours", "15M", str(CHUNK)) for _ in range(2)]
    digests = [row.get("sha256", row.get("error")) for row in rows]
    return {"equal": digests[0] == digests[1], "digests": digests}


def list_steps() -> dict[str, Callable[[], Row]]:
    """Return every step by name, in order."""
    steps: dict[str, Callable[[], Row]] = {
        "device": lambda: ask("-c", _DEVICE),
        "tests": run_tests,
        "determinism": check_determinism,
        "bandwidth": lambda: ask("-c", _BANDWIDTH),
    }
    for name in CONFIGS:
        steps[name] = lambda name=name: ask(*_MODEL, "ours", name, str(CHUNK))  # type: ignore[misc]
        if not name.endswith("Q4_0"):
            steps[f"{name}-peer"] = lambda name=name: ask(*_MODEL, "tinygrad", name, "1")  # type: ignore[misc]
    return {**steps, "split": lambda: ask("-c", _SPLIT)}


def write(folder: Path, report: dict[str, Any]) -> None:
    """Write the report in both forms."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    rows = report["steps"]
    lines = [f"# One GPU: {report['device']}", "", f"Class `{report['class']}`. Machine: "]
    machine = report["machine"]
    lines[-1] += f"{machine['cores']} cores, {machine['processor']}. Commit `{machine['commit']}`."
    lines += ["", "| step | result |", "|---|---|"]
    for name in ("device", "tests", "determinism", "bandwidth", "split"):
        if name in rows:
            shown = {key: value for key, value in rows[name].items() if key != "seconds"}
            lines.append(f"| {name} | {json.dumps(shown)} |")
    speed = rows.get("bandwidth", {}).get("gb_per_s")
    lines += [
        "",
        "| model | load, s | token, ms | floor, ms | tinygrad's own, ms | 64 tokens, ms | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CONFIGS:
        if (row := rows.get(name)) is None:
            continue
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | |")
            continue
        floor = round(row["weight_bytes"] / speed / 1e6, 3) if speed else "?"
        peer = rows.get(f"{name}-peer", {}).get("step_ms", "–")
        off = row["allocated_bytes"] / row["predicted_bytes"]
        lines.append(
            f"| {name} | {row['load_s']} | {row['step_ms']} | {floor} | {peer} "
            f"| {row.get('chunk_ms', '–')} | {100 * off:.2f} % of what was predicted |"
        )
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the steps that are missing."""
    os.environ.setdefault("DEV", "CUDA")
    steps = list_steps()
    chosen = [name for name in sys.argv[1:] if name in steps] or list(steps)
    folder = Path(next((name for name in sys.argv[1:] if name not in steps), "gpu-report"))
    opened = ask("-c", _OPEN)
    if "error" in opened:
        raise SystemExit(f"error: {opened['error']}")
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": describe_machine(), "device": os.environ["DEV"]}
    report |= {"class": opened["determinism_class"], "steps": {}}
    if (folder / "report.json").exists():
        old = json.loads((folder / "report.json").read_text())
        if all(old[key] == report[key] for key in ("machine", "class")):
            report = old
    for name in chosen:
        if "error" not in report["steps"].get(name, {"error": ""}):
            continue
        say(f"== {name}")
        report["steps"][name] = steps[name]()
        say(json.dumps(report["steps"][name])[:400])
        write(folder, report)
    say((folder / "report.md").read_text())


if __name__ == "__main__":
    main()
