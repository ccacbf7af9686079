"""Key files: Ethereum keystore v3, written once, readable only by their owner.

A passphrase comes from a file, never from argv or the environment, which other processes can read.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shlex
import stat
from pathlib import Path
from typing import Any, Final

from eth_keyfile.keyfile import create_keyfile_json, decode_keyfile_json

from splitup.core import limits, tuning
from splitup.core.codec import parse_json
from splitup.core.errors import ConfigurationError, InvalidInput
from splitup.crypto.keys import Identity, generate_identity

DEFAULT_WORK_FACTOR: Final = 2**18  # scrypt N of the Ethereum wallets: ≈ 1 s and 256 MB per guess
DEVNET_WORK_FACTOR: Final = 2**10  # keys worth nothing; a dozen processes start at once
_MAX_SCRYPT_MEMORY_BYTES: Final = 1024 * limits.MIB  # a damaged file must not ask for more


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
    keystore = create_keyfile_json(
        identity.private_key, passphrase, kdf="scrypt", iterations=work_factor
    )
    write_secret_file(path, json.dumps(keystore).encode() + b"\n", what="key file")
    return identity


def load_identity(path: Path, passphrase_path: Path) -> Identity:
    """Decrypt a keystore; raise ConfigurationError, whose message names the remedy."""
    data = read_secret_file(path, what="key file", max_bytes=tuning.MAX_SECRET_FILE_BYTES)
    passphrase = _read_passphrase(passphrase_path)
    keystore = _parse_keystore(path, data)
    try:
        private_key = decode_keyfile_json(keystore, passphrase)
    except ValueError as error:
        if "MAC mismatch" in str(error):
            raise ConfigurationError(
                f"the passphrase in {passphrase_path} does not open the key file {path}; "
                "name the file of the passphrase that the key was created with"
            ) from None
        raise _damaged(path) from None
    except (KeyError, TypeError, AttributeError, NotImplementedError, MemoryError):
        raise _damaged(path) from None
    try:
        identity = Identity.from_private_key(private_key)
    except InvalidInput:
        raise _damaged(path) from None
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
        raise ConfigurationError(f"the {what} {path} does not exist; create it first") from None
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
    try:
        keystore = parse_json(data)
        crypto = keystore.get("crypto") or keystore["Crypto"]
        parameters = crypto["kdfparams"]
        if crypto["kdf"] == "scrypt" and not (
            128 * int(parameters["r"]) * int(parameters["n"]) <= _MAX_SCRYPT_MEMORY_BYTES
        ):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(path) from None
    return dict(keystore)


def _damaged(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"the key file {path} is not an Ethereum keystore (version 3); restore it from your backup"
    )
