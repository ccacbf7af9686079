"""The facts that the gateway reads from chain and object store, with caches of limited size."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

import aiohttp

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.chain.market import Status
from splitup.client.market.receipts import fetch_status
from splitup.core import limits, tuning
from splitup.core.errors import (
    ChainUnavailable,
    PeerFault,
    Refused,
    StorageUnavailable,
    name_server,
)
from splitup.core.latest import Latest
from splitup.graph.manifest import Manifest, get_manifest_key
from splitup.graph.manifest_rules import check_refused, load_manifest
from splitup.messages.network import Deployment
from splitup.messages.plans import PlanCertificate
from splitup.messages.verification import Draw
from splitup.net.http import SignedClient
from splitup.net.object_transfer import get_object
from splitup.protocol.committee.certificates import CommitteeView
from splitup_oracle.gateway.access import Right
from splitup_oracle.gateway.presigning import Presigner

_PAGE: Final = 100  # nodes per call
_PROBES: Final = 16  # objects looked up at once
_PROBE_EXPIRY_S: Final = 60


_V = TypeVar("_V")


class Lately(Generic[_V]):
    """A cache of values by name, which expire after ``tuning.COMMITTEE_CACHE_S``.

    While the chain is unavailable the last value is used, or ``unknown`` if there is none, so that
    executions go on. The least recently used entries are dropped first.
    """

    def __init__(self, look: Callable[[str], Awaitable[_V]], unknown: _V) -> None:
        self._look = look
        self._unknown = unknown
        self._known: Latest[str, tuple[float, _V]] = Latest(tuning.MAX_CACHED_STANDINGS)

    async def fetch(self, name: str) -> _V:
        """Return the value of ``name``."""
        at_s, value = self._known.get(name, (-math.inf, self._unknown))
        if time.monotonic() - at_s > tuning.COMMITTEE_CACHE_S:
            asked_s = time.monotonic()
            try:
                value = await self._look(name)
            except ChainUnavailable:
                return value
            at_s = asked_s
        self._known[name] = (at_s, value)
        return value


class ChainView:
    """The committee, nodes, executions and parameters on chain, at most a few seconds old."""

    def __init__(self, chain: Chain, deployment: Deployment) -> None:
        self._chain = chain
        self._market = deployment.market.lower()
        self._committees = Committees(chain)
        self._node_keys: tuple[float, frozenset[str]] | None = None
        self._reading_keys = asyncio.Lock()
        self._strangers = asyncio.Semaphore(tuning.STRANGER_LOOKUPS)
        # how an execution ended ("settled", "refunded"), None while it has not
        self.find_end = Lately(self._look_end, None).fetch
        # whether a node is registered and has its full stake; a node that is leaving has both: it
        # has to finish its work, and its stake is locked
        self.has_standing = Lately(self._look_standing, True).fetch
        # whether an account holds the USDC for the least stake of a node
        self.could_stake = Lately(self._look_wallet, False).fetch

    async def fetch_committee(self, execution_id: str) -> CommitteeView:
        """Return the committee that an execution belongs to, at most a few seconds old."""
        return await self._committees.fetch_of(execution_id)

    async def check_certificate(self, certificate: PlanCertificate) -> CommitteeView:
        """Check a certificate; return its execution's committee, raise PeerFault."""
        if certificate.plan.request.market != self._market:
            raise PeerFault("it is for another deployment's market")
        return await self._committees.check_certificate(certificate)

    async def check_draw(self, draw: Draw, committee: CommitteeView) -> None:
        """Check that a draw is that committee's; raise PeerFault."""
        await self._committees.check_draw(draw, committee)

    async def is_node_key(self, key: str) -> bool:
        """Return whether an active node signs with ``key``."""
        for max_age_s in (tuning.COMMITTEE_CACHE_S, tuning.COMMITTEE_REFRESH_S):
            if key in await self._fetch_node_keys(max_age_s):
                return True
        return False

    async def has_funds(self, account: str, micro_usdc: int) -> bool:
        """Return whether an account has this balance in the market, or is an active node."""
        async with self._strangers:
            if await self._chain.call("market", "balanceOf", account) >= micro_usdc:
                return True
            return bool(await self._chain.call("nodes", "isActive", account))

    async def _look_wallet(self, account: str) -> bool:
        async with self._strangers:
            least = await self._chain.call("nodes", "minStake", 1)
            return bool(await self._chain.call("usdc", "balanceOf", account) >= least)

    async def _look_end(self, execution_id: str) -> str | None:
        status = await fetch_status(self._chain, execution_id)
        return status.name.lower() if status in (Status.SETTLED, Status.REFUNDED) else None

    async def _look_standing(self, node: str) -> bool:
        entry = await self._chain.call("nodes", "nodeOf", node)
        if not entry["signingKey"].strip("0x"):
            return False
        return bool(
            entry["active"]
            or entry["stake"] >= await self._chain.call("nodes", "minStake", entry["vramGb"])
        )

    async def _fetch_node_keys(self, max_age_s: float) -> frozenset[str]:
        """Return all nodes' keys; who comes while they are read waits for the same answer."""
        if (known := self._find_node_keys(max_age_s)) is not None:
            return known
        async with self._reading_keys:
            if (known := self._find_node_keys(max_age_s)) is not None:
                return known
            keys: set[str] = set()
            count = await self._chain.call("nodes", "nodeCount")
            for start in range(0, count, _PAGE):
                page = await self._chain.call("nodes", "nodesPage", start, _PAGE)
                keys.update(node["signingKey"] for node in page if node["active"])
            self._node_keys = (time.monotonic(), frozenset(keys))
            return self._node_keys[1]

    def _find_node_keys(self, max_age_s: float) -> frozenset[str] | None:
        known = self._node_keys
        return known[1] if known and time.monotonic() - known[0] <= max_age_s else None


class _StoreSilent(StorageUnavailable):
    """The store accepts connections, and answers nothing."""


class ObjectView:
    """The objects in the store, read with presigned URLs."""

    def __init__(self, presigner: Presigner, http: SignedClient) -> None:
        self._presigner = presigner
        self._http = http
        # of manifests
        self._files: Latest[str, bytes] = Latest(tuning.MAX_CACHED_MANIFEST_FILES)
        self._loading = asyncio.Semaphore(_PROBES)  # files, each in memory until it is sent
        self._manifests: Latest[str, Manifest] = Latest(tuning.MAX_CACHED_MANIFESTS)
        self._parsing = asyncio.Semaphore(1)  # more would only hold up the event loop more often
        self._probes = asyncio.Semaphore(_PROBES)

    async def fetch_manifest_file(self, model_id: str) -> bytes:
        """Return the bytes of a manifest; raise Refused (404) when nobody has uploaded it.

        They have the model's digest, and whoever asks for them checks their rules.
        """
        data = self._files.get(model_id)
        if data is None:
            async with self._loading:
                data = self._files.get(model_id) or await self._load_file(model_id)
        self._files[model_id] = data
        return data

    async def fetch_manifest(self, model_id: str) -> Manifest:
        """Return a checked manifest; raise Refused (404) when nobody has uploaded it.

        Raises InvalidModel for one that breaks a rule, which is found out once.
        """
        check_refused(model_id)
        manifest = self._manifests.get(model_id)
        if manifest is None:
            data = await self.fetch_manifest_file(model_id)
            async with self._parsing:
                manifest = self._manifests.get(model_id)
                if manifest is None:
                    manifest = await asyncio.to_thread(load_manifest, data)
        self._manifests[model_id] = manifest
        return manifest

    async def find_present(self, rights: Sequence[Right]) -> frozenset[str]:
        """Return the keys under which the store has an object of the right's length."""
        lengths = await asyncio.gather(*(self._probe_length(right.key) for right in rights))
        return frozenset(
            right.key
            for right, length in zip(rights, lengths, strict=True)
            if length == right.length_bytes
        )

    async def _load_file(self, model_id: str) -> bytes:
        key = get_manifest_key(model_id)
        if await self._probe_length(key) is None:
            raise Refused(f"no model {model_id} is stored here; check its id", status=404)
        return await get_object(
            self._http.session,
            self._presigner.presign(Right("GET", key, None), expires_s=_PROBE_EXPIRY_S),
            max_bytes=limits.MAX_MANIFEST_BYTES,
            expected_digest=model_id[2:],
        )

    async def _probe_length(self, key: str) -> int | None:
        """Return the size of an object, None when there is none; repeat what fails for a moment."""
        pause_s = tuning.RPC_BACKOFF_S
        for _ in range(tuning.RPC_TRIES - 1):
            try:
                return await self._probe_once(key)
            except _StoreSilent:
                raise
            except StorageUnavailable:
                pass
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return await self._probe_once(key)

    async def _probe_once(self, key: str) -> int | None:
        """Ask for an object's first byte; raise _StoreSilent before who asked gives up."""
        grant = self._presigner.presign(Right("GET", key, None), expires_s=_PROBE_EXPIRY_S)
        store = f"the object store at {name_server(grant.url)}"
        timeout = aiohttp.ClientTimeout(total=tuning.QUIET_S, sock_connect=tuning.HTTP_CONNECT_S)
        try:
            async with (
                self._probes,
                self._http.session.get(
                    grant.url,
                    headers={"Range": "bytes=0-0"},
                    timeout=timeout,
                ) as response,
            ):
                status, content_range = response.status, response.headers.get("Content-Range", "")
        except TimeoutError:
            raise _StoreSilent(
                f"{store} does not answer (nothing within {tuning.QUIET_S:g} s)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise StorageUnavailable(
                f"{store} does not answer ({type(error).__name__}); check that it runs"
            ) from None
        if status == 404:
            return None
        total = content_range.rpartition("/")[2]
        if status != 206 or not total.isdecimal():
            raise StorageUnavailable(f"{store} answered {status} to a probe of {key}")
        return int(total)
