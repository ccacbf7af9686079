"""Damage real files until something breaks.

    PYTHONPATH=.:node:oracle:deploy python -m tests.fuzz [TARGET...] [--seconds N] [--seed N]

Prints a line per target. What breaks goes to ``tests/fuzz/corpus`` under its target's name, where
``test_corpus.py`` and later runs find it; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from pathlib import Path

from tests.fuzz.targets import CORPUS, TARGETS, Find, damage, try_bytes


def fuzz(name: str, seconds: float, seed: int, folder: Path) -> int:
    """Try one target for a while; returns the number of finds."""
    seeds = [*TARGETS[name].seeds(), *(p.read_bytes() for p in sorted(CORPUS.glob(f"{name}-*")))]
    chance, begun = random.Random(f"{name} {seed}"), time.monotonic()
    tried = accepted = 0
    finds: dict[str, bytes] = {}
    while time.monotonic() - begun < seconds:
        data = damage(name, seeds, chance)
        tried += 1
        try:
            accepted += try_bytes(name, data, folder)
        except Find as found:
            if str(found)[:60] not in finds:
                finds[str(found)[:60]] = data
                path = CORPUS / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
                path.write_bytes(data)
                print(f"{name}: {found}: {path}", flush=True)
    print(f"{name}: {tried} files, {accepted} accepted, {len(finds)} finds", flush=True)
    return len(finds)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--seconds", type=float, default=60.0, help="for every target")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        finds = sum(
            fuzz(name, options.seconds, options.seed, Path(folder))
            for name in options.targets or TARGETS
        )
    raise SystemExit(1 if finds else 0)


if __name__ == "__main__":
    main()
