"""A network whose nodes compute on WebGPU, and whose members have only CPUs.

Outputs are those of the uncut model on the same device, and all tasks are verified.
"""

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
from splitup.graph.manifest import Manifest
from splitup.graph.tolerances import Tolerance
from tests.deploy.llamas import TINY, save_llama
from tests.e2e.conftest import Network, wait_for
from tests.e2e.test_unfaithful import LYING_NODE

NAME, CHUNK, STEPS = "tiny", 2, 3
TOLERANT = "tiny-within-a-tolerance"
RELATIVE_L2_PPB = 20_000  # calibrated: see docs/verification.md
SPARE_MICRO_USDC = 10**8
DISPUTE_S = 900.0

# In small: tests/backend/devices computes on WebGPU, test_recomputation.py compares what another
# class computed, and tests/deploy/calibration tells each cheaper computation from it.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, {**TINY, "num_hidden_layers": 1})
    return directory


@pytest.fixture(scope="module")
def webgpu(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Network]:
    """A network with the model on it."""
    directory = tmp_path_factory.mktemp("webgpu")
    network = Network(directory / "net", nodes=3, device="WEBGPU", members_device="CPU")
    try:
        network.start()
        register(network, model, NAME)
        tolerance = Tolerance(
            dtype="float32",
            relative_l2_ppb=RELATIVE_L2_PPB,
            exponent_ppb=None,
            mantissa_ppb=None,
            max_ulp=None,
        )
        tasks = [task.task_id for task in asyncio.run(fetch_manifest(network, NAME)).tasks]
        path = directory / "tolerance.json"
        path.write_text(json.dumps({"tasks": {key: [tolerance.model_dump()] for key in tasks}}))
        register(network, model, TOLERANT, "--tolerance", path)
        network.wait_for_holders(network.nodes, NAME)
        yield network
    finally:
        if network.process is not None and network.process.poll() is None:
            network.stop()


def register(network: Network, model: Path, name: str, *options: str | Path) -> None:
    done = subprocess.run(
        [
            *(find_program("splitup-deploy"), "register", "--json", "--model", model),
            *("--name", name, "--target-vram", "30KB", "--config", network.directory),
            *("--chunk", str(CHUNK), "--price", "12", *options),
        ],
        env=network.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def fetch_manifest(network: Network, name: str) -> Manifest:
    async with SplitUp.connect(network.config) as net:
        return (await net.fetch_model(name)).manifest


def make_steps() -> list[dict[str, np.ndarray]]:
    tokens = np.random.default_rng(7).integers(0, TINY["vocab_size"], STEPS)
    return [
        make_arrays(make_causal_step([int(token)], place), CHUNK)
        for place, token in enumerate(tokens)
    ]


def stack(steps: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


async def test_a_task_on_webgpu_is_computed_verified_and_paid(
    webgpu: Network, model: Path, tmp_path: Path
) -> None:
    steps = make_steps()
    async with SplitUp.connect(webgpu.config) as net:
        result = await net.execute(NAME, stack(steps))
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


async def test_members_without_the_device_convict_who_computes_cheaply_or_guesses(
    webgpu: Network,
) -> None:
    """One computes with float16's or bfloat16's precision, one guesses: both lose stake.

    The third is paid for all that it does. Members compare what each stored with what they compute
    on the CPU.
    """
    for name, how in {"node-0": ("cheap", "10", "7"), "node-1": ("guess",)}.items():
        await webgpu.top_up(name, SPARE_MICRO_USDC)  # so that it goes on lying
        webgpu.replace(name, sys.executable, LYING_NODE, *how)
    await asyncio.to_thread(
        wait_for, lambda: all(map(webgpu.is_replaced, webgpu.replacements)), webgpu.describe
    )
    await asyncio.to_thread(webgpu.wait_for_holders, webgpu.nodes, NAME)
    lied: set[tuple[str, str]] = set()
    async with SplitUp.connect(webgpu.config) as net:
        for _ in range(20):  # each has a task of its own in more than half of them
            lied |= await find_liars(webgpu, net)
            if {("node-0", "executor"), ("node-1", "validator")} <= lied:
                break
    assert {("node-0", "executor"), ("node-1", "validator")} <= lied
    assert lied <= {("node-0", "executor"), ("node-0", "validator"), ("node-1", "validator")}


async def find_liars(network: Network, net: SplitUp) -> set[tuple[str, str]]:
    """Execute, and return (name, role) of everybody who lied; the others have to be paid."""
    # members that share two cores may take longer to decide than an execution usually waits
    result = await net.execute(TOLERANT, stack(make_steps()), deadline_s=DISPUTE_S)
    receipt = await result.receipt
    assert receipt.status == "settled"
    verdicts = (await net.evidence(receipt)).verdicts
    assert len(verdicts) == len(result.nodes)
    lied: set[tuple[str, str]] = set()
    for verdict in verdicts:
        executor = result.nodes[verdict.task]
        is_cheap = network.name_of(executor) == "node-0"
        assert verdict.outcome == ("lied" if is_cheap else "honest")
        assert is_cheap == (executor in verdict.liars)
        for liar in verdict.liars:
            role = "executor" if liar == executor else "validator"
            lied.add((network.name_of(liar), role))
    slashed = {network.name_of(node) for node, _ in receipt.slashes}
    assert slashed == {name for name, _ in lied}
    paid = {payment.account for payment in receipt.payments if not payment.from_slash}
    right = {node for task, node in enumerate(result.nodes) if verdicts[task].outcome == "honest"}
    assert right <= paid
    return lied


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
