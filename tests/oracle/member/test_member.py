"""Committee members as processes, on a real chain (``committee_network``)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from splitup_oracle.config import OracleConfig

from splitup.core.errors import ConfigurationError
from tests.builders import HANG_S


async def start_alone(config: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "splitup-oracle"),
        "run",
        "--config",
        str(config),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode is not None
    return process.returncode, output.decode()


SETTINGS = {
    "rpc_url": '"http://127.0.0.1:9"',
    "deployment": '"deployment.json"',
    "keystore": '"keystore"',
    "passphrase_file": '"passphrase"',
    "data_dir": '"data"',
    "listen_port": "0",
    "gateway_urls": '"http://127.0.0.1:9"',
}


def write(path: Path, **changes: str | None) -> Path:
    settings = {**SETTINGS, **changes}
    path.write_text("".join(f"{k} = {v}\n" for k, v in settings.items() if v is not None))
    return path


async def test_a_missing_keystore_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    code, output = await start_alone(write(tmp_path / "oracle.toml"))
    assert code == 2
    assert output.startswith("error: ") and output.count("\n") == 1, output
    assert "keystore" in output


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"listen_port": "70000"}, "listen_port"),
        ({"gateway_urls": None}, "gateway_urls"),
        ({"more": "1"}, "more"),
        ({"confirmations": "2"}, "confirmations"),  # the deployment states them, for all members
        ({"rpc_url": '"ftp://x"'}, "rpc_url"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, changes: dict[str, str | None], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        OracleConfig.load(write(tmp_path / "oracle.toml", **changes))


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = OracleConfig.load(write(tmp_path / "oracle.toml", keystore='"/etc/key"'))
    assert config.deployment == tmp_path / "deployment.json"
    assert config.keystore == Path("/etc/key")
    with pytest.raises(ConfigurationError, match="--config"):
        OracleConfig.load(tmp_path / "absent.toml")
