"""The tree of errors in the module's docstring is the tree of its classes."""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession

from splitup.core import errors
from splitup.core.errors import PeerFault, Refused, SplitUpError, describe
from tests.builders import find_free_port

ROOT = Path(__file__).resolve().parents[2]
# errors of others whose text is often empty; a handler that names one may be given any
WORDLESS = {
    *("Exception", "BaseException", "TimeoutError", "ClientError", "EOFError", "MemoryError"),
    *("IncompleteReadError", "AssertionError"),
}
# sources without such a handler are not parsed: all of them take seconds
_HANDLER = re.compile(rf"except\b[^:]*\b(?:{'|'.join(WORDLESS)})\b[^:]*\bas\b")
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


def find_unexplained(source: str) -> Iterator[str]:
    """Yield statements that tell what a foreign error says, which may be nothing."""
    for handler in ast.walk(ast.parse(source if _HANDLER.search(source) else "")):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if not {getattr(kind, "attr", getattr(kind, "id", "")) for kind in kinds} & WORDLESS:
            continue
        name = re.escape(handler.name)
        for part in ast.walk(handler):
            if isinstance(part, ast.Raise | ast.Assign | ast.Return):
                said = ast.unparse(part)
                tells = re.search(rf"\{{{name}[!:}}]|\bstr\({name}\)", said)
                if tells and f"type({handler.name}).__name__" not in said:
                    yield said


def test_no_error_is_told_without_a_reason() -> None:
    sources = {
        path: path.read_text("utf-8")
        for room in ("splitup", "node", "oracle", "deploy", "extras")
        for path in (ROOT / room).rglob("*.py")
        if not any(part.endswith("_tests") for part in path.parts)
    }
    assert len(sources) > 500
    found = {
        str(path.relative_to(ROOT)): said
        for path, source in sources.items()
        for said in find_unexplained(source)
    }
    assert not found, "use splitup.core.errors.describe"


def test_an_error_without_a_reason_would_be_found() -> None:
    said = 'raise Refused(f"cannot: {error}") from None'
    assert list(find_unexplained(f"try:\n    pass\nexcept TimeoutError as error:\n    {said}"))
    said = 'raise Refused(f"cannot: {describe(error)}") from None'
    assert not list(find_unexplained(f"try:\n    pass\nexcept Exception as error:\n    {said}"))
