from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from splitup_deploy.calibration.tolerances import attach_vectors
from splitup_deploy.cli.commands import app
from splitup_deploy.cutting.build import build
from splitup_deploy.publishing.registration import publish
from typer.testing import CliRunner

from splitup.chain.client import Chain
from splitup.chain.models import encode_edges, encode_tasks
from splitup.chain.registered_models import fetch_model
from splitup.client.market.payments import fetch_quote
from splitup.core.errors import InvalidInput, InvalidModel, StorageUnavailable
from splitup.crypto.keys import Identity
from splitup.crypto.keystore import DEVNET_WORK_FACTOR, create_identity, create_passphrase
from splitup.devnet.anvil import derive_key
from splitup.storage.gateway_client import GatewayClient
from tests.builders import find_free_port
from tests.deploy.llamas import TINY
from tests.oracle.gateway_network import MNEMONIC, Network, run_network

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULE = """
import numpy as np
from tinygrad import Tensor

def _layers(seed, count):
    random = np.random.default_rng(seed)
    return [Tensor(random.standard_normal((64, 64), dtype=np.float32)) for _ in range(count)]

def _make(seed):
    layers = _layers(seed, 4)
    def model(x):
        for layer in layers:
            x = (x @ layer).relu()
        return x
    model.inputs = {"x": ("float32", (1, 64))}
    return model

(
    first, second, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth
) = (_make(seed) for seed in range(10))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with run_network(tmp_path_factory.mktemp("register"), open_models=True) as running:
        yield running


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "register_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "register_models"


def write_home(network: Network, home: Path, *, account: int = 9, **changes: Any) -> Path:
    """What ``splitup up`` leaves for a user: network.json and a funded key."""
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "key.json").exists():
        create_passphrase(home / "passphrase")
        create_identity(
            home / "key.json",
            home / "passphrase",
            work_factor=DEVNET_WORK_FACTOR,
            private_key=derive_key(MNEMONIC, account),
        )
    values = {
        "rpc_url": network.rpc_url,
        "deployment": str(network.deployment_path),
        "gateway_urls": network.url,
        "user_keystore": "key.json",
        "user_passphrase_file": "passphrase",
        "members": [],
        **changes,
    }
    (home / "network.json").write_text(json.dumps(values))
    return home


async def invoke(*arguments: str) -> tuple[int, str]:
    """Run the command line on a thread: it brings its own event loop."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


async def register_cli(
    home: Path, model: str, name: str, target: str = "20kB", *flags: str
) -> tuple[int, dict[str, Any]]:
    arguments = ("--model", model, "--name", name, "--target-vram", target, *flags, "--json")
    code, output = await invoke("register", *arguments, "--config", str(home))
    return code, json.loads(output.splitlines()[-1])


async def test_register_stores_everything_then_says_so(
    network: Network, models: str, tmp_path: Path
) -> None:
    home = write_home(network, tmp_path / "home")
    code, first = await register_cli(home, f"{models}:first", "first")
    assert code == 0, first
    assert first["uploaded_objects"] == 3 * len(first["tasks"]) + 1 > 5  # with the vectors
    assert first["transaction"].startswith("0x")

    compiled = attach_vectors(build(f"{models}:first", 20_000))
    found = await fetch_model(network.owner, compiled.model_id)
    assert found is not None
    assert (found.name, found.task_count) == ("first", len(first["tasks"]))
    assert found.price_per_step_nano_usdc == compiled.manifest.price_nano_usdc
    async with GatewayClient((network.url,), network.client) as gateway:
        grants = await gateway.model_grants(compiled.model_id)
    stored = {grant.key for grant in grants.grants}
    assert stored == {blob.key for blob in (*compiled.blobs, compiled.manifest_blob)}

    code, again = await register_cli(home, f"{models}:first", "first")
    assert (code, again["already_registered"], again["uploaded_objects"]) == (0, True, 0)
    assert again["transaction"] == ""

    code, output = await invoke("list", "--json", "--config", str(home))
    listed = {entry["name"]: entry["model_id"] for entry in json.loads(output)["models"]}
    assert listed["first"] == compiled.model_id
    for spelling in ("first", compiled.model_id):
        code, output = await invoke("inspect", spelling, "--json", "--config", str(home))
        assert (code, json.loads(output)["model_id"]) == (0, compiled.model_id)
    code, output = await invoke("inspect", "first", "--config", str(home))
    assert code == 0 and f"{len(first['tasks'])} tasks" in output and "task 0 256 B" in output
    assert "times are estimated" in output
    code, output = await invoke("inspect", "first", "--chunk", "2", "--config", str(home))
    assert code == 2 and "first is registered, so it is cut already" in output


class Recorder:
    """An upload's watcher that can break it in the middle."""

    def __init__(self, limit: int | None = None) -> None:
        self.total = self.skipped = self.sent = 0
        self._limit = limit

    def start(self, total_bytes: int) -> None:
        self.total = total_bytes

    def skip(self, present_bytes: int) -> None:
        self.skipped += present_bytes

    def advance(self, sent_bytes: int) -> None:
        self.sent += sent_bytes
        if self._limit is not None and self.sent > self._limit:
            raise StorageUnavailable("the cable was pulled")


async def test_an_interrupted_upload_goes_on_and_registers_nothing_half(
    network: Network, models: str
) -> None:
    compiled = build(f"{models}:second", 20_000)
    developer = Identity.from_private_key(derive_key(MNEMONIC, 8))
    async with (
        await Chain.connect(
            network.rpc_url, network.deployment, private_key=developer.private_key
        ) as chain,
        GatewayClient((network.url,), developer) as gateway,
    ):
        with pytest.raises(StorageUnavailable, match="cable"):
            await publish(compiled, "second", chain, gateway, Recorder(limit=30_000))
        assert await fetch_model(chain, compiled.model_id) is None
        second = Recorder()
        done = await publish(compiled, "second", chain, gateway, second)
        assert second.skipped > 0
        assert second.skipped + second.sent == second.total
        assert done.uploaded_objects < len(compiled.blobs) + 1
        third = Recorder()
        done = await publish(compiled, "second", chain, gateway, third)
        assert (done.already_registered, third.total) == (True, 0)


async def test_s01_an_id_that_somebody_registered_at_another_price_is_not_ours(
    network: Network, models: str
) -> None:
    compiled = build(f"{models}:tenth", 20_000)
    tasks = [task | {"priceNanoUsdc": 0} for task in encode_tasks(compiled.manifest)]
    edges = encode_edges(compiled.manifest)
    thief = network.owner
    await thief.send("models", "register", compiled.model_id, "thief's", tasks, edges)
    async with GatewayClient((network.url,), None) as gateway:
        with pytest.raises(InvalidModel, match="other tasks, edges or prices"):
            await publish(compiled, "mine", thief, gateway, Recorder())


async def test_a_taken_name_is_refused_before_anything_is_sent(
    network: Network, models: str, tmp_path: Path
) -> None:
    owner = write_home(network, tmp_path / "owner", account=9)
    other = write_home(network, tmp_path / "other", account=7)
    assert (await register_cli(owner, f"{models}:third", "taken"))[0] == 0
    code, answer = await register_cli(other, f"{models}:fourth", "taken")
    assert code == 2 and "belongs to 0x" in answer["error"]
    model_id = build(f"{models}:fourth", 20_000).model_id
    assert await fetch_model(network.owner, model_id) is None
    with pytest.raises(Exception, match="no model"):
        async with GatewayClient((network.url,), None) as gateway:
            await gateway.fetch_manifest(model_id)
    code, answer = await register_cli(owner, f"{models}:fourth", "taken")
    assert (code, answer["already_registered"]) == (0, False)  # its owner may point it elsewhere


async def test_failures_say_what_to_do(network: Network, models: str, tmp_path: Path) -> None:
    model = f"{models}:fifth"
    home = write_home(network, tmp_path / "home")
    nobody = f"http://127.0.0.1:{find_free_port()}"
    for flag, code, text in (
        ("--rpc-url", 1, "does not answer"),
        ("--gateway", 1, "storage gateway failed"),
    ):
        found, output = await invoke(
            *("register", "--model", model, "--name", "fifth", "--target-vram", "20kB"),
            *("--config", str(home), flag, nobody),
        )
        assert found == code and text in output and output.count("error:") == 1
    code, answer = await register_cli(home, model, "fifth", target="1kB")
    assert code == 2 and "raise --target-vram to at least" in answer["error"]
    code, answer = await register_cli(home, str(tmp_path / "missing"), "fifth")
    assert code == 2 and "does not exist" in answer["error"]
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    code, answer = await register_cli(home, str(tmp_path / "config.json"), "fifth", target="2MB")
    assert code == 2 and "has no weights, so it cannot be registered" in answer["error"]
    code, answer = await register_cli(home, model, "n" * 65)
    assert code == 2 and "1 to 64 bytes" in answer["error"]
    code, output = await invoke("inspect", "never-registered", "--config", str(home))
    assert code == 2 and "splitup-deploy list" in output
    code, output = await invoke("list", "--config", str(tmp_path / "no-network"))
    assert code == 2 and "splitup up" in output

    poor = tmp_path / "poor"
    poor.mkdir()
    create_passphrase(poor / "passphrase")
    create_identity(poor / "key.json", poor / "passphrase", work_factor=DEVNET_WORK_FACTOR)
    code, answer = await register_cli(write_home(network, poor), model, "fifth")
    assert code == 2 and "has no ether" in answer["error"]
    assert await fetch_model(network.owner, build(model, 20_000).model_id) is None


async def test_a_dry_run_and_inspect_show_the_id_of_the_registration(
    network: Network, models: str, tmp_path: Path
) -> None:
    home = write_home(network, tmp_path / "home")
    flags = ("--target-vram", "20kB", "--price", "0.04", "--json")
    model = f"{models}:sixth"
    arguments = ("register", "--model", model, "--name", "sixth", *flags)
    code, output = await invoke(*arguments, "--dry-run", "--config", str(tmp_path / "nowhere"))
    assert code == 0
    dry = json.loads(output.splitlines()[-1])
    assert len(dry["tasks"]) > 1 and all(task["vram_bytes"] <= 20_000 for task in dry["tasks"])
    code, output = await invoke("inspect", model, *flags)
    assert (code, json.loads(output.splitlines()[-1])["model_id"]) == (0, dry["model_id"])
    code, output = await invoke(*arguments, "--config", str(home))
    done = json.loads(output.splitlines()[-1])
    assert (code, done["model_id"]) == (0, dry["model_id"])
    assert [task["task_id"] for task in done["tasks"]] == [t["task_id"] for t in dry["tasks"]]

    found = await fetch_model(network.owner, done["model_id"])
    assert found is not None and found.price_per_step_nano_usdc == 40
    assert done["price_per_step_nano_usdc"] == 40
    for price, problem in (("0.001", "raise --price to"), ("0.0405", "a price has 3 decimals")):
        code, output = await invoke(*arguments[:-3], "--price", price, "--dry-run")
        assert code == 2 and problem in output


async def test_a_name_s_newest_version_is_used_until_its_developer_retires_it(
    network: Network, models: str, tmp_path: Path
) -> None:
    home = write_home(network, tmp_path / "home")
    _, old = await register_cli(home, f"{models}:seventh", "versions")
    _, new = await register_cli(home, f"{models}:eighth", "versions", "20kB", "--price", "12")
    assert await list_versions(home) == {
        old["model_id"]: (False, False),
        new["model_id"]: (True, False),
    }
    code, output = await invoke("list", "--config", str(home))
    assert code == 0 and "used by clients that name 'versions'" in output
    assert "older version: used by its id only" in output
    code, output = await invoke("inspect", "versions", "--json", "--config", str(home))
    assert json.loads(output)["model_id"] == new["model_id"]

    stranger = write_home(network, tmp_path / "stranger", account=7)
    code, output = await invoke("retire", "versions", "--json", "--config", str(stranger))
    assert code == 2 and "only its developer can retire it" in output
    quote = await fetch_quote(network.owner, new["model_id"], 300, deadline_s=30)
    full = await fetch_quote(network.owner, new["model_id"], 300, "100%", deadline_s=30)
    assert quote.verify_bps == 800 and full.verify_bps == 10_000
    assert quote.locked_micro_usdc == full.locked_micro_usdc == full.average_micro_usdc
    assert quote.average_micro_usdc == pytest.approx(full.average_micro_usdc * 0.54, abs=2)
    with pytest.raises(InvalidInput, match="verifies at least 8 %"):
        await fetch_quote(network.owner, new["model_id"], 3, 0.0799)
    code, output = await invoke("retire", "versions", "--json", "--config", str(home))
    assert (code, json.loads(output)["model_id"]) == (0, new["model_id"])
    assert await list_versions(home) == {
        old["model_id"]: (False, False),
        new["model_id"]: (True, True),
    }
    with pytest.raises(InvalidInput, match="was retired by its developer"):
        await fetch_quote(network.owner, new["model_id"], 3)
    assert (await fetch_quote(network.owner, old["model_id"], 3)).locked_micro_usdc > 0
    code, output = await invoke("retire", new["model_id"], "--config", str(home))
    assert code == 2 and "is retired already" in output
    code, answer = await register_cli(home, f"{models}:eighth", "versions", "20kB", "--price", "12")
    assert code == 2 and "retired for good" in answer["error"]


async def list_versions(home: Path) -> dict[str, tuple[bool, bool]]:
    """Return for each version of the name "versions" whether it is current and retired."""
    _, output = await invoke("list", "--json", "--config", str(home))
    return {
        entry["model_id"]: (entry["is_current"], entry["is_retired"])
        for entry in json.loads(output)["models"]
        if entry["name"] == "versions"
    }


async def test_usage_of_a_model_that_nobody_used(
    network: Network, models: str, tmp_path: Path
) -> None:
    home = write_home(network, tmp_path / "home")
    _, done = await register_cli(home, f"{models}:ninth", "unused")
    code, output = await invoke("usage", "unused", "--json", "--config", str(home))
    (found,) = json.loads(output)["models"]
    assert (code, found["model_id"], found["executions"]) == (0, done["model_id"], 0)
    code, output = await invoke("usage", "nothing", "--config", str(home))
    assert code == 2 and "splitup-deploy list" in output
