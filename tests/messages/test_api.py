"""One table of the HTTP interface: names agree, docs show it, and nothing is written twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from splitup_private.adapters.routes import ROUTES as ADAPTER_ROUTES

from splitup.core import limits
from splitup.messages import api
from splitup.messages.api import Route
from splitup.messages.base import RELAY_PATH, Message

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "splitup",
    "node/splitup_node",
    "oracle/splitup_oracle",
    "deploy/splitup_deploy",
    "bench",
)
CONSTANTS = {name: value for name, value in vars(api).items() if isinstance(value, Route)}
TYPES = {route.typ for route in CONSTANTS.values() if route.typ}
WRITTEN = re.compile("|".join(("/v1/", *sorted(TYPES))))  # a source without any is not parsed
RELAY_PATH_OWNER = "splitup/messages/base.py"  # the path is part of a node's endpoint in messages


def to_kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def describe(server: str, route: Route[Any]) -> dict[str, str]:
    """Return a route as the protocol page writes it."""
    limit = f"{route.timeout_s:g} s"
    if route.max_wait_s:
        limit = f"held back ≤ {route.max_wait_s:g} s"
    if route.max_reply_bytes != limits.HTTP_BODY_BYTES:
        kib = route.max_reply_bytes // limits.KIB
        limit += f", ≤ {kib // 1024} MiB" if kib >= 1024 else f", ≤ {kib} KiB"
    return {
        "server": server,
        "route": f"`{route.method} {route.path}`",
        "sender": route.sender,
        "JWS type": f"`{route.typ}`" if route.typ else "",
        "message": f"`{route.message.__name__}`" if route.message else "",
        "reply": f"`{route.reply.__name__}`" if route.reply else "",
        "limit": limit,
    }


def read_page() -> list[dict[str, str]]:
    """Return the rows of the protocol page's table of routes."""
    text = (ROOT / "docs/protocol.md").read_text()
    head, rows = "| server | route |", []
    columns: list[str] = []
    for line in text[text.index(head) :].splitlines():
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif not set(line) <= set("|- :"):
            assert len(cells) == len(columns), line
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def test_the_protocol_page_shows_every_route_and_no_other() -> None:
    tables = {**api.ROUTES, "adapter host": ADAPTER_ROUTES}
    routes = [describe(server, route) for server, rows in tables.items() for route in rows]
    shown = read_page()
    assert all(row["what it does"] for row in shown)
    assert [{name: row[name] for name in routes[0]} for row in shown] == routes


@pytest.mark.parametrize("name", CONSTANTS)
def test_one_name_for_path_type_class_and_constant(name: str) -> None:
    route = CONSTANTS[name]
    if route.message is None:
        assert route.path.startswith("/v1/")
    else:
        assert route.method == "POST"
        assert route.path.rpartition("/")[2] == to_kebab(route.message.__name__)
        assert name == to_kebab(route.message.__name__).replace("-", "_").upper()
    if route.typ:
        assert route.typ == f"splitup-{name.lower().replace('_', '-')}"


def test_every_route_has_a_server_and_paths_are_distinct() -> None:
    served = {route for rows in api.ROUTES.values() for route in rows}
    assert set(CONSTANTS.values()) <= served
    for rows in api.ROUTES.values():
        assert len({(route.method, route.path) for route in rows}) == len(rows)


def test_urls_have_all_parameters() -> None:
    url = api.PLAN.url("http://member:1", execution_id="0xab", wait_s=5)
    assert url == "http://member:1/v1/plan/0xab?wait_s=5"
    with pytest.raises(KeyError):
        api.PLAN.url("http://member:1")


def test_routes_parse_their_own_message() -> None:
    class Ping(Message):
        number: int

    route = Route("POST", "/ping", "anybody", Ping)
    assert route.parse({"number": 3}) == Ping(number=3)


def iter_literals() -> Iterator[tuple[str, int, str]]:
    """Yield strings that may name a path or type and are no docstrings: file, line, text."""
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            if not WRITTEN.search(source):
                continue
            tree = ast.parse(source, str(path))
            texts = {
                id(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if id(node) not in texts:
                        yield path.relative_to(ROOT).as_posix(), node.lineno, node.value


def find_repeated() -> Iterator[str]:
    for path, line, text in iter_literals():
        if path == "splitup/messages/api.py" or (path, text) == (RELAY_PATH_OWNER, RELAY_PATH):
            continue
        if re.search(r"(^|[^a-z])/v1/", text) or text in TYPES:
            yield f"{path}:{line}: {text!r}"


def test_paths_and_types_are_written_once() -> None:
    assert not list(find_repeated()), "take path and JWS type from splitup.messages.api"
