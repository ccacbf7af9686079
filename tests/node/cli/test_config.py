from __future__ import annotations

import stat
from pathlib import Path

import pytest
from splitup_node.cli.node_setup import create_node
from splitup_node.config import NodeConfig, format_config

from splitup.config import NetworkConfig
from splitup.core.errors import ConfigurationError

VALUES: dict[str, str | bool] = {
    "rpc_url": "http://127.0.0.1:8545",
    "deployment": "deployment.json",
    "gateway_urls": "http://127.0.0.1:9000",
    "keystore": "keystore.json",
    "passphrase_file": "passphrase",
    "data_dir": "data",
    "listen": "127.0.0.1:7001",
    "endpoint": "",
    "vram": "8GB",
    "allow_loopback": False,
}


def write(directory: Path, **changes: str | bool) -> Path:
    path = directory / "node.toml"
    path.write_text(format_config(path, {**VALUES, **changes}))
    return path


@pytest.fixture
def network(tmp_path: Path) -> NetworkConfig:
    return NetworkConfig.load(
        None,
        rpc_url="http://127.0.0.1:8545",
        deployment=tmp_path / "deployment.json",
        gateway_urls="http://127.0.0.1:9000",
    )


@pytest.mark.parametrize(
    ("vram", "size", "gigabytes"),
    [("8GB", 8 * 10**9, 8), ("1.5GB", 15 * 10**8, 2), ("4MB", 4 * 10**6, 1)],
)
def test_written_configuration_is_read_back(
    tmp_path: Path, vram: str, size: int, gigabytes: int
) -> None:
    config = NodeConfig.load(write(tmp_path, vram=vram))
    assert (int(config.vram), config.vram_gb) == (size, gigabytes)
    assert (config.host, config.port) == ("127.0.0.1", 7001)
    assert config.data_dir == tmp_path / "data" and config.kernel_cache is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rpc_url", "ftp://x"),
        ("gateway_urls", "http://user@host"),
        ("listen", "7001"),
        ("endpoint", "nonsense"),
        ("vram", "much"),
        ("vram", "0"),
    ],
)
def test_bad_value_is_named_with_its_file(tmp_path: Path, field: str, value: str) -> None:
    path = write(tmp_path, **{field: value})
    with pytest.raises(ConfigurationError, match=f"'{field}' in {path} is invalid"):
        NodeConfig.load(path)


def test_unknown_missing_and_broken_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path)
    good = path.read_text()
    path.write_text(good + "colour = 3\n")
    with pytest.raises(ConfigurationError, match=r"'colour' in .* is no setting; correct"):
        NodeConfig.load(path)
    path.write_text(good.replace("vram =", "vramm ="))  # and vram is missing, which helps nobody
    with pytest.raises(ConfigurationError, match=r"'vramm' in .* is no setting; correct"):
        NodeConfig.load(path)
    path.write_text(good.replace("vram =", "# vram ="))
    with pytest.raises(ConfigurationError, match=r"'vram' in .* is missing"):
        NodeConfig.load(path)
    path.write_text("= 3")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        NodeConfig.load(path)
    with pytest.raises(ConfigurationError, match="splitup-node join"):
        NodeConfig.load(tmp_path / "nothing.toml")


def test_init_makes_a_private_key_and_a_configuration_that_loads(
    tmp_path: Path, network: NetworkConfig
) -> None:
    made = create_node(
        tmp_path / "node",
        network,
        vram="2GB",
        listen="127.0.0.1:0",
        endpoint="",
        allow_loopback=True,
    )
    config = NodeConfig.load(Path(made["config"]))
    assert config.load_identity().address == made["address"] and made["vram_gb"] == 2
    for name in ("keystore.json", "passphrase"):
        assert stat.S_IMODE((tmp_path / "node" / name).stat().st_mode) == 0o600
    assert not list((tmp_path / "node").glob(".*"))
    with pytest.raises(ConfigurationError, match="exists already"):
        create_node(
            tmp_path / "node", network, vram="2GB", listen="h:1", endpoint="", allow_loopback=True
        )


@pytest.mark.parametrize(
    ("vram", "listen", "said"),
    [
        ("?", "h:1", "--vram is invalid: give a size such as 8GB"),
        ("2GB", "h", "--listen is invalid: give an address and a port, such as 0.0.0.0:7700"),
    ],
)
def test_init_names_the_flag_that_is_wrong_and_leaves_nothing_behind(
    tmp_path: Path, network: NetworkConfig, vram: str, listen: str, said: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        create_node(
            tmp_path / "node", network, vram=vram, listen=listen, endpoint="", allow_loopback=False
        )
    assert str(caught.value) == said
    assert not (tmp_path / "node").exists()


def test_devices_share_the_memory_or_say_what_each_has(tmp_path: Path) -> None:
    path = write(tmp_path)
    text = path.read_text()
    assert NodeConfig.load(path).device_shares == (("", 8 * 10**9),)
    path.write_text(text.replace("devices = []", 'devices = ["CUDA:0", "CUDA:1"]'))
    assert NodeConfig.load(path).device_shares == (("CUDA:0", 4 * 10**9), ("CUDA:1", 4 * 10**9))
    both = path.read_text()
    path.write_text(both.replace("device_memory = []", 'device_memory = ["5GB", "3GB"]'))
    assert NodeConfig.load(path).device_shares == (("CUDA:0", 5 * 10**9), ("CUDA:1", 3 * 10**9))
    for wrong in ('["5GB"]', '["5GB", "4GB"]'):
        path.write_text(both.replace("device_memory = []", f"device_memory = {wrong}"))
        with pytest.raises(ConfigurationError, match="device_memory"):
            NodeConfig.load(path)
    path.write_text(text.replace("threads = 1", "threads = 0"))
    with pytest.raises(ConfigurationError, match="threads"):
        NodeConfig.load(path)


@pytest.mark.parametrize(
    ("text", "value"), [('"off"', "off"), ('"https://relay:7700"', "https://relay:7700")]
)
def test_relays_are_named_or_turned_off(tmp_path: Path, text: str, value: str) -> None:
    path = write(tmp_path)
    assert (NodeConfig.load(path).relay, NodeConfig.load(path).offer_relay) == ("auto", False)
    good = path.read_text()
    path.write_text(good.replace('relay = "auto"', f"relay = {text}"))
    assert NodeConfig.load(path).relay == value
    path.write_text(good.replace('relay = "auto"', 'relay = "http://relay/path"'))
    with pytest.raises(ConfigurationError, match="relay"):
        NodeConfig.load(path)
