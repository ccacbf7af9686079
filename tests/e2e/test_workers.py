"""Draft and target workers as processes of their own, on a network's models and its nodes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitup.devnet.processes import find_program
from tests.builders import HANG_S
from tests.e2e.conftest import DRAFT, EXAMPLE, MODEL, Network

PROMPT = "library for"


@contextlib.contextmanager
def run_worker(
    network: Network, *arguments: str | Path, **environment: str
) -> Iterator[tuple[Any, str]]:
    """Start a worker; give its process and its address."""
    command = [find_program("splitup"), *arguments, "--config", network.directory]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "; address: " in line, line + process.stderr.read()
            yield process, line.rpartition(" ")[2].strip()
        finally:
            process.terminate()
            process.communicate(timeout=HANG_S)


def run(network: Network, *arguments: str | Path) -> dict[str, Any]:
    command = [find_program("splitup"), *arguments, "--config", network.directory, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_workers_give_the_sequential_text_here_and_on_the_market(
    network: Network, tmp_path: Path
) -> None:
    network.register_model(EXAMPLE.with_name(DRAFT), DRAFT, "--target-vram", "100MB")
    settings = tmp_path / "target.toml"
    settings.write_text("lease-steps = 200\nsessions = 3\n")
    asked = ["--prompt", PROMPT, "--max-tokens", "24", "--temperature", "0.8", "--seed"]
    with contextlib.ExitStack() as stack:
        drafting, draft = stack.enter_context(
            run_worker(network, "draft-worker", DRAFT, SPLITUP_DRAFT_WORKER_SESSIONS="2")
        )
        target, here = stack.enter_context(run_worker(network, "target-worker", MODEL))
        market = ("target-worker", MODEL, "--market", "--settings", settings)
        _, nodes = stack.enter_context(run_worker(network, *market))
        for seed, temperature in (("5", "0.8"), ("0", "0")):
            options = [*asked, seed, "--temperature", temperature]
            wanted = run(network, "generate", MODEL, *options)["tokens"]
            for address in (here, nodes):
                spans = tmp_path / "spans.json"
                workers = ["--target", address, "--draft", draft, "--spans", spans]
                found = run(network, "speculate", *workers, *options)
                assert found["tokens"] == wanted
                assert found["rounds"] <= len(wanted), "no more steps than without drafts"
                names = {json.loads(line)["name"] for line in spans.read_text().splitlines()}
                assert names == {"DraftService/GenerateDrafts", "TargetService/VerifyDrafts"}
        for process in (drafting, target):
            process.kill()
            process.wait(HANG_S)
        both = ["--target", f"{here},{nodes}", "--draft", draft]
        assert run(network, "speculate", *both, *options)["tokens"] == wanted
