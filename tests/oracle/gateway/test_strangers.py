"""What strangers' requests leave behind at a gateway: nothing that a customer needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest
from botocore.credentials import Credentials
from splitup_oracle.gateway.audit_log import AuditLog
from splitup_oracle.gateway.http_gateway import Gateway, Policy
from splitup_oracle.gateway.presigning import Presigner
from splitup_oracle.gateway.sources import ChainView, ObjectView

from splitup.core import tuning
from splitup.core.errors import Refused
from splitup.crypto.keys import Identity, generate_identity
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.storage import ModelRequest
from splitup.net.http import SignedClient, serve_app
from tests.builders import make_chain_manifest

AUDIENCE = "http://gateway"
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


async def ask(url: str, who: Identity, token: str = "") -> str:
    """Send a request, and return the token that it was sent with."""
    async with SignedClient(who) as http:
        token = token or http.sign(api.MODEL_REQUEST, AUDIENCE, REQUEST)
        await http.post_token(api.MODEL_REQUEST, url, token)
        return token


async def test_s11_strangers_do_not_fill_the_memory_of_used_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MAX_REPLAY_ENTRIES", 20)
    nodes = [generate_identity() for _ in range(2)]
    facts = Facts(nodes)
    gateway = Gateway(
        chain=cast(ChainView, facts),
        objects=cast(ObjectView, facts),
        presigner=Presigner("http://store", "bucket", Credentials("id", "secret")),
        audit=AuditLog(tmp_path / "audit.jsonl"),
        policy=Policy(),
        audience=AUDIENCE,
        now_s=time.time,
    )
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
