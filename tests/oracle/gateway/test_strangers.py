"""What strangers' requests leave behind at a gateway: nothing that a customer needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web
from botocore.credentials import Credentials
from splitup_oracle.config import GatewayPolicy
from splitup_oracle.gateway import sources
from splitup_oracle.gateway.access import Right
from splitup_oracle.gateway.audit_log import AuditLog
from splitup_oracle.gateway.http_gateway import Gateway
from splitup_oracle.gateway.presigning import Presigner
from splitup_oracle.gateway.sources import ChainView, ObjectView

from splitup.core import tuning
from splitup.core.errors import Refused, StorageUnavailable, Throttled
from splitup.crypto.keys import Identity, generate_identity
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.storage import ModelRequest, UploadObject, UploadRequest
from splitup.net.http import SignedClient
from splitup.net.http_server import serve_app
from splitup.storage.gateway_client import prove_account
from tests.builders import make_chain_manifest

AUDIENCE = "http://gateway"
PRESIGNER = Presigner("http://store", "bucket", Credentials("id", "secret"))
MANIFEST = make_chain_manifest(2)
REQUEST = ModelRequest(model_id=MANIFEST.model_id, proof="")


class Facts:
    """A chain on which only the nodes' keys are registered, and a store with one model."""

    def __init__(self, nodes: list[Identity]) -> None:
        self._keys = {node.signing_key_hex for node in nodes}

    async def is_node_key(self, key: str) -> bool:
        return key in self._keys

    async def fetch_manifest(self, model_id: str) -> Manifest:
        return MANIFEST

    async def has_funds(self, account: str, micro_usdc: int) -> bool:
        return True

    async def find_present(self, rights: Sequence[Right]) -> frozenset[str]:
        return frozenset()


async def ask(url: str, who: Identity, token: str = "") -> str:
    """Send a request, and return the token that it was sent with."""
    async with SignedClient(who) as http:
        token = token or http.sign(api.MODEL_REQUEST, AUDIENCE, REQUEST)
        await http.post_token(api.MODEL_REQUEST, url, token)
        return token


def make_gateway(
    facts: Facts, objects: ObjectView, folder: Path, policy: GatewayPolicy | None = None
) -> Gateway:
    return Gateway(
        chain=cast(ChainView, facts),
        objects=objects,
        presigner=PRESIGNER,
        audit=AuditLog(folder / "audit.jsonl"),
        policy=policy or GatewayPolicy(),
        audience=AUDIENCE,
        now_s=time.time,
    )


async def test_s34_who_asks_for_a_manifest_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may ask, and any object may be stored: it is passed on, and nothing is parsed."""
    loaded = []

    async def load(model_id: str) -> bytes:
        loaded.append(model_id)
        return b"no manifest " + model_id.encode()

    def parse(data: bytes) -> Manifest:
        raise AssertionError(f"{data!r} was parsed")

    monkeypatch.setattr(tuning, "MAX_CACHED_MANIFEST_FILES", 2)
    monkeypatch.setattr(sources, "load_manifest", parse)
    async with SignedClient() as http:
        objects = ObjectView(PRESIGNER, http)
        monkeypatch.setattr(objects, "_load_file", load)
        server = await serve_app(make_gateway(Facts([]), objects, tmp_path).make_app(), "::1", 0)
        try:
            ids = [f"0x{number:064x}" for number in range(3)]
            for model_id in (*ids, ids[2], ids[1], ids[0], ids[1]):
                url = api.MANIFEST.url(server.url, model_id=model_id)
                found = await http.get_bytes(url, max_bytes=99)
                assert found == b"no manifest " + model_id.encode()
        finally:
            await server.close()
    assert loaded == [*ids, ids[0]]  # the latest two are kept


async def test_s11_strangers_do_not_fill_the_memory_of_used_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MAX_REPLAY_ENTRIES", 20)
    nodes = [generate_identity() for _ in range(2)]
    facts = Facts(nodes)
    gateway = make_gateway(facts, cast(ObjectView, facts), tmp_path)
    server = await serve_app(gateway.make_app(), "127.0.0.1", 0)
    try:
        for _ in range(30):
            with pytest.raises(Refused, match="is not that of an active node"):
                await ask(server.url, generate_identity())
        token = await ask(server.url, nodes[0])
        with pytest.raises(Refused, match="used before"):
            await ask(server.url, nodes[0], token)
        assert len(gateway._replays) == 1
    finally:
        await server.close()


async def test_s119_an_account_stores_no_more_by_having_many_keys(tmp_path: Path) -> None:
    """Keys are free, and an account's key links as many of them to it as it likes."""
    facts, account, other = Facts([]), generate_identity(), generate_identity()
    policy = GatewayPolicy(upload_bytes_per_day=100)
    gateway = make_gateway(facts, cast(ObjectView, facts), tmp_path, policy)
    server = await serve_app(gateway.make_app(), "127.0.0.1", 0)

    async def upload(owner: Identity, number: int) -> None:
        digest = f"{number:064x}"
        blob = UploadObject(key=f"blobs/{digest}", length_bytes=60, sha256=digest)
        async with SignedClient(key := generate_identity()) as http:
            linked = replace(owner, signing_key_hex=key.signing_key_hex)
            body = UploadRequest(proof=prove_account(linked), objects=(blob,))
            await http.post_signed(api.UPLOAD_REQUEST, server.url, AUDIENCE, body)

    try:
        await upload(account, 1)
        with pytest.raises(Throttled, match="40 that are left today"):
            await upload(account, 2)
        await upload(other, 2)
    finally:
        await server.close()


async def test_a_store_that_answers_nothing_is_asked_once_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "QUIET_S", 0.3)
    asked, gone = 0, asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await gone.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/{path:.*}", hang)
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        async with SignedClient() as http:
            presigner = Presigner(server.url, "bucket", Credentials("id", "secret"))
            with pytest.raises(StorageUnavailable, match=f"store at {server.url} does not answer"):
                await ObjectView(presigner, http)._probe_length("key")
    finally:
        gone.set()
        await server.close()
    assert asked == 1


@pytest.mark.parametrize("failures", [1, tuning.RPC_TRIES])
async def test_a_probe_that_the_store_fails_for_a_moment_is_repeated(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RPC_BACKOFF_S", 0.001)
    answers = [503] * failures + [206]

    async def answer(_: web.Request) -> web.Response:
        status = answers.pop(0)
        return web.Response(status=status, headers={"Content-Range": "bytes 0-0/7"}, body=b"x")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        async with SignedClient() as http:
            presigner = Presigner(server.url, "bucket", Credentials("id", "secret"))
            probe = ObjectView(presigner, http)._probe_length("key")
            if failures < tuning.RPC_TRIES:
                assert await probe == 7
            else:
                with pytest.raises(StorageUnavailable, match="answered 503"):
                    await probe
                assert answers == [206]
    finally:
        await server.close()
