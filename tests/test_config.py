from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitup.config import HOME_VARIABLE, NetworkConfig
from splitup.core.errors import ConfigurationError

FILE = {
    "rpc_url": "http://127.0.0.1:1",
    "deployment": "deployment.json",
    "gateway_urls": "http://127.0.0.1:2",
    "user_keystore": "keys/user.json",
    "user_passphrase_file": "/abs/passphrase",
    "members": ["http://127.0.0.1:3"],
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "RPC_URL", "GATEWAY_URLS", "DEPLOYMENT", "USER_KEYSTORE"):
        monkeypatch.delenv(f"SPLITUP_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


def write(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "network.json").write_text(json.dumps({**FILE, **changes}))
    return folder


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = NetworkConfig.load(write(tmp_path / "home"))
    assert config.deployment == tmp_path / "home" / "deployment.json"
    assert config.user_keystore == tmp_path / "home" / "keys" / "user.json"
    assert config.user_passphrase_file == Path("/abs/passphrase")
    assert config.members == ("http://127.0.0.1:3",)
    assert NetworkConfig.load(tmp_path / "home" / "network.json") == config


def test_a_toml_file_says_the_same(tmp_path: Path) -> None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in FILE.items()]
    (tmp_path / "deploy.toml").write_text("\n".join(lines))
    write(tmp_path)
    assert NetworkConfig.load(tmp_path / "deploy.toml") == NetworkConfig.load(tmp_path)


def test_flag_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "home")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("SPLITUP_GATEWAY_URLS", "http://environment:1, http://environment:3")
    monkeypatch.setenv("SPLITUP_RPC_URL", "http://environment:2")
    config = NetworkConfig.load(None, rpc_url="http://flag:1", gateway_urls=None)
    assert config.rpc_url == "http://flag:1"
    assert config.gateway_urls == ("http://environment:1", "http://environment:3")
    assert config.deployment == tmp_path / "home" / "deployment.json"


def test_the_default_is_the_directory_of_splitup_up(tmp_path: Path) -> None:
    write(tmp_path / ".splitup", user_passphrase_file="passphrase")
    assert NetworkConfig.load().rpc_url == FILE["rpc_url"]


def test_flags_alone_are_enough() -> None:
    config = NetworkConfig.load(
        None, rpc_url="http://a:1", deployment=Path("d.json"), gateway_urls="http://b:1"
    )
    assert config.deployment == Path("d.json")
    with pytest.raises(ConfigurationError, match="SPLITUP_USER_KEYSTORE"):
        config.load_user()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "does not hold an object"),
        (json.dumps({**FILE, "members": "x"}), "'members' is not usable"),
        (json.dumps({**FILE, "secret": "x"}), "'secret' in .* is no setting"),
        (json.dumps({**FILE, "gateway_urls": "ftp://x"}), "'gateway_urls' is not usable"),
        (json.dumps({**FILE, "gateway_urls": "http://user@x"}), "'gateway_urls' is not usable"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "network.json").write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        NetworkConfig.load(tmp_path)


def test_nothing_configured_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="splitup up"):
        NetworkConfig.load()
    with pytest.raises(ConfigurationError, match="no network file"):
        NetworkConfig.load(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["user_keystore", "user_passphrase_file"])
@pytest.mark.parametrize("is_link", [False, True])
def test_s76_the_current_folder_names_no_keys_elsewhere(
    name: str, is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that somebody else made would let a user's key sign for their own contract."""
    (tmp_path / "own.json").touch()
    files = {"user_keystore": "key.json", "user_passphrase_file": "passphrase"}
    home = write(tmp_path / ".splitup", **files)
    assert NetworkConfig.load().user_keystore == home / "key.json"
    if is_link:
        (home / files[name]).symlink_to(tmp_path / "own.json")
    else:
        write(home, **files | {name: str(tmp_path / "own.json")})
    with pytest.raises(ConfigurationError, match=f"'{name}' is elsewhere"):
        NetworkConfig.load()
    monkeypatch.setenv(HOME_VARIABLE, ".splitup")
    assert NetworkConfig.load() == NetworkConfig.load(home)
