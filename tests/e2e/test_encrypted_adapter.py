"""Text with an adapter that its host applies under encryption, on the real network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest
from splitup_private.adapters.client import AdapterOptions, EncryptedAdapter
from splitup_private.adapters.weights import load_adapter

from splitup.client.connection import SplitUp
from splitup.core.errors import ExecutionFailed, InvalidInput
from splitup.devnet.processes import find_program
from tests.e2e.conftest import EXAMPLE, MODEL, PRIVATE_0, Network

FOLDER = EXAMPLE.parent / "packages-4m-python-docs"
PROMPT = "Return the"
TOKENS = 8

# In small: private_tests/adapters has all of it without a network, in Python and in a browser; in
# its test_host.py a host is down, or dies.
pytestmark = pytest.mark.long


@contextlib.asynccontextmanager
async def run_host() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run ``splitup adapter-host``; yields its URL and its process."""
    process = await asyncio.create_subprocess_exec(
        *(find_program("splitup"), "adapter-host", FOLDER, "--port", "0"),
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        lines = [(await process.stderr.readline()).decode().strip() for _ in range(2)]
        assert lines[0].startswith("adapter packages-4m-python-docs: "), lines
        yield lines[1].partition(": ")[2], process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def generate(net: SplitUp, adapter: AdapterOptions | None) -> list[int]:
    tokens = net.generate(PRIVATE_0, PROMPT, max_tokens=TOKENS, adapter=adapter)
    return [token.id async for token in tokens]


async def test_the_adapter_changes_the_text_as_it_does_unencrypted(
    private_0: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load_adapter(FOLDER)
    async with run_host() as (url, _):
        command = [find_program("splitup"), "generate", PRIVATE_0, "--prompt", PROMPT, "--json"]
        command += ["--max-tokens", str(TOKENS), "--config", private_0.directory]
        command += ["--adapter-host", url, "--check-host", url]  # the prompt chooses
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["adapter"].startswith(f"adapter {FOLDER.name} ({adapter.info.adapter})")
        async with SplitUp.connect(private_0.config) as net:
            without = await generate(net, None)

            async def apply(self: EncryptedAdapter, hidden: Any) -> Any:
                return adapter.compute(hidden)

            with monkeypatch.context() as patch:
                patch.setattr(EncryptedAdapter, "apply", apply)
                unencrypted = await generate(net, AdapterOptions(url, FOLDER.name))
            assert found["tokens"] == unencrypted != without
            with pytest.raises(InvalidInput, match="registered with --private 0"):
                options = AdapterOptions(url, FOLDER.name)
                async for _ in net.generate(MODEL, PROMPT, max_tokens=1, adapter=options):
                    pass


async def test_no_token_comes_without_the_host(private_0: Network) -> None:
    tokens: list[int] = []
    async with SplitUp.connect(private_0.config) as net:
        async with run_host() as (url, process):
            options = AdapterOptions(url, FOLDER.name)
            with pytest.raises(ExecutionFailed, match="cannot be reached"):
                async for token in net.generate(
                    PRIVATE_0, PROMPT, max_tokens=TOKENS, adapter=options, deadline_s=15.0
                ):
                    tokens.append(token.id)
                    process.kill()
                    await process.wait()
        assert len(tokens) == 1
