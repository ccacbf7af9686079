"""The direction of imports is a rule of the repository, so it is a test."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a package inside ``splitup`` may import besides itself. Those that are not listed here
# (client, cli, devnet, demo and the package itself) may import all of ``splitup``.
ALLOWED = {
    "core": set(),
    "crypto": {"core"},
    "sandbox": {"core"},
    "decode": {"core"},
    "graph": {"core"},
    "messages": {"core", "crypto"},
    "cpu": {"core", "graph"},
    "backend": {"core", "graph", "cpu", "sandbox"},
    "protocol": {"core", "crypto", "graph", "messages"},
    "net": {"core", "crypto", "messages", "protocol"},
    "storage": {"core", "crypto", "graph", "messages", "protocol", "net"},
    "chain": {"core", "crypto", "graph", "messages", "protocol"},
    "config": {"core", "crypto", "messages"},
}

# The rooms of ``splitup.protocol``, from below: each may import those before it.
PROTOCOL = ("committee", "planning", "execution", "snapshots", "settlement", "member", "membership")

# The only places that may import a library.
OWNERS = {
    "web3": {"splitup/chain"},
    "boto3": {"splitup/storage/s3_client.py"},
    "botocore": {
        *("splitup/storage/s3_client.py", "splitup/devnet/s3_server.py"),
        "oracle/splitup_oracle/gateway/presigning.py",
    },
    "sqlite3": {"splitup/storage/journal.py"},
    "aiohttp": {
        *("splitup/net", "splitup/storage", "splitup/chain/rpc.py", "node", "oracle"),
        "splitup/core/http_session.py",
        *("extras/gateway", "extras/private/splitup_private/adapters/host.py"),
        "extras/private/splitup_private/split/connection.py",
    },
    "tinygrad": {
        *("splitup/backend", "splitup/cpu", "deploy"),
        "node/splitup_node/worker/process.py",
    },
    "solcx": {"contracts"},
    "prometheus_client": {"splitup/net/metrics.py"},
    "pyseccomp": {"splitup/sandbox"},
    "opentelemetry": {"splitup/client/telemetry.py"},
    "tokenizers": {"splitup/client/text/tokenizer_process.py"},
    "llguidance": {"splitup/client/text/grammar_process.py"},
    "grpc": {"extras/speculation"},
    "google": {"extras/speculation"},
    "PIL": {"splitup/client/images/image_reader.py"},
    "tenseal": {"extras/private/splitup_private/adapters/ckks.py"},
    "torch": {"examples", "extras/edge"},
    "torchao": {"extras/edge"},
    "executorch": {"extras/edge"},
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
    "splitup_edge": ROOT / "extras/edge/splitup_edge",
    "splitup_gateway": ROOT / "extras/gateway/splitup_gateway",
    "splitup_private": ROOT / "extras/private/splitup_private",
    "splitup_speculation": ROOT / "extras/speculation/splitup_speculation",
}
# What a package may import besides itself. The market's packages import no extra, the three
# services not each other; an extra may use the packages of the programs that it adds commands to.
USES = {
    "splitup": set(),
    "splitup_node": {"splitup"},
    "splitup_oracle": {"splitup"},
    "splitup_deploy": {"splitup"},
    "splitup_edge": {"splitup", "splitup_deploy"},
    "splitup_gateway": {"splitup", "splitup_node", "splitup_private"},
    "splitup_private": {"splitup", "splitup_deploy"},
    "splitup_speculation": {"splitup"},
}


def iter_sources() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield package, path


def get_module(package: str, path: Path) -> str:
    parts = (package, *path.relative_to(PACKAGES[package]).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {get_module(package, path) for package, path in iter_sources()}


@functools.cache  # most of the time of these tests is Python's parser
def find_imports(path: Path) -> frozenset[str]:
    return frozenset(iter_imports(path))


def iter_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                # `from splitup.core import limits` imports the module splitup.core.limits
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down(package: str) -> None:
    for path in sorted(PACKAGES[package].rglob("*.py")):
        check_imports(package, path)


def check_imports(package: str, path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    own = path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py")
    for module in find_imports(path):
        head, *rest = module.split(".")
        if head in OWNERS:
            allowed = any(relative.startswith(owner) for owner in OWNERS[head])
            assert allowed, f"{relative} imports {head}; only {sorted(OWNERS[head])} may"
        if head in PACKAGES and head != package:
            assert head in USES[package], f"{relative} imports {head}, which {package} may not use"
        if package == head == "splitup" and rest and own in ALLOWED:
            allowed = rest[0] == own or rest[0] in ALLOWED[own]
            assert allowed, f"{relative} imports {module}; {own} may not import {rest[0]}"


def test_no_module_is_in_a_circle() -> None:
    imports = {
        get_module(package, path): find_imports(path) & MODULES for package, path in iter_sources()
    }
    reached: dict[str, set[str]] = defaultdict(set)
    for module in imports:
        waiting = [module]
        while waiting:
            for other in imports[waiting.pop()] - reached[module]:
                reached[module].add(other)
                waiting.append(other)
    circles = {
        tuple(sorted((a, b))) for a in imports for b in reached[a] if a != b and a in reached[b]
    }
    assert not circles


def test_protocol_is_sans_io_and_imports_down() -> None:
    for path in (ROOT / "splitup/protocol").rglob("*.py"):
        found = {module.split(".")[0] for module in find_imports(path)} & FORBIDDEN_IN_PROTOCOL
        assert not found, f"{path.name} imports {sorted(found)}: decide purely, act outside"
        room = path.relative_to(ROOT / "splitup/protocol").parts[0].removesuffix(".py")
        for module in find_imports(path):
            if module.startswith("splitup.protocol."):
                other = module.split(".")[2]
                is_below = PROTOCOL.index(other) <= PROTOCOL.index(room)
                assert is_below, f"protocol/{room} imports {module}, which is above it"


def test_a_public_class_name_stands_for_one_thing() -> None:
    names = Counter(
        name
        for _, path in iter_sources()
        for name in re.findall(r"^class ([A-Za-z]\w*)\b.*[(:\[]", path.read_text(), re.M)
    )
    repeated = sorted(name for name, count in names.items() if count > 1)
    assert not repeated, "find names that say what these are"


def test_s97_one_place_makes_http_sessions() -> None:
    """That of ``splitup.core.http_session``, which follows no redirects."""
    clients = {"requests", "urllib3", "httpx", "http.client", "urllib.request", "websockets"}
    makers = set()
    for _, path in iter_sources():
        other = [name for name in find_imports(path) if any(is_part(name, one) for one in clients)]
        assert not other, f"{path} imports {other}: use splitup.core.http_session.open_session"
        if "aiohttp" in find_imports(path) and any(iter_sessions(ast.parse(path.read_text()))):
            makers.add(path.relative_to(ROOT).as_posix())
    assert makers == {"splitup/core/http_session.py"}, "call open_session there"


def is_part(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def iter_sessions(tree: ast.AST) -> Iterator[str]:
    """Return by which names a module makes sessions of aiohttp, or requests without one."""
    makers = {"ClientSession", "request"}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known = {alias.asname or alias.name for alias in node.names if alias.name == "aiohttp"}
            yield from called & {f"{name}.{maker}" for name in known for maker in makers}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiohttp"):
            names = {alias.asname or alias.name for alias in node.names if alias.name in makers}
            yield from called & names


@pytest.mark.parametrize(
    "source",
    [
        "import aiohttp as a\na.ClientSession()",
        "import aiohttp\nasync def f():\n    async with aiohttp.request('GET', 'http://a'): pass",
        "from aiohttp.client import ClientSession as S\nS()",
    ],
)
def test_s97_a_session_is_found_by_any_name(source: str) -> None:
    assert list(iter_sessions(ast.parse(source)))
    assert not list(iter_sessions(ast.parse("import aiohttp\naiohttp.web.Response()")))


def test_no_wait_swallows_its_cancellation() -> None:
    """Python 3.11's ``asyncio.wait_for`` returns normally if its task ended just before."""
    for _, path in iter_sources():
        assert "asyncio.wait_for(" not in path.read_text("utf-8"), f"{path}: use asyncio.timeout"


def test_nothing_unpickles() -> None:
    for _, path in iter_sources():
        assert "pickle" not in {module.split(".")[0] for module in find_imports(path)}, path
