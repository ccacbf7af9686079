"""The flags of ``splitup generate`` for an adapter under encryption."""

from __future__ import annotations

import pytest
from splitup_private.adapters.flags import EncryptedAdapterFlags

from splitup.cli.command import find_adapter_flags
from splitup.core.errors import InvalidInput


def test_generate_has_them() -> None:
    assert find_adapter_flags() is EncryptedAdapterFlags


def test_an_adapter_needs_a_host_and_may_be_named() -> None:
    assert EncryptedAdapterFlags().read() is None
    for name in ("expert", "check_host"):
        with pytest.raises(InvalidInput, match="needs --adapter-host URL"):
            EncryptedAdapterFlags(**{name: "x"}).read()
    chosen = EncryptedAdapterFlags("http://host").read()
    assert chosen is not None and chosen.expert == "", "the prompt's words choose"
    options = EncryptedAdapterFlags("http://host", "poems").read()
    assert options is not None and (options.url, options.expert) == ("http://host", "poems")
    for key in ("0x12", "key", "0x" + "0" * 64, "0X" + "ab" * 32):
        with pytest.raises(InvalidInput, match=f"the adapter signer '{key}' cannot sign: "):
            EncryptedAdapterFlags("http://host", adapter_signer=key).read()
