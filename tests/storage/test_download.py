"""Downloads to disk from a store that aborts, corrupts data and lets URLs expire."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from splitup.core import tuning
from splitup.core.errors import PeerFault, StorageUnavailable, Unavailable
from splitup.core.http_session import open_session
from splitup.messages.storage import Grant
from splitup.net.object_transfer import NotStored
from splitup.storage import download
from splitup.storage.download import download_object, write_file
from tests.builders import HANG_S

DATA = bytes(range(256)) * 512
DIGEST = hashlib.sha256(DATA).hexdigest()


class Store:
    """Serves one object by range; ``script`` lists the faults of its answers."""

    def __init__(self) -> None:
        self.data = DATA
        self.script: list[str] = []
        self.ranges: list[str] = []
        self.grants = 0
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        asked = request.headers["Range"]
        self.ranges.append(asked)
        trouble = self.script.pop(0) if self.script else ""
        if trouble.isdecimal():
            return web.Response(status=int(trouble))
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(self.data):
            return web.Response(status=416)
        data = self.data[start:]
        if trouble == "corrupt":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if trouble == "all":
            return web.Response(body=self.data)
        shift = trouble == "shift"
        place = f"bytes {start + shift}-{len(self.data) - 1}/{len(self.data)}"
        response = web.StreamResponse(
            status=206, headers={"Content-Range": place, "Content-Length": str(len(data))}
        )
        await response.prepare(request)
        if trouble == "cut":
            await response.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.close()  # after what was written, unlike abort
        else:
            await response.write(data)
        return response

    async def grant(self, life_s: int = 60) -> Grant:
        self.grants += 1
        return Grant(
            method="GET",
            key="blob",
            url=f"http://127.0.0.1:{self.port}/blob",
            headers={},
            length_bytes=None,
            expires_at_s=int(time.time()) + life_s,
        )


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store()
    app = web.Application()
    app.router.add_get("/blob", store.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    store.port = runner.addresses[0][1]
    yield store
    await runner.cleanup()


async def fetch(store: Store, path: Path, *, life_s: int = 60, length: int = len(DATA)) -> None:
    async with open_session() as session:
        await download_object(
            session,
            await store.grant(life_s),
            store.grant,
            path,
            length_bytes=length,
            digest=DIGEST,
            deadline_s=HANG_S,
        )


def starts(store: Store) -> list[int]:
    return [int(asked.removeprefix("bytes=").removesuffix("-")) for asked in store.ranges]


async def test_f22_url_that_expires_in_mid_transfer_is_renewed_and_the_rest_fetched_by_range(
    store: Store, tmp_path: Path
) -> None:
    store.script = ["cut", "403", "cut"]
    await fetch(store, tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == DATA
    assert starts(store) == [0, len(DATA) // 2, len(DATA) // 2, len(DATA) * 3 // 4]
    assert store.grants == 2
    assert os.listdir(tmp_path) == ["blob"]


async def test_bytes_are_written_as_they_come(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_WRITE_BYTES", 1000)
    store.script = ["cut", "corrupt"]
    await fetch(store, tmp_path / "new" / "blob")
    assert (tmp_path / "new" / "blob").read_bytes() == DATA
    assert starts(store) == [0, len(DATA) // 2, 0]


async def test_f22_url_that_has_expired_already_is_not_tried(store: Store, tmp_path: Path) -> None:
    await fetch(store, tmp_path / "blob", life_s=-1)
    assert store.grants == 2 and len(store.ranges) == 1


async def test_f22_urls_that_are_always_refused_end_it(store: Store, tmp_path: Path) -> None:
    store.script = ["403"] * 10
    with pytest.raises(StorageUnavailable, match="expired or altered"):
        await fetch(store, tmp_path / "blob")
    assert len(store.ranges) == tuning.OBJECT_FETCHES + 1


async def test_what_an_earlier_process_fetched_is_not_fetched_again(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "blob.part").write_bytes(DATA[:1000])
    await fetch(store, tmp_path / "blob")
    assert starts(store) == [1000] and (tmp_path / "blob").read_bytes() == DATA


async def test_f20_store_that_is_overloaded_is_asked_again(store: Store, tmp_path: Path) -> None:
    store.script = ["503", "500", "cut", "all"]  # the last one knows no ranges
    await fetch(store, tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == DATA and store.grants == 1


async def test_f21_corrupted_object_is_fetched_anew_at_most_three_times(
    store: Store, tmp_path: Path
) -> None:
    store.script = ["corrupt", "shift"]
    await fetch(store, tmp_path / "blob")
    assert starts(store) == [0, 0, 0] and (tmp_path / "blob").read_bytes() == DATA
    (tmp_path / "blob").unlink()
    store.script, store.ranges = ["corrupt"] * 3, []
    with pytest.raises(PeerFault, match="another digest"):
        await fetch(store, tmp_path / "blob")
    assert len(store.ranges) == tuning.OBJECT_FETCHES and not (tmp_path / "blob").exists()


@pytest.mark.parametrize("length", [len(DATA) - 1, len(DATA) + 1])
async def test_f21_object_of_another_length_is_a_peers_fault(
    store: Store, tmp_path: Path, length: int
) -> None:
    with pytest.raises(PeerFault, match=f"has {len(DATA)} bytes, not {length}"):
        await fetch(store, tmp_path / "blob", length=length)


async def test_missing_object_is_said_at_once(store: Store, tmp_path: Path) -> None:
    store.script = ["404"]
    with pytest.raises(NotStored):
        await fetch(store, tmp_path / "blob")


async def test_f20_store_that_never_answers_is_given_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "DOWNLOAD_PATIENCE_S", 0.2)
    store.script = ["503"] * 1000
    with pytest.raises(StorageUnavailable, match="in time"):
        await fetch(store, tmp_path / "blob")


async def test_f23_disk_without_room_is_named_before_anything_is_fetched(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    room = tuning.DISK_RESERVE_BYTES + len(DATA)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(room, 0, room - 1))
    with pytest.raises(
        Unavailable, match=r"needs [0-9.]+ MB, and 67 MB are kept for the journal; free some space"
    ):
        await fetch(store, tmp_path / "blob")
    assert not store.ranges
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(room, 0, room))
    await fetch(store, tmp_path / "blob")


async def test_f23_disk_that_fills_up_meanwhile_gets_its_space_back(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        if offset >= 1000:
            raise OSError(28, "No space left on device")
        return real(file, data[: 1000 - offset], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(Unavailable, match="No space left on device"):
            await fetch(store, tmp_path / "blob")
    assert (tmp_path / "blob.part").stat().st_size == 0
    await fetch(store, tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == DATA


async def test_two_at_once_do_not_write_the_same_file(store: Store, tmp_path: Path) -> None:
    from splitup.storage.download import _Part

    with (
        _Part(tmp_path / "blob", len(DATA)),
        pytest.raises(Unavailable, match="another process"),
    ):
        await fetch(store, tmp_path / "blob")
    await fetch(store, tmp_path / "blob")


def test_f23_small_file_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    write_file(tmp_path / "sub" / "a", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(Unavailable, match=r"cannot write .*No space left"):
        write_file(tmp_path / "sub" / "a", b"new")
    assert os.listdir(tmp_path / "sub") == ["a"] and (tmp_path / "sub" / "a").read_bytes() == b"old"
