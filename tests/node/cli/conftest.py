from __future__ import annotations

from pathlib import Path

import pytest

from splitup.crypto import keystore
from splitup.crypto.keystore import DEVNET_WORK_FACTOR, create_identity
from splitup.storage import private_files


@pytest.fixture(autouse=True)
def cheap_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make key files whose passphrase is not expensive to try."""

    def create(path: Path, passphrase: Path) -> object:
        return create_identity(path, passphrase, work_factor=DEVNET_WORK_FACTOR)

    for module in (keystore, private_files):
        monkeypatch.setattr(module, "create_identity", create)
