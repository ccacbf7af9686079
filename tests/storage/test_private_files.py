"""Files that hold private data, under a umask that would let everybody read them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from splitup_gateway.api_keys import ApiKeys
from splitup_gateway.explorer.event_index import EventIndex

from splitup.core.errors import ConfigurationError
from splitup.core.files import follow_no_link, take_lock
from splitup.devnet.state import write_json
from splitup.storage import private_files
from splitup.storage.private_files import create_party, write_private
from tests.chain.test_deployment import DEPLOYMENT


@pytest.fixture(autouse=True)
def let_everybody_read() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def list_modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("exists", [False, True])
def test_a12_databases_are_private_with_all_their_files(tmp_path: Path, exists: bool) -> None:
    if exists:  # an earlier version made them
        for name in ("keys.sqlite", "index.sqlite"):
            (tmp_path / name).touch(mode=0o644)
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    index = EventIndex.open(f"sqlite:///{tmp_path / 'index.sqlite'}", DEPLOYMENT)
    keys.create("ann")
    modes = list_modes(tmp_path)
    keys.close()
    index.close()
    assert {"keys.sqlite", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"} <= set(modes)
    assert set(modes.values()) == {0o600}


def test_a12_a_file_is_private_also_where_there_was_one(tmp_path: Path) -> None:
    (tmp_path / "old.toml").touch(mode=0o644)
    for name in ("old.toml", "new.toml"):
        write_private(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"
    assert set(list_modes(tmp_path).values()) == {0o600}


def test_s123_links_in_a_folder_lead_no_command_elsewhere(tmp_path: Path) -> None:
    """Somebody else made the folder, and knows under which names commands write."""
    own, folder = tmp_path / "bashrc", tmp_path / ".splitup"
    own.write_text("mine")
    folder.mkdir()
    for name in ("deployment.json", "deployment.json.new", ".a.toml", "devnet.json", "lock"):
        (folder / name).symlink_to(own)
    DEPLOYMENT.save(folder / "deployment.json")
    create_party(folder, "a.toml", "text")
    write_json(folder / "devnet.json", {})
    with pytest.raises(OSError, match="symbolic"):
        take_lock(folder)
    with pytest.raises(OSError, match="symbolic"):
        open(folder / "lock", "ab", opener=follow_no_link)
    assert own.read_text() == "mine"
    links = {path.name for path in folder.iterdir() if path.is_symlink()}
    assert links == {"deployment.json.new", "lock"}


def test_a_party_is_asked_last_and_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_party(tmp_path / "new", "a.toml", "", passphrase=interrupt)
    assert not (tmp_path / "new").exists()
    (tmp_path / "passphrase").touch()
    with pytest.raises(ConfigurationError, match="passphrase exists already"):
        create_party(tmp_path, "a.toml", "", passphrase=interrupt)
    assert [file.name for file in tmp_path.iterdir()] == ["passphrase"]


def test_a_key_that_cannot_be_made_leaves_no_passphrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(private_files, "create_identity", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_party(tmp_path / "new", "a.toml", "")
    assert not (tmp_path / "new").exists()
