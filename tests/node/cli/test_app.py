from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
import time
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from playwright.async_api import async_playwright, expect
from splitup_deploy.network.settings import MemberSettings
from splitup_gateway.commands.owner_page import make_owner_app
from splitup_node.cli.app import app
from splitup_node.config import NodeConfig
from splitup_node.owner_facts import fetch_facts, list_rows
from splitup_node.settlement.account import Account
from splitup_node.tasks.audit import check_machine
from splitup_oracle.cli.app import app as oracle_app
from splitup_oracle.config import OracleConfig
from typer.testing import CliRunner, Result

from splitup.cli.verbs import app as user_app
from splitup.client.joining import check_rpc_url, join_network
from splitup.config import NetworkConfig
from splitup.core.errors import ConfigurationError
from splitup.crypto.keystore import load_identity
from splitup.devnet.processes import find_program
from splitup.messages import api
from splitup.messages.network import Deployment, NetworkDescription
from splitup.net.http import SignedClient
from splitup.net.http_server import make_app, serve_app
from tests.builders import HANG_S
from tests.node.market import NodeMarket, open_market
from tests.node.network import make_manifest
from tests.oracle.gateway_network import run_network
from tests.page_build import find_browser

pytestmark = pytest.mark.asyncio(loop_scope="module")
USDC = 10**6
FAULTY = (sys.executable, str(Path(__file__).parents[1] / "faulty_worker.py"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def market(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeMarket]:
    root = tmp_path_factory.mktemp("market")
    manifest, graphs = make_manifest(4)
    async with (
        run_network(root) as network,
        open_market(network, root, manifest, graphs) as opened,
    ):
        yield opened


async def call(*arguments: object, app: Any = app) -> Result:
    """Run a command in a thread: it brings its own event loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, [str(a) for a in arguments])


async def call_json(*arguments: object) -> dict[str, Any]:
    result = await call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


async def test_stake_status_unstake_and_withdraw(market: NodeMarket) -> None:
    config = market.make_config("cli", 0)
    path = market.root / "cli" / "node.toml"
    address = config.load_identity().address

    before = await call_json("status", "-c", path)
    assert (before["chain"]["active"], before["node"]["running"]) == (False, False)

    assert "splitup-node stake" in await fail_to_run(path)

    await market.network.owner.send("usdc", "mint", address, 1_000 * USDC)
    poor = await call("stake", "-c", path)
    assert poor.exit_code == 2
    assert "send it the missing 111 USDC" in poor.output and "splitup fund 0x" in poor.output
    assert "--spare" not in poor.output, "that would not be enough"
    await market.network.owner.send("usdc", "mint", address, 100 * USDC)
    assert "stake --spare 0" in (await call("stake", "-c", path)).output

    await market.network.owner.send("usdc", "mint", address, 11 * USDC)
    staked = await call_json("stake", "-c", path)  # after an audit
    assert (staked["stake_micro_usdc"], staked["least_stake_micro_usdc"]) == (
        1_111 * USDC,
        1_100 * USDC,
    )
    assert (await call_json("stake", "-c", path))["added_micro_usdc"] == 0
    assert (await call_json("status", "-c", path))["chain"]["active"] is True

    left = await call_json("unstake", "-c", path)
    assert left["unbonding_at_s"] > 0
    leaving = await call("status", "-c", path)
    assert "leaving" in leaving.output and "withdraw --stake" in leaving.output
    assert "unstake --cancel" in await fail_to_run(path)
    early = await call("withdraw", "--stake", "-c", path)
    assert early.exit_code == 1 and "is locked until" in early.output
    assert (await call_json("unstake", "--cancel", "-c", path))["unbonding_at_s"] == 0
    assert (await call_json("withdraw", "-c", path))["balance_micro_usdc"] == 0


@pytest.mark.long  # in small: tasks/test_audit.py
async def test_audit_before_and_after_staking(market: NodeMarket) -> None:
    config = market.make_config("auditor", 8)
    path = market.root / "auditor" / "node.toml"
    address = config.load_identity().address
    await market.network.owner.send("usdc", "mint", address, 1_100 * USDC)  # and nothing staked
    result = await call("audit", "-c", path, "--dry-run", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["may_serve"], report
    assert {row["verdict"] for row in report["tasks"]} == {"equal"}
    assert len(report["tasks"]) == 2  # accumulators are one task, however often they occur
    assert report["determinism_class"].startswith("tinygrad")
    result = await call("audit", "--config", path, "--model", "tiny", "--dry-run")
    assert "no stake would be lost" in result.stdout
    result = await call("audit", "--config", path, "--model", "huge", "--dry-run")
    assert result.exit_code == 2 and "no model 'huge'" in result.output
    result = await call("audit", "--config", path)
    assert result.exit_code == 2 and "has no stake" in result.output
    with pytest.raises(ConfigurationError, match=r"must not serve.*nothing was staked"):
        await check_machine(config, FAULTY)


async def test_join_makes_a_node_from_a_gateways_url_alone(
    market: NodeMarket, tmp_path: Path
) -> None:
    url, own_rpc = market.network.gateway.server.url, market.network.rpc_url
    options = ("--data-dir", tmp_path / "node", "--vram", "2GB", "--listen", "127.0.0.1:0")
    alone = await call("join", url, *options)
    assert alone.exit_code == 2 and "--rpc-url" in alone.output
    assert not (tmp_path / "node").exists(), "the gateway's own RPC endpoint is not told"

    other = ("--data-dir", tmp_path / "other", *options[2:])
    shown = await call("join", url, *other, "--rpc-url", own_rpc)
    assert "\n  splitup fund 0x" in shown.output, "its gateway is on this machine"
    made = await call_json("join", url + "/", *options, "--rpc-url", own_rpc)
    assert made["network"] == market.network.deployment.model_dump()
    assert made["stake_micro_usdc"] == 1_212 * USDC
    config = NodeConfig.load(Path(made["config"]))
    assert config.gateway_urls == (url,) and config.rpc_url == own_rpc and config.allow_loopback
    assert config.load_identity().address == made["address"]
    assert (await call_json("status", "-c", made["config"]))["chain"]["address"] == made["address"]

    again = await call("join", url, *options, "--rpc-url", own_rpc)
    assert again.exit_code == 2 and "exists already" in again.output
    moved = (tmp_path / "node").rename(tmp_path / "moved")  # as from a backup, to another place
    assert NodeConfig.load(moved / "node.toml").deployment == moved / "deployment.json"
    assert (await call("status", "-c", moved / "node.toml")).exit_code == 0


@pytest.mark.parametrize("has_key", [False, True])
async def test_an_interrupted_join_keeps_the_contracts_of_a_key(
    market: NodeMarket, tmp_path: Path, has_key: bool
) -> None:
    url, own_rpc = market.network.gateway.server.url, market.network.rpc_url
    with pytest.raises(asyncio.CancelledError):
        async with join_network(url, tmp_path, own_rpc):
            if has_key:
                (tmp_path / "keystore.json").touch()
            raise asyncio.CancelledError
    assert (tmp_path / "deployment.json").exists() is has_key


async def test_users_join_as_nodes_do(market: NodeMarket, tmp_path: Path) -> None:
    url, own_rpc = market.network.gateway.server.url, market.network.rpc_url
    home = tmp_path / "home"
    options = ("--rpc-url", own_rpc, "--dir", home, "--json")
    plain = await call("join", "http://8.8.8.8", *options, app=user_app)
    assert plain.exit_code == 2 and "not an https:// URL" in plain.output and not home.exists()
    made = await call("join", url, *options, app=user_app)
    assert made.exit_code == 0, made.output
    config = NetworkConfig.load(home)
    assert (config.rpc_url, config.gateway_urls, config.allow_loopback) == (own_rpc, (url,), True)
    assert Deployment.load(config.deployment) == market.network.deployment
    assert config.load_user().address == json.loads(made.stdout)["address"]
    again = await call("join", url, *options, app=user_app)
    assert again.exit_code == 2 and "exists already" in again.output
    shown = await call("join", url, *options[:3], tmp_path / "other", app=user_app)
    assert "own: splitup fund 0x" in shown.output
    assert config.load_user().address == json.loads(made.stdout)["address"]


async def test_members_join_and_print_what_the_owner_needs(
    market: NodeMarket, tmp_path: Path
) -> None:
    url, own_rpc = market.network.gateway.server.url, market.network.rpc_url
    folder, endpoint = tmp_path / "member", "https://member-0.example.org"
    options = ("--rpc-url", own_rpc, "--data-dir", folder, "--endpoint")
    with_path = await call("join", url, *options, endpoint, "--listen", "nowhere", app=oracle_app)
    assert with_path.exit_code == 2 and "--listen is 'nowhere'" in with_path.output
    assert not folder.exists()
    made = await call("join", url, *options, endpoint, app=oracle_app)
    assert made.exit_code == 0, made.output
    config = OracleConfig.load(folder / "oracle.toml")
    [entry] = tomllib.loads(made.stdout)["members"]
    member = MemberSettings.model_validate(entry)
    identity = load_identity(config.keystore, config.passphrase_file)
    told = member.account, member.signing_key, member.endpoint
    assert told == (identity.address, identity.signing_key_hex, endpoint)
    assert (config.listen_port, config.rpc_url, config.gateway_urls) == (8700, own_rpc, (url,))
    process = await asyncio.create_subprocess_exec(
        *(find_program("splitup-oracle"), "run", "--config", folder / "oracle.toml"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 2 and b"have the network's owner appoint it" in said
    assert b"we are no member\n" in said, "and it has no executions to finish"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://gateway.example.org", "not an https:// URL"),
        ("http://8.8.8.8:8080", "not an https:// URL"),
        ("http://127.0.0.1:9", "cannot be reached"),
        ("ftp://127.0.0.1", "cannot be reached"),
    ],
)
async def test_join_says_why_a_url_is_no_network(tmp_path: Path, url: str, problem: str) -> None:
    result = await call("join", url, "--data-dir", tmp_path / "node", "--vram", "2GB")
    assert result.exit_code in (1, 2) and problem in " ".join(result.output.split())
    assert not (tmp_path / "node").exists()


PROGRAMS = pytest.mark.parametrize(
    ("program", "module", "options"),
    [
        (app, "splitup_node.cli.node_setup", ("--data-dir",)),
        (oracle_app, "splitup_oracle.cli.app", ("--endpoint", "http://m.example", "--data-dir")),
        (user_app, "splitup.cli.commands.join", ("--dir",)),
    ],
)


@PROGRAMS
@pytest.mark.parametrize("is_in_use", [False, True])
async def test_join_asks_last_and_leaves_nothing_behind(
    program: Any,
    module: str,
    options: tuple[str, ...],
    is_in_use: bool,
    market: NodeMarket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Path] = []

    def interrupt(whose: str, config: Path) -> str:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{module}.ask_passphrase", interrupt)
    folder, network = tmp_path / "made", market.network
    if is_in_use:
        folder.mkdir()
        (folder / "keystore.json").touch()

    async def join(url: str) -> Result:
        command = ["join", url, "--rpc-url", network.rpc_url, *options, str(folder)]
        command += ["--vram", "2GB"] if program is app else []
        return await asyncio.to_thread(CliRunner().invoke, program, command)

    await join("http://127.0.0.1:9")
    assert not asked
    result = await join(network.gateway.server.url)
    if is_in_use:
        assert "exists already" in result.output and not asked
        assert [file.name for file in folder.iterdir()] == ["keystore.json"]
    else:
        assert result.exit_code == 130 and asked[0].parent == folder and not folder.exists()


async def test_join_asks_nothing_for_a_node_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.toml").touch()
    result = await call("join", "http://127.0.0.1:9", "--data-dir", tmp_path)
    assert result.exit_code == 2 and "exists already" in result.output


async def test_join_trusts_no_rpc_endpoint_that_others_could_answer_for(
    market: NodeMarket,
) -> None:
    told = NetworkDescription(
        contracts=market.network.deployment,
        gateway_urls=("https://gateway.example.org",),
        rpc_url="http://rpc.example.org",
    )
    url = told.gateway_urls[0]
    with pytest.raises(ConfigurationError, match="give another one with --rpc-url"):
        check_rpc_url(url, told, is_local=False)
    assert check_rpc_url(url, told, is_local=True) == told.rpc_url
    safe = told.model_copy(update={"rpc_url": "https://rpc.example.org"})
    assert check_rpc_url(url, safe, is_local=False) == safe.rpc_url


async def test_join_refuses_a_description_of_another_chain(
    market: NodeMarket, tmp_path: Path
) -> None:
    contracts = market.network.deployment
    told = NetworkDescription(
        contracts=contracts.model_copy(update={"chain_id": 5}),
        gateway_urls=("http://127.0.0.1:1",),
        rpc_url=market.network.rpc_url,
    )

    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=told.canonical_bytes(), content_type="application/json")

    served = make_app()
    served.router.add_get(api.NETWORK.path, handle)
    server = await serve_app(served, "127.0.0.1", 0)
    result = await call("join", server.url, "--data-dir", tmp_path / "node", "--vram", "2GB")
    await server.close()
    assert result.exit_code == 1 and "it is chain 31337, not 5" in " ".join(result.output.split())
    assert not (tmp_path / "node").exists()


async def test_top_needs_a_terminal_and_the_page_a_loopback_address(market: NodeMarket) -> None:
    market.make_config("owner", 0)
    path = market.root / "owner" / "node.toml"
    top = await call("top", "-c", path)
    assert top.exit_code == 2 and "splitup-node status --json" in " ".join(top.output.split())
    page = await call("page", "-c", path, "--host", "0.0.0.0")
    assert page.exit_code == 2 and "not a loopback address" in page.output


async def test_earnings_of_a_new_node_are_nothing(market: NodeMarket) -> None:
    market.make_config("earner", 0)
    path = market.root / "earner" / "node.toml"
    told = await call_json("earnings", "-c", path, "--days", "3")
    assert [day["paid"] for day in told["days"]] == [0, 0, 0]
    shown = await call("earnings", "-c", path)
    assert "nothing was earned or lost since" in shown.output
    assert "ready to withdraw: 0 USDC\n" in shown.output


async def test_init_writes_what_run_reads(market: NodeMarket) -> None:
    folder = market.root / "made"
    arguments = (
        *("init", "--data-dir", folder, "--vram", "2GB", "--listen", "127.0.0.1:0"),
        *("--rpc-url", market.network.rpc_url, "--gateway", market.network.url),
        *("--deployment", market.network.deployment_path),
    )
    made = await call_json(*arguments)
    assert made["vram_gb"] == 2
    status = await call_json("status", "-c", made["config"])
    assert status["chain"]["address"] == made["address"]
    again = await call(*arguments)
    assert again.exit_code == 2 and "exists already" in again.output


async def test_errors_are_one_sentence_with_a_remedy(market: NodeMarket) -> None:
    market.make_config("broken", 1)
    path = market.root / "broken" / "node.toml"
    good = path.read_text()

    missing = await call("status", "-c", market.root / "none.toml")
    assert missing.exit_code == 2 and "splitup-node join" in missing.output

    (market.root / "broken" / "wrong").write_text("wrong\n")
    (market.root / "broken" / "wrong").chmod(0o600)
    path.write_text(good.replace('"passphrase"', '"wrong"'))
    wrong = await call("status", "-c", path, "--json")
    assert wrong.exit_code == 2 and "passphrase" in json.loads(wrong.stdout)["error"]

    stale = market.root / "stale.json"
    fields = json.loads(market.network.deployment_path.read_text())
    Deployment(**{**fields, "genesis_hash": "0x" + "00" * 32}).save(stale)
    path.write_text(good.replace(str(market.network.deployment_path), str(stale)))
    old = await call("status", "-c", path)
    assert old.exit_code == 1 and "outdated" in old.output

    path.write_text(good.replace(market.network.rpc_url, "http://127.0.0.1:1"))
    dead = await call("status", "-c", path)
    assert dead.exit_code == 1 and "Traceback" not in dead.output


@pytest.mark.long  # in small: every network in tests/e2e
async def test_run_serves_until_it_is_told_to_stop_and_names_a_busy_port(
    market: NodeMarket,
) -> None:
    config = market.make_config("served", 2)
    path = market.root / "served" / "node.toml"
    await market.stake(config)
    busy = await serve_app(make_app(), "127.0.0.1", 0)
    good = path.read_text()
    path.write_text(good.replace('"127.0.0.1:0"', f'"127.0.0.1:{busy.port}"'))
    assert f"cannot listen on 127.0.0.1:{busy.port}" in await fail_to_run(path)
    await busy.close()

    path.write_text(good)
    node = await run_command(path)
    address = config.load_identity().address
    await market.members.wait_for(lambda: address in market.members.heartbeats)
    status = await call_json("status", "-c", path)
    assert status["node"]["running"] and status["node"]["pid"] == node.pid
    shown = (await call("status", "-c", path)).output
    assert f"{status['node']['endpoint']}, direct" in shown and "0 with 0 B of" in shown
    async with SignedClient() as http:
        assert await http.get_json(f"{status['node']['endpoint']}/v1/ping") == {"node": address}
    async with asyncio.timeout(HANG_S):
        while not status["node"]["resident"]:
            status = await call_json("status", "-c", path)
    task = status["node"]["resident"][0]
    top = await read_top(path, wanted=task["task_id"][:12])
    assert address in top and f"running as process {node.pid}" in top
    await look_at_page(path, task["label"])
    node.send_signal(signal.SIGTERM)
    async with asyncio.timeout(HANG_S):
        log = (await node.communicate())[1].decode()
    assert node.returncode == 0, log
    assert "Traceback" not in log
    assert not (await call_json("status", "-c", path))["node"]["running"]


async def read_top(path: Path, wanted: str) -> str:
    """Run ``splitup-node top`` in a terminal until it shows a text; return all it showed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 80, 160, 0, 0))
    program = str(Path(sys.executable).with_name("splitup-node"))
    process = await asyncio.create_subprocess_exec(
        *(program, "top", "-c", str(path)),
        **{"stdin": slave, "stdout": slave, "stderr": slave},
        env=make_terminal_environment("xterm-256color"),
    )
    os.close(slave)
    shown = b""
    try:
        async with asyncio.timeout(HANG_S):
            while wanted.encode() not in shown or b"together" not in shown:
                shown += await asyncio.to_thread(os.read, master, 65_536)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # raised once it has left the terminal
                while await asyncio.to_thread(os.read, master, 65_536):
                    pass  # it could not end while the terminal is full
            assert await process.wait() == 0
    except TimeoutError:
        pytest.fail(f"it shows no {wanted!r}, or does not end: {shown!r}")
    os.close(master)
    return shown.decode()


def make_terminal_environment(terminal: str) -> dict[str, str]:
    """Return an environment in which the size of a terminal is what the terminal says."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return kept | {"TERM": terminal}


async def look_at_page(path: Path, label: str) -> None:
    """Open the page of a node in a browser: it says what ``status`` and ``earnings`` say."""
    async with await Account.open(NodeConfig.load(path)) as account, async_playwright() as play:
        server = await serve_app(make_owner_app(account, path), "127.0.0.1", 0)
        browser = await play.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(server.url)
        await expect(page.locator("h1 .badge")).to_have_text("running")
        await expect(page.locator("main table").last.get_by_text(label)).to_be_visible()
        await expect(page.get_by_text("Nothing keeps work away.")).to_be_visible()
        rows = list_rows(await fetch_facts(account, path), path, time.time())
        names = await page.locator("dl.status dt").all_text_contents()
        assert names == [name for name, _ in rows]
        await page.set_viewport_size({"width": 360, "height": 740})
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not complaints
        async with (
            SignedClient() as http,
            http.session.get(
                f"{server.url}/node/v1/view", headers={"Host": "evil.example"}
            ) as reply,
        ):
            assert reply.status == 403
        await browser.close()
        await server.close()


async def fail_to_run(path: Path) -> str:
    """Run a node that must refuse to start; return what it says."""
    process = await run_command(path)
    async with asyncio.timeout(HANG_S):
        output = (await process.communicate())[1].decode()
    assert process.returncode == 2 and "Traceback" not in output
    return output


async def run_command(path: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("splitup-node")),
        *("run", "--config", str(path)),
        stderr=asyncio.subprocess.PIPE,
    )
