"""The direction of imports is a rule of the repository, so it is a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Inside ``splitup`` a module may import its own layer and every layer below it.
LAYERS = [
    {"types", "errors", "limits"},
    {"graph", "decode", "crypto", "codec", "wire", "frames", "roots", "packing", "tensors"},
    {"protocol"},
    {"chain", "storage", "net", "journal"},
]
TOP = len(LAYERS)  # client, cli, devnet, serve and the package itself

# The only places that may import a library.
OWNERS = {
    "web3": {"splitup/chain"},
    "boto3": {"splitup/storage"},
    "botocore": {"splitup/storage"},
    "sqlite3": {"splitup/journal"},
    "aiohttp": {"splitup/net", "splitup/chain/rpc.py", "node", "oracle"},
    "tinygrad": {"splitup/graph", "deploy", "node/splitup_node/worker.py"},
    "solcx": {"contracts"},
    "torch": {"examples"},
}
FORBIDDEN_IN_PROTOCOL = {
    *("asyncio", "aiohttp", "web3", "boto3", "tinygrad", "time", "random", "os"),
    *("socket", "sqlite3", "secrets", "datetime", "threading"),
}
PACKAGES = {
    "splitup": ROOT / "splitup",
    "splitup_node": ROOT / "node/splitup_node",
    "splitup_oracle": ROOT / "oracle/splitup_oracle",
    "splitup_deploy": ROOT / "deploy/splitup_deploy",
}


def iter_sources() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield package, path


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                # `from splitup import limits` imports the module splitup.limits
                yield f"{node.module}.{alias.name}" if node.module == "splitup" else node.module


def layer_of(name: str) -> int:
    return next((level for level, members in enumerate(LAYERS) if name in members), TOP)


@pytest.mark.parametrize(
    ("package", "path"), list(iter_sources()), ids=lambda value: str(value)[-60:]
)
def test_imports_go_down(package: str, path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    own = (
        layer_of(path.relative_to(PACKAGES["splitup"]).parts[0].removesuffix(".py"))
        if (package == "splitup")
        else TOP
    )
    for module in imported_modules(path):
        head, *rest = module.split(".")
        if head in OWNERS:
            allowed = any(relative.startswith(owner) for owner in OWNERS[head])
            assert allowed, f"{relative} imports {head}; only {sorted(OWNERS[head])} may"
        if head in PACKAGES and head != package:
            assert head == "splitup", f"{relative} imports {head}; services never import each other"
        if package == "splitup" and head == "splitup" and rest:
            assert layer_of(rest[0]) <= own, f"{relative} imports {module}, which is a layer above"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "splitup/protocol").rglob("*.py")), ids=lambda p: p.name
)
def test_protocol_is_sans_io(path: Path) -> None:
    found = {module.split(".")[0] for module in imported_modules(path)} & FORBIDDEN_IN_PROTOCOL
    assert not found, f"{path.name} imports {sorted(found)}: decide purely, act outside"


def test_nothing_unpickles() -> None:
    for _, path in iter_sources():
        assert "pickle" not in {module.split(".")[0] for module in imported_modules(path)}, path
