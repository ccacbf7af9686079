"""Key files: Ethereum keystore v3, written once, readable only by their owner.

``eth_keyfile``, with which the tests compare, spends half a second of CPU time on importing the
pairings of another kind of key file.

A passphrase comes from a file, never from argv or the environment, which other processes can read.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import shlex
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from eth_hash.auto import keccak

from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.core.errors import ConfigurationError, InvalidInput
from splitup.crypto.keys import Identity, generate_identity

DEFAULT_WORK_FACTOR: Final = 2**18  # scrypt N of the Ethereum wallets: ≈ 1 s and 256 MB per guess
DEVNET_WORK_FACTOR: Final = 2**10  # keys worth nothing; a dozen processes start at once
_MAX_SCRYPT_MEMORY_BYTES: Final = 1024 * limits.MIB  # a damaged file must not ask for more
_DAMAGES: Final = (ValueError, KeyError, TypeError, AttributeError)  # of fields that are wrong


def create_passphrase(path: Path, passphrase: str = "") -> None:
    """Write a passphrase to a new file that only its owner can read; a random one (192 bits)."""
    secret = passphrase.encode() or base64.urlsafe_b64encode(secrets.token_bytes(24))
    write_secret_file(path, secret + b"\n", what="passphrase file")


def create_identity(
    path: Path,
    passphrase_path: Path,
    *,
    work_factor: int = DEFAULT_WORK_FACTOR,
    private_key: bytes | None = None,
) -> Identity:
    """Write a new keystore and return its identity; never overwrites.

    ``work_factor`` is scrypt's N, a power of two. ``private_key`` imports an existing key. Raises
    ConfigurationError when the file exists or the passphrase file cannot be used.
    """
    passphrase = _read_passphrase(passphrase_path)
    if private_key is None:
        identity = generate_identity()
    else:
        identity = Identity.from_private_key(private_key)
    keystore = _encrypt(identity, passphrase, work_factor)
    write_secret_file(path, json.dumps(keystore).encode() + b"\n", what="key file")
    return identity


def load_identity(path: Path, passphrase_path: Path) -> Identity:
    """Decrypt a keystore; raise ConfigurationError, whose message names the remedy."""
    data = read_secret_file(path, what="key file", max_bytes=tuning.MAX_SECRET_FILE_BYTES)
    passphrase = _read_passphrase(passphrase_path)
    keystore = _parse_keystore(path, data)
    try:
        private_key = _decrypt(keystore, passphrase)
        identity = None if private_key is None else Identity.from_private_key(private_key)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        InvalidInput,
    ):
        raise _damaged(path) from None
    if identity is None:
        raise ConfigurationError(
            f"the passphrase in {passphrase_path} does not open the key file {path}; "
            "name the file of the passphrase that the key was created with"
        )
    address = str(keystore.get("address", "")).removeprefix("0x").lower()
    if address and "0x" + address != identity.address:
        raise ConfigurationError(
            f"the key file {path} names address 0x{address} but holds the key of "
            f"{identity.address}; restore it from your backup"
        )
    return identity


def read_address(path: Path) -> str:
    """Return the address that a keystore names, without opening it; raise ConfigurationError."""
    data = read_secret_file(path, what="key file", max_bytes=tuning.MAX_SECRET_FILE_BYTES)
    address = str(_parse_keystore(path, data).get("address", "")).removeprefix("0x").lower()
    if len(address) != 40 or not all(digit in "0123456789abcdef" for digit in address):
        raise _damaged(path)
    return "0x" + address


def write_secret_file(path: Path, data: bytes, *, what: str) -> None:
    """Create ``path`` with mode 0600, durably; raise ConfigurationError if it exists."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigurationError(
            f"the {what} {path} exists already; it is never overwritten, choose another path"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot write the {what} {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        path.unlink(missing_ok=True)  # an incomplete key file would block the next try
        raise ConfigurationError(f"cannot write the {what} {path}: {error.strerror}") from None


def read_secret_file(path: Path, *, what: str, max_bytes: int) -> bytes:
    """Read a file that holds a secret; raise ConfigurationError when other users may read it.

    The mode is that of the open file, so that the file cannot be swapped in between.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigurationError(
            f"the {what} {path} does not exist; put it there, from a backup if it was lost"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot read the {what} {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"the {what} {path} is not a regular file")
        if status.st_mode & 0o077:
            raise ConfigurationError(
                f"the {what} {path} can be read by other users; run: "
                f"chmod 600 {shlex.quote(str(path))}"
            )
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ConfigurationError(f"the {what} {path} is longer than {max_bytes} bytes")
    return data


def _read_passphrase(path: Path) -> bytes:
    data = read_secret_file(path, what="passphrase file", max_bytes=4 * limits.KIB)
    passphrase = data.rstrip(b"\r\n")
    if not passphrase:
        raise ConfigurationError(f"the passphrase file {path} is empty; write the passphrase to it")
    return passphrase


def _parse_keystore(path: Path, data: bytes) -> dict[str, Any]:
    """Return the fields, those of encryption as "crypto" (old wallets: "Crypto")."""
    try:
        keystore = dict(parse_json(data))
        crypto = keystore.get("crypto") or keystore["Crypto"]
        parameters = crypto["kdfparams"]
        if keystore["version"] != 3 or crypto["cipher"] != "aes-128-ctr":
            raise ValueError
        if crypto["kdf"] == "scrypt" and not (
            128 * int(parameters["r"]) * int(parameters["n"]) <= _MAX_SCRYPT_MEMORY_BYTES
        ):
            raise ValueError
    except (*_DAMAGES, RecursionError):
        raise _damaged(path) from None
    return keystore | {"crypto": crypto}


def _encrypt(identity: Identity, passphrase: bytes, work_factor: int) -> dict[str, Any]:
    salt, counter = secrets.token_bytes(16), secrets.token_bytes(16)
    parameters = {"dklen": 32, "n": work_factor, "r": 8, "p": 1, "salt": salt.hex()}
    key = _derive_key("scrypt", parameters, passphrase)
    ciphertext = _apply_aes_ctr(key, counter, identity.private_key)
    return {
        "address": identity.address[2:],
        "crypto": {
            "cipher": "aes-128-ctr",
            "cipherparams": {"iv": counter.hex()},
            "ciphertext": ciphertext.hex(),
            "kdf": "scrypt",
            "kdfparams": parameters,
            "mac": keccak(key[16:32] + ciphertext).hex(),
        },
        "id": str(uuid.uuid4()),
        "version": 3,
    }


def _decrypt(keystore: Mapping[str, Any], passphrase: bytes) -> bytes | None:
    """Return the private key, None when it was encrypted with another passphrase."""
    crypto = keystore["crypto"]
    key = _derive_key(crypto["kdf"], crypto["kdfparams"], passphrase)
    ciphertext = _parse_hex(crypto["ciphertext"])
    if not hmac.compare_digest(keccak(key[16:32] + ciphertext), _parse_hex(crypto["mac"])):
        return None
    return _apply_aes_ctr(key, _parse_hex(crypto["cipherparams"]["iv"]), ciphertext)


def _derive_key(function: str, parameters: Mapping[str, Any], passphrase: bytes) -> bytes:
    """Return at least 32 bytes: 16 of the cipher's key, 16 that the checksum covers."""
    salt, length = _parse_hex(parameters["salt"]), int(parameters["dklen"])
    if length < 32:
        raise ValueError(f"a derived key of {length} bytes is too short")
    if function == "scrypt":
        n, r, p = (int(parameters[name]) for name in ("n", "r", "p"))
        # OpenSSL's refuses r = 1, which the standard's own example has; bytes are taken as well
        from Crypto.Protocol.KDF import scrypt  # at use: few commands open a key

        return bytes(scrypt(passphrase, salt, length, n, r, p))  # type: ignore[arg-type]
    if function == "pbkdf2" and parameters["prf"] == "hmac-sha256":
        return hashlib.pbkdf2_hmac("sha256", passphrase, salt, int(parameters["c"]), length)
    raise ValueError(f"unknown key derivation {function}")


def _apply_aes_ctr(key: bytes, counter: bytes, data: bytes) -> bytes:
    """Encrypt or decrypt: in counter mode both are the same."""
    from Crypto.Cipher import AES

    cipher = AES.new(key[:16], AES.MODE_CTR, nonce=b"", initial_value=counter)
    return cipher.encrypt(data)


def _parse_hex(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("0x"))


def _damaged(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"the key file {path} is not an Ethereum keystore (version 3); restore it from your backup"
    )
