from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from eth_keyfile.keyfile import decode_keyfile_json

from splitup.core.errors import ConfigurationError
from splitup.crypto.keystore import (
    DEVNET_WORK_FACTOR,
    create_identity,
    create_passphrase,
    load_identity,
    read_secret_file,
    write_secret_file,
)


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    path = tmp_path / "secret" / "passphrase"
    create_passphrase(path)
    return path


def test_an_identity_survives_its_file(tmp_path: Path, passphrase: Path) -> None:
    path = tmp_path / "key.json"
    made = create_identity(path, passphrase, work_factor=DEVNET_WORK_FACTOR)
    loaded = load_identity(path, passphrase)
    assert loaded.address == made.address and loaded.signing_key_hex == made.signing_key_hex
    keystore = json.loads(path.read_text())
    assert keystore["version"] == 3 and keystore["crypto"]["kdfparams"]["n"] == DEVNET_WORK_FACTOR
    assert made.private_key.hex() not in path.read_text()


def test_files_are_readable_by_their_owner_alone(tmp_path: Path, passphrase: Path) -> None:
    previous = os.umask(0)
    try:
        create_identity(tmp_path / "key.json", passphrase, work_factor=DEVNET_WORK_FACTOR)
    finally:
        os.umask(previous)
    for path in (tmp_path / "key.json", passphrase):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_key_can_be_imported(tmp_path: Path, passphrase: Path) -> None:
    key = bytes.fromhex("46" * 32)
    create_identity(tmp_path / "k", passphrase, work_factor=DEVNET_WORK_FACTOR, private_key=key)
    assert load_identity(tmp_path / "k", passphrase).private_key == key


def test_a_key_file_is_never_overwritten(tmp_path: Path, passphrase: Path) -> None:
    path = tmp_path / "key.json"
    create_identity(path, passphrase, work_factor=DEVNET_WORK_FACTOR)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="exists already"):
        create_identity(path, passphrase, work_factor=DEVNET_WORK_FACTOR)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
@pytest.mark.parametrize("which", ["key", "passphrase"])
def test_a12_a_file_that_others_can_read_is_refused(
    tmp_path: Path, passphrase: Path, mode: int, which: str
) -> None:
    path = tmp_path / "key file.json"
    create_identity(path, passphrase, work_factor=DEVNET_WORK_FACTOR)
    target = path if which == "key" else passphrase
    target.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"run: chmod 600 ") as caught:
        load_identity(path, passphrase)
    command = str(caught.value).split("run: ", 1)[1]
    assert os.system(command) == 0  # the message's way out is one
    load_identity(path, passphrase)


def test_a_wrong_passphrase_is_one_sentence(tmp_path: Path, passphrase: Path) -> None:
    path = tmp_path / "key.json"
    create_identity(path, passphrase, work_factor=DEVNET_WORK_FACTOR)
    create_passphrase(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="does not open the key file") as caught:
        load_identity(path, tmp_path / "other")
    assert (tmp_path / "other").read_text().strip() not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"version":3}',
        b'{"version":3,"crypto":{"kdf":"scrypt","kdfparams":{"n":1073741824,"r":8,"p":1}}}',
        b'{"version":3,"crypto":{"kdf":"md5","kdfparams":{}}}',
        b"[" * 60_000,
    ],
)
def test_a_damaged_key_file_is_one_sentence(
    tmp_path: Path, passphrase: Path, content: bytes
) -> None:
    path = tmp_path / "key.json"
    write_secret_file(path, content, what="key file")
    with pytest.raises(ConfigurationError, match="restore it from your backup"):
        load_identity(path, passphrase)


def test_every_truncation_of_a_key_file_is_refused(tmp_path: Path, passphrase: Path) -> None:
    path = tmp_path / "key.json"
    create_identity(path, passphrase, work_factor=2)
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError):
            load_identity(path, passphrase)


def test_a_key_file_that_names_another_address_is_refused(tmp_path: Path, passphrase: Path) -> None:
    path = tmp_path / "key.json"
    create_identity(path, passphrase, work_factor=2)
    keystore = json.loads(path.read_text())
    keystore["address"] = "00" * 20
    path.write_text(json.dumps(keystore))
    with pytest.raises(ConfigurationError, match="names address"):
        load_identity(path, passphrase)


def test_missing_empty_long_and_odd_files(tmp_path: Path, passphrase: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_identity(tmp_path / "none", passphrase)
    write_secret_file(tmp_path / "empty", b"\n", what="passphrase file")
    with pytest.raises(ConfigurationError, match="empty"):
        create_identity(tmp_path / "k", tmp_path / "empty", work_factor=2)
    assert not (tmp_path / "k").exists()
    with pytest.raises(ConfigurationError, match="longer than 8"):
        read_secret_file(passphrase, what="file", max_bytes=8)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigurationError, match="regular"):
        read_secret_file(tmp_path / "fifo", what="file", max_bytes=8)


# The two examples of "Web3 Secret Storage Definition"; their passphrase is "testpassword".
_SECRET = "7a28b5ba57c53603b0b07b56bba752f7784bf506fa95edc395f5cf6c7514fe9d"
_OFFICIAL = {
    "pbkdf2": {
        "cipher": "aes-128-ctr",
        "cipherparams": {"iv": "6087dab2f9fdbbfaddc31a909735c1e6"},
        "ciphertext": "5318b4d5bcd28de64ee5559e671353e16f075ecae9f99c7a79a38af5f869aa46",
        "kdf": "pbkdf2",
        "kdfparams": {
            "c": 262144,
            "dklen": 32,
            "prf": "hmac-sha256",
            "salt": "ae3cd4e7013836a3df6bd7241b12db061dbe2c6785853cce422d148a624ce0bd",
        },
        "mac": "517ead924a9d0dc3124507e3393d175ce3ff7c1e96529c6c555ce9e51205e9b2",
    },
    "scrypt": {
        "cipher": "aes-128-ctr",
        "cipherparams": {"iv": "83dbcc02d8ccb40e466191a123791e0e"},
        "ciphertext": "d172bf743a674da9cdad04534d56926ef8358534d458fffccd4e6ad2fbde479c",
        "kdf": "scrypt",
        "kdfparams": {
            "dklen": 32,
            "n": 262144,
            "p": 8,
            "r": 1,
            "salt": "ab0c7876052600dd703518d6fc3fe8984592145b591fc8fb5c6d43190334ba19",
        },
        "mac": "2103ac29920d71da29f15d75b4a16dbe95cfd7ff8faea1056c33131d846e3097",
    },
}


@pytest.mark.parametrize(("function", "name"), [("pbkdf2", "Crypto"), ("scrypt", "crypto")])
def test_key_files_of_other_wallets_are_read(tmp_path: Path, function: str, name: str) -> None:
    keystore = {name: _OFFICIAL[function], "version": 3}
    write_secret_file(tmp_path / "key", json.dumps(keystore).encode(), what="key file")
    create_passphrase(tmp_path / "passphrase", "testpassword")
    loaded = load_identity(tmp_path / "key", tmp_path / "passphrase")
    assert loaded.private_key.hex() == _SECRET


def test_other_wallets_read_our_key_files(tmp_path: Path, passphrase: Path) -> None:
    made = create_identity(tmp_path / "key", passphrase, work_factor=DEVNET_WORK_FACTOR)
    keystore = json.loads((tmp_path / "key").read_text())
    assert decode_keyfile_json(keystore, passphrase.read_bytes().rstrip()) == made.private_key
    assert "0x" + keystore["address"] == made.address
