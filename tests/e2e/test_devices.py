"""A network whose nodes compute on WebGPU: outputs of the uncut model, and all tasks verified."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from splitup.client.connection import SplitUp
from splitup.decode.step import make_arrays, make_causal_step
from splitup.devnet.processes import find_program
from tests.deploy.llamas import TINY, save_llama
from tests.e2e.conftest import Network

NAME, CHUNK, STEPS = "tiny", 2, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory)
    return directory


@pytest.fixture(scope="module")
def webgpu(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Network]:
    """A network with the model on it."""
    network = Network(tmp_path_factory.mktemp("webgpu") / "net", nodes=3, device="WEBGPU")
    try:
        network.start()
        done = subprocess.run(
            [
                *(find_program("splitup-deploy"), "register", "--json", "--model", model),
                *("--name", NAME, "--target-vram", "50KB", "--config", network.directory),
                *("--chunk", str(CHUNK)),
            ],
            env=network.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        network.wait_for_holders(network.nodes, NAME)
        yield network
    finally:
        if network.process is not None and network.process.poll() is None:
            network.stop()


async def test_a_task_on_webgpu_is_computed_verified_and_paid(
    webgpu: Network, model: Path, tmp_path: Path
) -> None:
    tokens = np.random.default_rng(7).integers(0, TINY["vocab_size"], STEPS)
    steps = [
        make_arrays(make_causal_step([int(token)], place), CHUNK)
        for place, token in enumerate(tokens)
    ]
    async with SplitUp.connect(webgpu.config) as net:
        inputs = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        result = await net.execute(NAME, inputs)
        receipt = await result.receipt
        evidence = await net.evidence(receipt)
    expected = await asyncio.to_thread(compute_reference, webgpu, model, tmp_path, steps)
    assert result.outputs["logits"].tobytes() == expected
    assert {entry.outcome for entry in evidence.verdicts} == {"honest"}
    assert len(evidence.verdicts) == len(result.manifest.tasks) > 1
    assert receipt.status == "settled" and not receipt.slashes
    status = json.loads((webgpu.directory / "node-0" / "status.json").read_text())
    assert "/WEBGPU:WGSL/" in status["device"]["determinism_class"]
    assert status["device"]["sandbox"] == "" and status["not_loaded"] == []


def compute_reference(
    network: Network, model: Path, directory: Path, steps: list[dict[str, np.ndarray]]
) -> bytes:
    """Return the logits of the uncut model on the same device."""
    given, outputs = directory / "steps.npz", directory / "outputs.npz"
    rows = {f"{i}/{name}": array for i, step in enumerate(steps) for name, array in step.items()}
    np.savez(given, **rows)
    subprocess.run(
        [sys.executable, "-m", "splitup_deploy.uncut_model", model, given, outputs, str(CHUNK)],
        env=network.environment,
        check=True,
        capture_output=True,
    )
    with np.load(outputs, allow_pickle=False) as arrays:
        return b"".join(arrays[f"{step}/logits"].tobytes() for step in range(len(steps)))
