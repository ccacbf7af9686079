"""The storage gateway's HTTP server.

A gateway has no state that matters: what it grants follows from the chain's committee, the model's
manifest and the request (``splitup_oracle.gateway.access``), so that any number of gateways can
serve one bucket. Every answer and refusal is a line in the audit log.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import web

from splitup.chain.client import Chain
from splitup.core import limits, tuning
from splitup.core.errors import (
    BadSignature,
    PeerFault,
    Refused,
    SplitUpError,
    StorageUnavailable,
)
from splitup.core.latest import Latest
from splitup.crypto.jws import ReplayCache
from splitup.graph.manifest import Manifest
from splitup.messages import api
from splitup.messages.completions import SignedTakeover
from splitup.messages.network import Deployment, NetworkDescription
from splitup.messages.plans import Plan, PlanCertificate
from splitup.messages.storage import (
    ExecutionRequest,
    Grant,
    Grants,
    LogRequest,
    ModelRequest,
    UploadAnswer,
    UploadRequest,
    VerificationRequest,
)
from splitup.net.http import SignedClient
from splitup.net.http_server import (
    Server,
    add_routes,
    get_admission,
    make_app,
    read_signed,
    serve_app,
)
from splitup.net.metrics import serve_metrics
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.storage.gateway_client import recover_account
from splitup_oracle.config import GatewayConfig, GatewayPolicy
from splitup_oracle.gateway.access import (
    Right,
    check_upload,
    compute_execution_rights,
    compute_log_rights,
    compute_model_rights,
    compute_verification_rights,
    refuse,
)
from splitup_oracle.gateway.audit_log import AuditLog
from splitup_oracle.gateway.presigning import Presigner
from splitup_oracle.gateway.quota import LogQuota, UploadQuota
from splitup_oracle.gateway.sources import ChainView, ObjectView

_log = logging.getLogger("splitup.gateway")
_MODEL_ID: Final = re.compile(r"0x[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A reply; ``subject`` and the numbers of grants go to the audit log."""

    subject: str
    body: UploadAnswer | Grants

    def count(self) -> dict[str, int]:
        methods = [grant.method for grant in self.body.grants]
        return {method: methods.count(method) for method in ("GET", "PUT")}


class Gateway:
    """Answers requests for grants.

    ``audience`` is the URL that requests must be signed for, and ``network`` what those who join
    are told; both are None until the port is known. ``now_s`` is the wall clock.
    """

    def __init__(
        self,
        *,
        chain: ChainView,
        objects: ObjectView,
        presigner: Presigner,
        audit: AuditLog,
        policy: GatewayPolicy,
        audience: str | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._chain = chain
        self._objects = objects
        self._presigner = presigner
        self._audit = audit
        self._policy = policy
        self.audience = audience
        self.network: NetworkDescription | None = None
        self._now_s = now_s
        self._replays = ReplayCache()
        self._log_quota = LogQuota()
        self._upload_quota = UploadQuota(policy.upload_bytes_per_day)
        self._executor_maps: Latest[str, ExecutorMap] = Latest(  # with takeovers only
            tuning.MAX_CACHED_CERTIFICATES
        )

    def make_app(self) -> web.Application:
        """Return the HTTP application with all routes."""
        app = make_app()
        add_routes(
            app,
            api.ROUTES["gateway"],
            {
                api.PING: self._handle_ping,
                api.NETWORK: self._handle_network,
                api.MANIFEST: self._handle_manifest,
                api.UPLOAD_REQUEST: self._answer("upload", api.UPLOAD_REQUEST, self._grant_upload),
                api.MODEL_REQUEST: self._answer("model", api.MODEL_REQUEST, self._grant_model),
                api.EXECUTION_REQUEST: self._answer(
                    "execution", api.EXECUTION_REQUEST, self._grant_execution
                ),
                api.LOG_REQUEST: self._answer("log", api.LOG_REQUEST, self._grant_log),
                api.VERIFICATION_REQUEST: self._answer(
                    "verification", api.VERIFICATION_REQUEST, self._grant_verification
                ),
            },
        )
        return app

    # ---- routes --------------------------------------------------------------------------------

    async def _handle_ping(self, _request: web.Request) -> web.Response:
        return web.json_response({})

    async def _handle_network(self, _request: web.Request) -> web.Response:
        if self.network is None:
            raise Refused("the gateway is starting", status=503)
        return web.Response(body=self.network.canonical_bytes(), content_type="application/json")

    async def _handle_manifest(self, request: web.Request) -> web.Response:
        model_id = request.match_info["model_id"]
        if not _MODEL_ID.match(model_id):
            raise Refused("a model id is '0x' and 64 lower-case hexadecimal digits", status=404)
        return web.Response(
            body=await self._objects.fetch_manifest_file(model_id),
            content_type="application/json",
            headers={"Cache-Control": "public, max-age=31536000, immutable"},
        )

    def _answer(
        self,
        what: str,
        route: api.Route[api.M],
        grant: Callable[[api.M, str], Awaitable[_Answer]],
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return the handler of a route; ``what`` is its name in the audit log."""

        async def handle(request: web.Request) -> web.Response:
            now_s = int(self._now_s())
            claims, _ = await read_signed(request, route, audience=self.audience or "", now_s=now_s)
            line = {"at_s": round(self._now_s(), 3), "what": what, "key": claims.issuer}
            try:
                with self._replays.once(claims, now_s):
                    answer = await grant(route.parse(claims.body), claims.issuer)
            except SplitUpError as error:
                self._audit.append(line | {"refused": str(error)[: tuning.MAX_ERROR_CHARS]})
                raise
            get_admission(request).vouch(request, claims.issuer)
            self._audit.append(line | {"subject": answer.subject, **answer.count()})
            return web.Response(body=answer.body.canonical_bytes(), content_type="application/json")

        return handle

    # ---- grants --------------------------------------------------------------------------------

    async def _grant_upload(self, request: UploadRequest, key: str) -> _Answer:
        rights = [check_upload(entry) for entry in request.objects]
        account = await self._find_uploader(key, request.proof)
        present = await self._objects.find_present(rights)
        missing = [right for right in rights if right.key not in present]
        self._upload_quota.take(account, missing, self._now_s())
        grants = await self._presign(missing)
        body = UploadAnswer(grants=grants, present=tuple(sorted(present)))
        return _Answer(f"{len(rights)} objects", body)

    async def _find_uploader(self, key: str, proof: str) -> str:
        """Return a key's account; refuse one with neither a deposit nor a stake.

        Storage is not free, and an account has as many keys as it likes. With ``open_uploads``
        nobody needs an account, and each key stands for itself.
        """
        if self._policy.open_uploads:
            return key
        try:
            account = recover_account(key, proof)
        except BadSignature as error:
            raise refuse(f"the proof does not link the key to an account: {error}") from None
        least = self._policy.upload_deposit_micro_usdc
        if not await self._chain.has_funds(account, least):
            raise refuse(
                f"{account} has neither {least} micro-USDC in the market nor a node's stake; "
                "deposit first"
            )
        return account

    async def _grant_model(self, request: ModelRequest, key: str) -> _Answer:
        model_id = request.model_id
        if not self._policy.open_models:
            await self._check_reader(key, request.proof)
        manifest = await self._objects.fetch_manifest(model_id)
        rights = compute_model_rights(model_id, manifest)
        return _Answer(model_id, Grants(grants=await self._presign(rights)))

    async def _check_reader(self, key: str, proof: str) -> None:
        """Refuse a key that is no node's, unless its account could pay a node's stake.

        Such an account may test the tasks before it stakes (``splitup-node audit --dry-run``).
        """
        if await self._chain.is_node_key(key):
            return
        try:
            account = recover_account(key, proof) if proof else ""
        except BadSignature as error:
            raise refuse(f"the proof does not link the key to an account: {error}") from None
        if not account or not await self._chain.could_stake(account):
            raise refuse(
                f"the key {key} is not that of an active node, and {account or 'its account'} does "
                "not hold the USDC for a node's stake; register and stake first, or send it USDC"
            )

    async def _grant_execution(self, request: ExecutionRequest, key: str) -> _Answer:
        certificate = request.certificate
        plan = certificate.plan
        if self._now_s() >= plan.request.deadline:
            raise refuse(f"the deadline of execution {plan.request.execution_id} has passed")
        manifest = await self._check_part(certificate, key)
        executor_map = self._update_executor_map(plan, ())
        rights = compute_execution_rights(plan, manifest, key, executor_map)
        grants = await self._presign(rights, self._compute_expiry_s(plan.request.deadline))
        return _Answer(plan.request.execution_id, Grants(grants=grants))

    async def _grant_log(self, request: LogRequest, key: str) -> _Answer:
        plan = request.certificate.plan
        expiry_s = min(tuning.LOG_URL_S, self._compute_expiry_s(plan.request.deadline))
        manifest = await self._check_part(request.certificate, key)
        executor_map = self._update_executor_map(plan, request.takeovers)
        rights = compute_log_rights(plan, manifest, key, request, executor_map)
        self._log_quota.take(rights, plan, manifest)
        grants = await self._presign(rights, expiry_s)
        return _Answer(plan.request.execution_id, Grants(grants=grants))

    async def _check_part(self, certificate: PlanCertificate, key: str) -> Manifest:
        """Return the manifest of a plan that is valid and names ``key``."""
        plan = certificate.plan
        keys = {entry.signing_key for entry in plan.nodes} | {plan.request.client_key}
        if key not in keys:  # before the signatures: strangers must not cost a pairing
            raise refuse(f"the key {key} has no part in execution {plan.request.execution_id}")
        await self._check_certificate(certificate)
        await self._check_open(plan.request.execution_id)
        await self._check_standing(key, [n.node for n in plan.nodes if n.signing_key == key])
        return await self._objects.fetch_manifest(plan.request.model_id)

    def _update_executor_map(
        self, plan: Plan, takeovers: tuple[SignedTakeover, ...]
    ) -> ExecutorMap:
        """Return the executor of each task, by all takeovers that this gateway has been shown."""
        execution_id = plan.request.execution_id
        executor_map = self._executor_maps.get(execution_id) or ExecutorMap(plan)
        try:
            changed = [executor_map.apply(signed) for signed in takeovers]
        except PeerFault as error:
            raise refuse(f"a takeover is not valid: {error}") from None
        if any(changed):
            self._executor_maps[execution_id] = executor_map
        return executor_map

    async def _check_open(self, execution_id: str) -> None:
        """Refuse an execution that is settled or refunded."""
        if (end := await self._chain.find_end(execution_id)) is not None:
            raise Refused(f"execution {execution_id} is {end}", status=410)  # for ever

    async def _check_standing(self, key: str, nodes: list[str]) -> None:
        """Refuse the key of a node that has left or was slashed below the least stake."""
        for node in nodes:
            if not await self._chain.has_standing(node):
                raise refuse(f"the key {key} is that of {node}, which has left or lost stake")

    async def _grant_verification(self, asked: VerificationRequest, key: str) -> _Answer:
        order = asked.order
        request = order.certificate.plan.request
        committee = await self._chain.fetch_committee(request.execution_id)
        is_member = committee.member_with_key(key) is not None
        entries = [shown.entry for shown in order.snapshot.entries]
        nodes = [entry.node for entry in entries if entry.signing_key == key]
        if not is_member and not nodes:
            raise refuse(f"the key {key} is not that of a node that the order shows")
        expiry_s = self._compute_expiry_s(request.deadline, limits.VERIFICATION_GRACE_S)
        committee = await self._check_certificate(order.certificate)
        await self._check_open(request.execution_id)
        await self._check_standing(key, nodes)
        try:
            await self._chain.check_draw(order.draw, committee)
        except PeerFault as error:
            raise refuse(f"the draw is not valid: {error}") from None
        manifest = await self._objects.fetch_manifest(request.model_id)
        rights = compute_verification_rights(asked, manifest, key, is_member=is_member)
        self._log_quota.take(rights, order.certificate.plan, manifest)
        return _Answer(
            f"{request.execution_id} task {order.task}",
            Grants(grants=await self._presign(rights, expiry_s)),
        )

    async def _check_certificate(self, certificate: PlanCertificate) -> CommitteeView:
        try:
            return await self._chain.check_certificate(certificate)
        except PeerFault as error:
            raise refuse(f"the plan's certificate is not valid: {error}") from None

    def _compute_expiry_s(self, deadline: int, grace_s: int = limits.GRANT_GRACE_S) -> int:
        """Return how long URLs of an execution are valid: until deadline and grace, 1 h at most."""
        left_s = int(deadline + grace_s - self._now_s())
        if left_s < 1:
            raise refuse("the execution's deadline and grace period have passed")
        return min(left_s, limits.PRESIGN_EXPIRY_S)

    async def _presign(
        self, rights: list[Right], expiry_s: int = limits.PRESIGN_EXPIRY_S
    ) -> tuple[Grant, ...]:
        sign = partial(self._presigner.presign, expires_s=expiry_s)
        # on a thread: signing thousands of URLs takes most of a second
        return tuple(await asyncio.to_thread(list, map(sign, rights)))


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that listens at ``server.url``. Close it."""

    server: Server
    _objects: ObjectView
    _opened: AsyncExitStack

    async def check_store(self) -> None:
        """Log a warning when the store does not answer, or refuses the gateway's signatures."""
        try:
            await self._objects.find_present((Right("GET", "nothing-is-here", None),))
        except StorageUnavailable as error:
            _log.warning("%s; check s3_endpoint, bucket and credentials", error)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        await self._opened.aclose()


async def start_gateway(config: GatewayConfig) -> RunningGateway:
    """Open chain, store and port; raise ConfigurationError, ChainUnavailable."""
    deployment = Deployment.load(config.deployment)
    presigner = Presigner.open(config.s3_endpoint, config.bucket, config.credentials)
    async with AsyncExitStack() as opened:
        audit = opened.enter_context(closing(AuditLog(config.data_dir / "audit.jsonl")))
        chain = await opened.enter_async_context(await Chain.connect(config.rpc_url, deployment))
        http = await opened.enter_async_context(SignedClient())
        objects = ObjectView(presigner, http)
        gateway = Gateway(
            chain=ChainView(chain, deployment),
            objects=objects,
            presigner=presigner,
            audit=audit,
            policy=config,
        )
        server = await serve_app(gateway.make_app(), config.listen_host, config.listen_port)
        opened.push_async_callback(server.close)
        gateway.audience = config.public_url or server.url
        gateway.network = NetworkDescription(
            contracts=deployment,
            gateway_urls=config.join_gateway_urls or (gateway.audience,),
            rpc_url=config.join_rpc_url,
        )
        return RunningGateway(server, objects, opened.pop_all())


async def run_gateway(config: GatewayConfig) -> None:
    """Serve until cancelled."""
    running = await start_gateway(config)
    _log.info("the storage gateway listens on %s", running.server.url)
    try:
        await running.check_store()
        async with serve_metrics(config.metrics, tuple):  # the requests, which all servers count
            await asyncio.Event().wait()
    finally:
        await running.close()
