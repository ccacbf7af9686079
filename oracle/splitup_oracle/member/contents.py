"""Fetches snapshots and manifests that a member's machine knows only by digest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from splitup.chain.models import RecordedModels
from splitup.client.market.plan_check import fetch_snapshot
from splitup.core.errors import InvalidInput, SplitUpError, Unavailable
from splitup.graph.manifest import Manifest
from splitup.graph.manifest_rules import check_refused, load_manifest
from splitup.messages.snapshots import Snapshot
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import MemberView
from splitup.storage.gateway_client import GatewayClient

log = logging.getLogger("splitup.oracle")


class ContentFetcher:
    """Manifests come from the storage gateway and are kept as files, snapshots from members."""

    def __init__(
        self,
        http: SignedClient,
        gateway: GatewayClient,
        recorded: RecordedModels,
        directory: Path,
    ) -> None:
        self._http = http
        self._gateway = gateway
        self._recorded = recorded
        self._directory = directory

    async def fetch_manifest(self, model_id: str) -> Manifest | None:
        """Return a model's manifest, None when it is missing or not what the chain records."""
        if self._recorded.is_refused(model_id):
            return None  # do not download it again each time that an execution asks for it
        path = self._directory / f"{model_id[2:]}.json"
        try:
            check_refused(model_id)
            if path.exists():
                data = await asyncio.to_thread(path.read_bytes)
            else:
                data = await self._gateway.fetch_manifest(model_id)
            manifest = await asyncio.to_thread(load_manifest, data)
            if manifest.model_id != model_id:
                path.unlink(missing_ok=True)
                raise InvalidInput(f"the manifest kept as {path} is of another model")
            await self._recorded.check(manifest)
        except SplitUpError as error:
            log.warning("no manifest of model %s: %s", model_id, error)
            return None
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".new")
            await asyncio.to_thread(temporary.write_bytes, data)
            temporary.replace(path)
        return manifest

    async def fetch_snapshot(self, root: str, peers: Sequence[MemberView]) -> Snapshot | None:
        """Return the snapshot with this root from the first peer that has it, or None."""
        try:
            return await fetch_snapshot(self._http, peers, root)
        except Unavailable as error:
            log.info("%s", error)
            return None
