"""The tree of errors in the module's docstring is the tree of its classes."""

from __future__ import annotations

import re
import socket

import pytest
from aiohttp import ClientConnectionError, ClientSession

from splitup.core import errors
from splitup.core.errors import PeerFault, Refused, SplitUpError, describe
from tests.builders import find_free_port

_LINE = re.compile(r"^    (?P<indent>[ │├└─]*)(?P<name>[A-Z][A-Za-z]+)(\s|$)")


def read_tree(text: str) -> dict[str, str]:
    """Return the parent of every error that the docstring draws, by name."""
    parents: dict[str, str] = {}
    open_at: list[str] = []
    for line in text.splitlines():
        if (match := _LINE.match(line)) is not None:
            depth = len(match["indent"]) // 4
            del open_at[depth:]
            if open_at:
                parents[match["name"]] = open_at[-1]
            open_at.append(match["name"])
    return parents


def test_docstring_draws_the_classes() -> None:
    defined = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, SplitUpError) and kind is not SplitUpError
    }
    assert errors.__doc__ is not None
    assert read_tree(errors.__doc__) == defined


def test_a_refusal_is_no_fault_of_the_server() -> None:
    assert not issubclass(Refused, PeerFault)
    assert Refused("not now", status=409).status == 409


async def test_of_a_connection_only_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ClientSession() as session:
        with pytest.raises(ClientConnectionError) as caught:
            await session.get(f"http://127.0.0.1:{find_free_port()}")
    assert describe(caught.value) == "Connection refused"

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    async with ClientSession() as session:
        with pytest.raises(ClientConnectionError) as caught:
            await session.get("http://no.example")
    assert describe(caught.value) == "Name or service not known"
    assert (describe(ValueError("so")), describe(TimeoutError())) == ("so", "TimeoutError")
