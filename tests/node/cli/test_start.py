"""How the command starts: fast, and quiet when it is interrupted."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console
from splitup_node.cli import money
from splitup_node.cli.app import app
from splitup_node.cli.run import InPlaceHandler
from splitup_node.config import NodeConfig
from typer.testing import CliRunner

from splitup.cli.console import Output
from splitup.crypto.keystore import DEVNET_WORK_FACTOR, create_identity, create_passphrase
from splitup.messages.network import Deployment
from splitup.net.http_server import make_app, serve_app
from tests.builders import HANG_S, address
from tests.node.cli.test_config import write

HEAVY = ("aiohttp", "numpy", "pydantic", "py_ecc", "tinygrad", "web3", "splitup.chain")


def test_help_loads_no_heavy_library() -> None:
    code = f"import sys, splitup_node.cli.app; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_and_completion() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.startswith("splitup-node 0.")
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.parametrize(("said", "flag", "expected"), [(True, None, True), (True, False, False)])
def test_init_takes_allow_loopback_from_the_network(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: bool,
    flag: bool | None,
    expected: bool,
) -> None:
    network = {
        "rpc_url": "http://127.0.0.1:8545",
        "deployment": "deployment.json",
        "gateway_urls": "http://127.0.0.1:9000",
        "allow_loopback": said,
    }
    (tmp_path / "network.json").write_text(json.dumps(network))
    monkeypatch.setenv("SPLITUP_HOME", str(tmp_path))
    command = ["init", "--data-dir", str(tmp_path / "node"), "--vram", "4MB", "--json"]
    command += ["--listen", "127.0.0.1:0", *(() if flag is None else ("--no-allow-loopback",))]
    made = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert NodeConfig.load(Path(made["config"])).allow_loopback is expected


def test_a_loading_task_is_drawn_in_place_among_log_lines() -> None:
    erase = "\r\x1b[2K"
    for is_terminal, expected in (
        (True, f"{erase}loading a{erase}loaded a\n"),
        (False, "loading a\nloaded a\n"),
    ):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, soft_wrap=True)
        log = logging.Logger("test")
        log.addHandler(InPlaceHandler(Output(as_json=False, out=console, log=console)))
        log.info("loading a", extra={"in_place": True})
        log.info("loaded a")
        assert console.file.getvalue() == expected  # type: ignore[attr-defined]


def test_when_a_stake_is_free_is_said_in_the_time_of_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        text = io.StringIO()
        money._show_unstake(Path("n.toml"), {"unbonding_at_s": 86_399}, Console(file=text))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert text.getvalue().startswith("The stake is free from 1970-01-01 23:59:59 UTC; take it")


async def test_ctrl_c_while_loading_is_quiet(tmp_path: Path) -> None:
    """The chain's endpoint takes the first request and never answers it."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        asked.set()
        await gone.wait()
        return web.json_response({})

    silent = make_app()
    silent.router.add_post("/", hang)
    server = await serve_app(silent, "127.0.0.1", 0)
    create_passphrase(tmp_path / "passphrase")
    create_identity(
        tmp_path / "keystore.json", tmp_path / "passphrase", work_factor=DEVNET_WORK_FACTOR
    )
    fields = {name: address(1) for name in Deployment.model_fields}
    fields |= {
        "chain_id": 31337,
        "genesis_hash": "0x" + "00" * 32,
        "confirmations": 0,
        "first_block": 0,
    }
    Deployment(**fields).save(tmp_path / "deployment.json")
    path = write(tmp_path, rpc_url=server.url)
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("splitup-node")),
        *("run", "--config", str(path)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(HANG_S):
            await asked.wait()
            process.send_signal(signal.SIGINT)
            output = (await process.communicate())[1].decode()
    finally:
        gone.set()
        await server.close()
    assert process.returncode == 130 and "Traceback" not in output, output


def test_top_says_that_it_needs_a_terminal_that_can_be_redrawn(tmp_path: Path) -> None:
    for terminal in ("dumb", "unknown"):
        master, slave = pty.openpty()
        done = subprocess.run(
            [Path(sys.executable).with_name("splitup-node"), "top", "-c", tmp_path / "node.toml"],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            env=os.environ | {"TERM": terminal},
            check=False,
        )
        os.close(slave)
        os.close(master)
        assert done.returncode == 2 and b"splitup-node status --json" in done.stderr
