"""The files of a private model: ranges, caching, and nothing but what devices need."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from gateway_tests.split.local_nodes import LocalNodes, serve_split
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKeys
from splitup_private.split.messages import PATH

from splitup.graph.manifest_rules import load_manifest
from tests.builders import HANG_S


@asynccontextmanager
async def fetching(nodes: LocalNodes) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with serve_split(nodes) as url, aiohttp.ClientSession() as http:
        yield http, f"{url}{PATH}/files/"


async def test_every_file_of_the_client_s_part_can_be_checked_by_its_name(
    nodes: LocalNodes,
) -> None:
    async with fetching(nodes) as (http, url):
        async with http.get(url + nodes.cut.manifest.model_id[2:]) as answer:
            manifest = load_manifest(await answer.read())
        assert manifest.model_id == nodes.cut.manifest.model_id and manifest.client is not None
        wanted = {task.task_id for task in manifest.client.tasks}
        wanted |= {task.weights_digest for task in manifest.client.tasks}
        for digest in {*wanted, manifest.text.tokenizer_digest}:
            async with http.get(url + digest) as answer:
                assert answer.status == 200 and "immutable" in answer.headers["Cache-Control"]
                data = await answer.read()
                assert hashlib.sha256(data).hexdigest() == digest
                assert answer.headers["ETag"] == f'"{digest}"'


async def test_no_other_file_is_sent(nodes: LocalNodes) -> None:
    async with fetching(nodes) as (http, url):
        for task in nodes.cut.manifest.tasks:  # of the nodes
            for digest in (task.task_id, task.weights_digest):
                async with http.get(url + digest) as answer:
                    assert (await answer.json())["code"] == "file_unknown"
        for name in ("manifest", "..%2fmanifest", "%2fetc%2fpasswd", "0" * 64, "%00"):
            async with http.get(url + name) as answer:
                assert answer.status == 404


@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ("bytes=0-", 0, None),
        ("bytes=1000-", 1_000, None),
        ("bytes=10-19", 10, 20),
        ("bytes=-5", -5, None),
        ("bytes=5-99999999999", 5, None),
    ],
)
async def test_a_transfer_is_resumed_by_a_range(
    nodes: LocalNodes, wanted: str, start: int, end: int | None
) -> None:
    digest, path = list(nodes.files.items())[-1]
    data = path.read_bytes()
    async with fetching(nodes) as (http, url):
        async with http.get(url + digest, headers={"Range": wanted}) as answer:
            assert await answer.read() == data[start:end]
            if len(data[start:end]) < len(data):
                assert answer.status == 206
                assert answer.headers["Content-Range"].endswith(f"/{len(data)}")


async def test_conditions_and_ranges_that_cannot_be(nodes: LocalNodes) -> None:
    digest, path = list(nodes.files.items())[-1]
    size = path.stat().st_size
    cases = [
        ({"Range": f"bytes={size}-"}, 416, None),
        ({"Range": "bytes=9-2"}, 200, size),
        ({"Range": "lines=1-2"}, 200, size),
        ({"Range": "bytes=0-1,4-5"}, 200, size),
        ({"Range": "bytes=" + "9" * 5_000 + "-"}, 200, size),
        ({"Range": "bytes=0-1", "If-Range": '"another"'}, 200, size),
        ({"Range": "bytes=0-1", "If-Range": f'"{digest}"'}, 206, 2),
        ({"If-None-Match": f'"{digest}"'}, 304, 0),
    ]
    async with fetching(nodes) as (http, url):
        for headers, status, length in cases:
            async with http.get(url + digest, headers=headers) as answer:
                body = await answer.read()
                assert answer.status == status, headers
                assert length is None or len(body) == length
        async with http.head(url + digest) as answer:
            assert answer.status == 200 and answer.content_length == size


async def test_readers_that_stall_take_no_place_for_long(
    nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PARALLEL", 1), ("WAIT_S", 0.05), ("STALL_S", 0.5)):
        monkeypatch.setattr(f"splitup_gateway.split.files.{name}", value)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(64 * 2**20)  # more than sockets hold
    nodes.files["f" * 64] = large
    async with fetching(nodes) as (http, url), asyncio.timeout(HANG_S):
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1)
        writer.write(f"GET {parts.path}{'f' * 64} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert await reader.readexactly(12) == b"HTTP/1.1 200"  # and nothing more
        small = url + nodes.cut.manifest.model_id[2:]
        async with http.get(small) as answer:
            assert answer.status == 503 and (await answer.json())["code"] == "too_many_files"
        while True:
            async with http.get(small) as answer:
                if answer.status == 200:
                    break
        writer.transport.abort()


async def test_s56_a_key_that_reads_slowly_keeps_files_from_no_other(
    nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PARALLEL", 3), ("WAIT_S", 0.05)):
        monkeypatch.setattr(f"splitup_gateway.split.files.{name}", value)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(64 * 2**20)  # more than sockets hold
    nodes.files["f" * 64] = large
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    slow, other = keys.create("slow"), keys.create("other")
    readers: list[asyncio.StreamReader] = []
    writers: list[asyncio.StreamWriter] = []
    async with (
        serve_split(nodes, access=Access(keys)) as url,
        aiohttp.ClientSession() as http,
        asyncio.timeout(HANG_S),
    ):
        parts, path = urlsplit(url), f"{PATH}/files/"
        ask = f"GET {path}{'f' * 64} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {slow}"
        for _ in range(3):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1)
            writer.write(f"{ask}\r\n\r\n".encode())
            assert await reader.readexactly(12) == b"HTTP/1.1 200"  # and nothing more
            readers.append(reader)
            writers.append(writer)
        small = f"{url}{path}{nodes.cut.manifest.model_id[2:]}"
        for secret, status in ((slow, 503), (other, 200), (other, 200)):
            async with http.get(small, headers={"Authorization": f"Bearer {secret}"}) as answer:
                assert answer.status == status
        with pytest.raises(asyncio.IncompleteReadError):  # the newest gave its place up
            await readers[2].readexactly(64 * 2**20)
        for writer in writers:
            writer.transport.abort()
    keys.close()
