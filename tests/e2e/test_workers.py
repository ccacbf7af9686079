"""Draft and target workers as processes of their own, on a network's models and its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from splitup_speculation import remote
from splitup_speculation.rpc import Tls

from splitup.client.connection import SplitUp
from splitup.client.text.generation import encode_prompt
from splitup.decode.sampler import Sampler
from splitup.devnet.processes import find_program
from tests.builders import HANG_S
from tests.e2e.conftest import DRAFT, EXAMPLE, MODEL, Network

PROMPT, TOKENS = "library for", 16
SAMPLERS = (Sampler(0.8, 5), Sampler())


def start_worker(
    network: Network, stack: ExitStack, *arguments: str | Path, **environment: str
) -> Any:
    """Start a worker; end it with the stack."""
    command = [find_program("splitup"), *arguments, "--config", network.directory]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )

    def stop() -> None:
        process.terminate()
        process.communicate(timeout=HANG_S)

    stack.callback(stop)
    return process


def read_address(process: Any) -> str:
    """Wait until a worker says where it listens."""
    line: str = process.stderr.readline()
    assert "; address: " in line, line + process.stderr.read()
    return line.rpartition(" ")[2].strip()


def run(network: Network, *arguments: str | Path) -> dict[str, Any]:
    command = [find_program("splitup"), *arguments, "--config", network.directory, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


async def compare(network: Network, targets: list[str], draft: str) -> list[list[int]]:
    """Return the sequential texts, after those of every target worker were equal to them."""

    async def collect(tokens: Any) -> list[int]:
        async with contextlib.aclosing(tokens):
            return [token.id async for token in tokens]

    async with AsyncExitStack() as stack:
        net = await stack.enter_async_context(SplitUp.connect(network.config))
        texts = [
            net.generate(
                MODEL, PROMPT, max_tokens=TOKENS, temperature=one.temperature, seed=one.seed
            )
            for one in SAMPLERS
        ]
        wanted = await asyncio.gather(*map(collect, texts))
        drafts = remote.WorkerGroup("DraftService", [draft], Tls())
        stack.push_async_callback(drafts.close)
        for address in targets:
            target = remote.WorkerGroup("TargetService", [address], Tls())
            stack.push_async_callback(target.close)
            model, found = await remote.find_model(net, target, drafts)
            assert found is drafts
            prompt = encode_prompt(model.tokenizer, PROMPT)
            for sampler, tokens in zip(SAMPLERS, wanted, strict=True):
                text = remote.generate(
                    target, drafts, model, prompt, max_tokens=TOKENS, sampler=sampler
                )
                assert await collect(text) == tokens
        return list(wanted)


@pytest.mark.long  # in small: tests/workers, with a target on this machine
def test_workers_give_the_sequential_text_here_and_on_the_market(
    network: Network, tmp_path: Path
) -> None:
    network.register_model(EXAMPLE.with_name(DRAFT), DRAFT, "--target-vram", "100MB")
    settings, spans = tmp_path / "market.toml", tmp_path / "spans.json"
    settings.write_text("market = true\nlease-steps = 200\n")
    with ExitStack() as stack:
        workers = [
            start_worker(
                *(network, stack, "draft-worker", DRAFT, "--settings", settings),
                SPLITUP_DRAFT_WORKER_SESSIONS="2",
            ),
            start_worker(network, stack, "target-worker", MODEL),
            start_worker(network, stack, "target-worker", MODEL, "--settings", settings),
        ]
        draft, here, nodes = map(read_address, workers)
        _, wanted = asyncio.run(compare(network, [here, nodes], draft))
        workers[1].kill()
        workers[1].wait(HANG_S)
        found = run(
            network,
            *("speculate", "--target", f"{here},{nodes}", "--draft", draft, "--spans", spans),
            *("--prompt", PROMPT, "--max-tokens", str(TOKENS), "--draft-timeout", str(HANG_S)),
        )
        assert found["tokens"] == wanted
        assert found["rounds"] <= len(wanted), "no more steps than without drafts"
        calls = [json.loads(line) for line in spans.read_text().splitlines()]
        names = {call["name"] for call in calls if not call["error"]}
        assert names == {"DraftService/GenerateDrafts", "TargetService/VerifyDrafts"}
