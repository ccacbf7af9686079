"""The storage gateway without HTTP: grants presigned in this process for a real store."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitup_oracle.gateway.access import Right, compute_execution_rights
from splitup_oracle.gateway.presigning import Presigner

from splitup.graph.manifest import Manifest
from splitup.messages.base import CLIENT
from splitup.messages.completions import SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.storage import Grant, Grants, LogName, LogWrite
from splitup.protocol.execution.takeovers import ExecutorMap


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """Where a store is, and who may write to it."""

    endpoint_url: str
    bucket: str
    credentials: str


@functools.cache  # as in the real gateway
def _open_presigner(place: ObjectPlace) -> Presigner:
    return Presigner.open(place.endpoint_url, place.bucket, Path(place.credentials))


class LocalGateway:
    """The methods of a GatewayClient that ``open_logs`` uses, for the holder of one Ed25519 key.

    Log objects are granted to everybody, because nobody in the test bed is hostile.
    """

    def __init__(
        self, place: ObjectPlace, signing_key: str, manifests: Mapping[str, Manifest]
    ) -> None:
        self._presigner = _open_presigner(place)
        self._signing_key = signing_key
        self._manifests = manifests  # by model

    async def execution_grants(self, certificate: PlanCertificate) -> Grants:
        """Return grants for the large tensors of an execution, as the gateway does."""
        return await asyncio.to_thread(self._presign_execution, certificate)

    def _presign_execution(self, certificate: PlanCertificate) -> Grants:
        plan, sign = certificate.plan, self._presigner
        manifest = self._manifests[plan.request.model_id]
        rights = compute_execution_rights(plan, manifest, self._signing_key, ExecutorMap(plan))
        return Grants(
            grants=tuple(
                sign.presign(Right("PUT", right.key, right.length_bytes or 0))
                if right.method == "PUT"
                else sign.presign(Right("GET", right.key, right.length_bytes))
                for right in rights
            )
        )

    async def log_grants(
        self,
        certificate: PlanCertificate,
        writes: Sequence[LogWrite],
        reads: Sequence[LogName],
        takeovers: Sequence[SignedTakeover] = (),
    ) -> Grants:
        """Return a grant for everything that is asked for; signing is off the loop, as there."""
        return await asyncio.to_thread(self._presign, certificate, writes, reads)

    def _presign(
        self, certificate: PlanCertificate, writes: Sequence[LogWrite], reads: Sequence[LogName]
    ) -> Grants:
        plan, sign = certificate.plan, self._presigner
        grants: list[Grant] = []
        for write in writes:
            author = plan.request.client if write.task == CLIENT else plan.tasks[write.task][0]
            name = LogName.of(write.task, write.port, author, write.number, apart=write.apart)
            key, length = name.get_key(plan.request.execution_id), write.length_bytes
            grants.append(sign.presign(Right("PUT", key, length, write.sha256)))
        for read in reads:
            grants.append(sign.presign(Right("GET", read.get_key(plan.request.execution_id), None)))
        return Grants(grants=tuple(grants))
