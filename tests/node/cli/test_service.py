from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from splitup_node.cli.app import SERVICE, app
from splitup_node.cli.node_setup import create_node
from splitup_oracle.cli.app import GATEWAY_SERVICE, MEMBER_SERVICE
from splitup_oracle.cli.app import app as oracle_app
from splitup_oracle.member_setup import create_member
from typer.testing import CliRunner

from splitup.cli.service import Service, format_unit
from splitup.config import NetworkConfig
from tests.builders import address


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node in a directory whose name systemd would take apart."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    deployment = tmp_path / "deployment.json"
    names = ("usdc", "committee", "bonds", "nodes", "models", "market")
    contracts = {name: address(number) for number, name in enumerate(names)}
    genesis = {"chain_id": 1, "genesis_hash": "0x" + "00" * 32}
    deployment.write_text(json.dumps(genesis | contracts))
    network = NetworkConfig(
        rpc_url="http://127.0.0.1:1", deployment=deployment, gateway_urls=("http://127.0.0.1:1",)
    )
    folder = tmp_path / 'a "node" of $HOME, 100 %h'
    made = create_node(
        folder,
        network,
        vram="1GB",
        listen="127.0.0.1:0",
        endpoint="",
        allow_loopback=True,
    )
    network = network.model_copy(update={"allow_loopback": True})
    (folder / "member").mkdir()
    create_member(folder / "member", network, endpoint="http://10.0.0.1", listen="127.0.0.1:8700")
    return Path(made["config"])


def test_members_and_gateways_have_units_too(config: Path, tmp_path: Path) -> None:
    runner, member = CliRunner(), config.parent / "member" / "oracle.toml"
    done = runner.invoke(oracle_app, ["service", "install", "--config", str(member), "--json"])
    assert done.exit_code == 0, done.output
    text = Path(json.loads(done.stdout)["unit"]).read_text()
    assert 'splitup-oracle" "run" "--config" "' in text and "SplitUp member" in text
    assert json.loads(done.stdout)["unit"].endswith("/splitup-member.service")
    gateway = tmp_path / "gateway.toml"
    gateway.write_text(
        'rpc_url = "http://127.0.0.1:1"\ns3_endpoint = "http://127.0.0.1:2"\nbucket = "splitup"\n'
        'deployment = "deployment.json"\ncredentials = "s3.json"\ndata_dir = "data"\n'
        "listen_port = 8800\n"
    )
    install = ["gateway-service", "install", "--config", str(gateway)]
    refused = runner.invoke(oracle_app, install)  # it could never start
    assert refused.exit_code == 2 and "s3.json" in refused.output
    (tmp_path / "s3.json").write_text('{"access_key": "a", "secret_key": "b"}')
    (tmp_path / "s3.json").chmod(0o600)
    done = runner.invoke(oracle_app, install)
    assert done.exit_code == 0 and "enable --now splitup-gateway" in done.stdout, done.output


def test_a_unit_is_written_and_deleted(config: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["service", "install", "--config", str(config), "--json"])
    assert done.exit_code == 0, done.output
    unit = Path(json.loads(done.stdout)["unit"])
    assert unit == tmp_path / "config" / "systemd" / "user" / "splitup-node.service"
    text = unit.read_text()
    assert '" "run" "--config" "' in text
    assert 'a \\"node\\" of $$HOME, 100 %%h/node.toml"' in text

    enabled = unit.parent / "default.target.wants" / unit.name  # as systemctl does
    enabled.parent.mkdir()
    enabled.symlink_to(unit)
    shown = runner.invoke(app, ["service", "uninstall"])
    assert shown.exit_code == 0 and "systemctl --user stop splitup-node" in shown.output
    assert not unit.exists() and not enabled.is_symlink()
    again = runner.invoke(app, ["service", "uninstall"])
    assert again.exit_code == 2 and "there is no unit" in again.output


@pytest.mark.parametrize("name", ["../evil", "a b", "", "x.service", "-f"])
def test_a_name_cannot_leave_the_folder(config: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["service", "install", "-c", str(config), "--name", name])
    assert done.exit_code == 2 and "is no name of a unit" in done.output


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("is_system", [False, True])
@pytest.mark.parametrize("service", [SERVICE, MEMBER_SERVICE, GATEWAY_SERVICE])
def test_systemd_accepts_the_unit(
    config: Path, tmp_path: Path, service: Service, is_system: bool
) -> None:
    unit = tmp_path / "splitup-node.service"
    program = shutil.which("true")
    assert program is not None
    command = [program, service.verb, str(config)]
    unit.write_text(format_unit(service, command, config, is_system=is_system))
    assert verify(unit, tmp_path, is_system=is_system) == ""
    unit.write_text(unit.read_text().replace("RestartSec=15", "RestartSec=soon"))
    assert ": soon" in verify(unit, tmp_path, is_system=is_system)


def verify(unit: Path, tmp_path: Path, *, is_system: bool) -> str:
    """Return what systemd says of this unit."""
    scope = "--system" if is_system else "--user"
    done = subprocess.run(
        ["systemd-analyze", "verify", scope, str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    lines = [line for line in done.stderr.splitlines() if unit.name in line]
    assert done.returncode == 0 or lines, done.stderr
    return "\n".join(lines)
