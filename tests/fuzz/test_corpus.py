"""What the fuzzer has found stays refused or read, and a few more files with every run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.builders import HANG_S
from tests.fuzz.targets import CORPUS, TARGETS, damage, try_bytes

ROUNDS = {"config": 300, "gguf": 20, "graph": 60, "manifest": 60, "onnx": 30, "state": 200}


@pytest.mark.parametrize("name", TARGETS)
def test_a06_real_files_are_read_and_damaged_ones_read_or_refused(
    name: str, tmp_path: Path
) -> None:
    seeds = TARGETS[name].seeds()
    assert all(try_bytes(name, seed, tmp_path, HANG_S) for seed in seeds)
    chance, accepted, rounds = random.Random(1), 0, ROUNDS.get(name, 500)
    for _ in range(rounds):
        accepted += try_bytes(name, damage(name, seeds, chance), tmp_path, HANG_S)
    assert accepted < rounds


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_a06_what_the_fuzzer_found_stays_harmless(path: Path, tmp_path: Path) -> None:
    try_bytes(path.name.partition("-")[0], path.read_bytes(), tmp_path, HANG_S)
