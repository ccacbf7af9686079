"""``SplitUp``: a user's connection to the network, and the four things it does.

``execute`` runs a model once over arrays, ``session`` keeps an execution open for step after step,
``generate`` does that for text, ``receipt`` tells what the chain says about any of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from tokenizers import Tokenizer

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.chain.deployment import Deployment
from splitup.chain.market import fetch_economics
from splitup.client.execution.private_session import PrivateSession
from splitup.client.execution.private_tasks import ClientPrograms
from splitup.client.execution.session import Session
from splitup.client.generation import (
    DecoderName,
    Token,
    check_decoder,
    encode_prompt,
    generate_tokens,
    get_chunk,
    get_text_info,
    load_tokenizer,
    make_decoder,
)
from splitup.client.inputs import check_execution_id, format_usdc, parse_usdc, split_steps
from splitup.client.market.payments import ensure_balance, fetch_price
from splitup.client.market.plan_check import CheckedPlan, check_choices, fetch_plan, fetch_snapshot
from splitup.client.market.plan_requests import Wanted, fetch_certificate
from splitup.client.market.receipts import refund, wait_for_receipt
from splitup.client.market.settlement_evidence import fetch_evidence
from splitup.client.market.signed_request import (
    fetch_signed_plan,
    is_frozen,
    make_request,
    wait_until_open,
)
from splitup.client.outcome import Array, PendingReceipt, Receipt, Result, make_trace
from splitup.config import NetworkConfig
from splitup.core import limits, tuning
from splitup.core.codec import encode_canonical
from splitup.core.errors import ChainRejected, ExecutionFailed, InvalidInput, Refused, SplitUpError
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import compute_execution_id
from splitup.decode.lookahead import LookaheadOptions
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.step import Decoder
from splitup.graph.manifest import Manifest, get_blob_key, load_manifest
from splitup.messages.plans import PlanCertificate, Request
from splitup.messages.verification import Evidence
from splitup.net.http import SignedClient
from splitup.net.object_transfer import get_object
from splitup.protocol.committee.certificates import CommitteeView
from splitup.storage.gateway_client import GatewayClient
from splitup.storage.task_cache import Cache

if TYPE_CHECKING:
    from splitup.client.sync import SyncSplitUp

DEFAULT_DEADLINE_S: Final = 30.0
RECEIPT_TIMEOUT_S: Final = 120.0
_REFUND_PATIENCE_S: Final = 20.0  # after the deadline: some blocks, and the refund's own

Usdc = float | int | str | Decimal

_MODEL_ID: Final = re.compile(r"0x[0-9a-f]{64}\Z")
_NO_DIGEST: Final = "0x" + "00" * 32  # a session's inputs do not exist yet when it is requested

_log = logging.getLogger("splitup.client")


@dataclass(frozen=True, slots=True)
class Model:
    """A registered model; ``name`` is what the user called it by."""

    name: str
    model_id: str
    manifest: Manifest


class SplitUp:
    """A connection as one user. Use ``async with SplitUp.connect(config) as net``."""

    def __init__(self, config: NetworkConfig, identity: Identity) -> None:
        self.config = config
        self._identity = identity
        self._http = SignedClient(identity)
        self._gateway = GatewayClient(config.gateway_urls, identity, http=self._http)
        self._models: dict[str, Model] = {}
        self._tokenizers: dict[str, bytes] = {}
        self._programs: dict[str, ClientPrograms] = {}  # by model
        self._thread = ThreadPoolExecutor(1, "splitup-private")  # runs what models leave to us
        self._loading = asyncio.Lock()
        self._request_blocks: dict[str, int] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._chain: Chain | None = None
        self._committees: Committees  # of the chain, once it is open
        self._funding = asyncio.Lock()
        self._reserved = 0  # micro-USDC of requests that are not in a block yet
        self._signing = asyncio.Lock()  # one signed request at a time, until the chain holds it
        self._openings: dict[str, asyncio.Task[bool]] = {}  # executions: is it on chain?

    @classmethod
    def connect(cls, config: NetworkConfig | Path | str | None = None) -> Self:
        """Return a connection that opens on ``async with``.

        ``config`` is a NetworkConfig, or the path of a ``network.json`` or of the directory that
        holds one; without it ``$SPLITUP_HOME`` and ``./.splitup`` are tried. Raises
        ConfigurationError.
        """
        if not isinstance(config, NetworkConfig):
            config = NetworkConfig.load(None if config is None else Path(config))
        return cls(config, config.load_user())

    @staticmethod
    def connect_sync(config: NetworkConfig | Path | str | None = None) -> SyncSplitUp:
        """Return the same connection for code without ``await``; it opens on ``with``."""
        from splitup.client.sync import SyncSplitUp  # it is built on this module

        return SyncSplitUp(config)

    async def __aenter__(self) -> Self:
        deployment = Deployment.load(self.config.deployment)
        self._chain = await Chain.connect(
            self.config.rpc_url, deployment, private_key=self._identity.private_key
        )
        self._committees = Committees(self._chain)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def drain(self) -> None:
        """Wait until nodes and store have all that ended executions still owe them."""
        await wait_stored(self._background, quiet_s=tuning.STORE_QUIET_S)

    async def close(self) -> None:
        """Finish storing what executions left behind, then close every connection."""
        openings = list(self._openings.values())
        for opening in openings:
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)
        try:
            await self.drain()
        finally:  # also when nobody wants to wait any longer
            left = tuple(self._background)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._thread.shutdown(wait=False, cancel_futures=True)
            await self._http.close()
            if self._chain is not None:
                await self._chain.close()

    @property
    def address(self) -> str:
        """The user's account."""
        return self._identity.address

    @property
    def chain(self) -> Chain:
        """The chain behind the connection; raises InvalidInput before ``async with``."""
        if self._chain is None:
            raise InvalidInput(
                "the connection is not open; use: async with SplitUp.connect() as net"
            )
        return self._chain

    # ---- money ---------------------------------------------------------------------------------

    async def deposit(self, amount_usdc: Usdc) -> None:
        """Move USDC from the wallet into the market, so that executions find it there."""
        amount = parse_usdc(amount_usdc, name="amount_usdc")
        async with self._funding:
            balance = await self.chain.call("market", "balanceOf", self.address)
            await ensure_balance(self.chain, self._identity, balance + amount)

    async def freeze(self, seconds: float) -> int:
        """Keep the balance in the market for signed requests; return until when (Unix time).

        From then on executions start without waiting for a block. Until its end the balance can
        neither be withdrawn nor spent otherwise; the contract allows 30 days.
        """
        until = (await self.chain.fetch_head()).timestamp + int(np.ceil(seconds))
        await self.chain.send("market", "freeze", until)
        return until

    async def quote(self, model: str, *, steps: int = 1) -> int:
        """Return what an execution locks at most, in micro-USDC."""
        found = await self.fetch_model(model)
        return await fetch_price(self.chain, found.model_id, steps)

    # ---- running -------------------------------------------------------------------------------

    async def execute(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        max_price_usdc: Usdc | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Result:
        """Run a model, by name or id, and return its complete, verified result.

        Arrays have their port's shape, or a leading axis of n steps; then so do the outputs.
        Raises InvalidInput before any money moves, and ExecutionFailed, after the refund, naming
        the task and node at fault.
        """
        found = await self.fetch_model(model)
        steps = split_steps([port.spec for port in found.manifest.user_inputs], inputs)
        is_private = found.manifest.client is not None  # even a digest of a short text tells it
        started = time.monotonic()
        async with self.session(
            model,
            steps=len(steps.rows),
            max_price_usdc=max_price_usdc,
            deadline_s=deadline_s,
            inputs_digest=None if is_private else _digest_inputs(steps.rows),
        ) as session:
            futures = [session.submit(row) for row in steps.rows]
            rows = [await future for future in futures]
            elapsed_s = time.monotonic() - started
            traces = await session.finish()
        names = [port.name for port in found.manifest.user_outputs]
        stack = {name: np.stack([row[name] for row in rows]) for name in names}
        return Result(
            execution_id=session.execution_id,
            outputs=stack if steps.stacked else rows[0],
            trace=make_trace(found.manifest, traces),
            plan=session.plan,
            manifest=found.manifest,
            elapsed_s=elapsed_s,
            nodes=session.executors,
            receipt=self.pending_receipt(session.execution_id),
        )

    @asynccontextmanager
    async def session(
        self,
        model: str,
        *,
        steps: int,
        max_price_usdc: Usdc | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        inputs_digest: str | None = None,
    ) -> AsyncIterator[Session]:
        """Open an execution of up to ``steps`` steps; leaving the block ends it and pays what ran.

        When it fails, leaving the block waits for the refund and raises ExecutionFailed. A block
        left by an exception of its own, or cancelled, pays the steps submitted so far.
        """
        session = await self._open(model, steps, max_price_usdc, deadline_s, inputs_digest)
        try:
            yield session
            await session.finish()
        except ExecutionFailed as error:
            await session.close()
            raise await self._recover(session.plan.request, error) from None
        except BaseException:
            self._close_later(session)
            raise
        self._close_later(session)

    def _close_later(self, session: Session) -> None:
        task = asyncio.create_task(_store_and_close(session), name=session.execution_id)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        decoder: DecoderName = "sequential",
        lookahead: LookaheadOptions | None = None,
        max_price_usdc: Usdc | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        on_session: Callable[[Session], None] | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Yield the tokens that continue ``prompt``; equal arguments give equal text.

        Sampling happens here: the nodes see tokens and positions, never the seed. The text ends
        before the first string of ``stop``. ``decoder`` changes the number of steps, not the text;
        ``lookahead`` are its options, refused when the model's steps have no room for them.
        More tokens than the model has positions for are refused before anything is paid.
        ``on_session`` is called with the session before the first token. Raises like ``execute``.
        Close the iterator (or exhaust it) to end and pay the execution.
        """
        machine, tokenizer = await self.make_decoder(
            model,
            prompt,
            max_tokens=max_tokens,
            sampler=Sampler(temperature, seed, top_k, top_p),
            decoder=decoder,
            lookahead=lookahead,
        )
        async with self.session(
            model,
            steps=machine.max_steps,
            max_price_usdc=max_price_usdc,
            deadline_s=deadline_s,
        ) as session:
            if on_session is not None:
                on_session(session)
            async for token in generate_tokens(session, machine, tokenizer, stop=stop):
                yield token

    async def make_decoder(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        sampler: Sampler,
        decoder: DecoderName = "sequential",
        lookahead: LookaheadOptions | None = None,
    ) -> tuple[Decoder, Tokenizer]:
        """Return the decoder and the tokenizer that ``generate`` would use."""
        check_decoder(decoder, lookahead)
        found = await self.fetch_model(model)
        info = get_text_info(found.manifest, model)
        tokenizer = load_tokenizer(await self._fetch_tokenizer(found))
        request = TextRequest(
            prompt=tuple(encode_prompt(tokenizer, prompt)),
            sampler=sampler,
            max_tokens=max_tokens,
            eos_ids=frozenset(info.eos_ids),
            vocab=info.vocab,
            context=info.context,
            chunk=get_chunk(found.manifest),
        )
        return make_decoder(decoder, request, lookahead), tokenizer

    async def fetch_model(self, model: str) -> Model:
        """Return a registered model by name or id; raise InvalidInput when there is none."""
        if model not in self._models:
            model_id = model if _MODEL_ID.match(model) else await self._resolve(model)
            try:
                data = await self._gateway.fetch_manifest(model_id)
            except Refused as error:
                raise InvalidInput(
                    f"there is no model '{model}' ({error}); see what there is: splitup-deploy list"
                ) from None
            manifest = await asyncio.to_thread(load_manifest, data)
            self._models[model] = Model(model, model_id, manifest)
        return self._models[model]

    async def _resolve(self, name: str) -> str:
        try:
            return str(await self.chain.call("models", "modelByName", name))
        except ChainRejected as error:
            if error.error_name != "UnknownName":
                raise
        raise InvalidInput(f"there is no model '{name}'; see what there is: splitup-deploy list")

    async def _fetch_tokenizer(self, model: Model) -> bytes:
        info = get_text_info(model.manifest, model.name)
        if info.tokenizer_digest not in self._tokenizers:
            grants = await self._gateway.model_grants(model.model_id)
            self._tokenizers[info.tokenizer_digest] = await get_object(
                self._http.session,
                grants.find("GET", get_blob_key(info.tokenizer_digest)),
                max_bytes=info.tokenizer_bytes,
                expected_digest=info.tokenizer_digest,
            )
        return self._tokenizers[info.tokenizer_digest]

    # ---- what became of it ---------------------------------------------------------------------

    async def receipt(self, execution_id: str, *, timeout_s: float = RECEIPT_TIMEOUT_S) -> Receipt:
        """Wait until the chain has settled or refunded an execution; fetch an own one's money.

        Raises InvalidInput, when the id is none, and Unavailable.
        """
        check_execution_id(execution_id)
        return await wait_for_receipt(
            self.chain,
            execution_id,
            from_block=self._request_blocks.get(execution_id, 0),
            timeout_s=timeout_s,
            account=self.address,
        )

    async def evidence(self, receipt: Receipt) -> Evidence:
        """Return which tasks of a settled execution were drawn, and the verdicts, checked."""
        committee = await self._committees.fetch_of(receipt.execution_id)
        return await fetch_evidence(self._http, committee, receipt)

    async def check_plan(self, execution_id: str) -> CheckedPlan:
        """Compute every choice of an execution's plan anew; anybody's execution will do."""
        check_execution_id(execution_id)
        committee = await self._committees.fetch_of(execution_id)
        certificate = await fetch_plan(self._http, committee, execution_id)
        request = certificate.plan.request
        snapshot, model, economics = await asyncio.gather(
            fetch_snapshot(self._http, committee, request.snapshot_root),
            self.fetch_model(request.model_id),
            fetch_economics(self.chain),
        )
        return await asyncio.to_thread(
            check_choices, certificate, snapshot, model.manifest, economics
        )

    def pending_receipt(self, execution_id: str) -> PendingReceipt:
        """Return the receipt as something to ``await`` when it is wanted."""
        return PendingReceipt(execution_id, lambda: self.receipt(execution_id))

    # ---- one execution -------------------------------------------------------------------------

    async def _open(
        self,
        name: str,
        steps: int,
        max_price_usdc: Usdc | None,
        deadline_s: float,
        inputs_digest: str | None,
    ) -> Session:
        if not 1 <= steps <= limits.MAX_STEPS:
            raise InvalidInput(f"an execution has 1 to {limits.MAX_STEPS} steps, not {steps}")
        limit = (
            None if max_price_usdc is None else parse_usdc(max_price_usdc, name="max_price_usdc")
        )
        model = await self.fetch_model(name)
        programs = await self._load_programs(model)
        chain = self.chain
        price, _ = await asyncio.gather(
            fetch_price(chain, model.model_id, steps), self._committees.fetch_current()
        )
        if limit is not None and limit < price:
            raise InvalidInput(
                f"max_price_usdc is {format_usdc(limit)} and {steps} steps of model {name} cost "
                f"up to {format_usdc(price)}; raise it to that"
            )
        async with self._funding:  # executions started together share one balance
            await ensure_balance(chain, self._identity, self._reserved + price)
            head = await chain.fetch_head()  # whose time the deadline is in
            self._reserved += price  # until the request is in a block, see _request
        nonce = secrets.randbits(53)  # as many bits as canonical JSON holds
        deployment = chain.deployment
        wanted = Wanted(
            execution_id=compute_execution_id(
                deployment.chain_id, deployment.market, self.address, nonce
            ),
            chain_id=deployment.chain_id,
            market=deployment.market,
            model_id=model.model_id,
            client=self.address,
            client_key=self._identity.signing_key_hex,
            steps=steps,
            max_price_micro_usdc=price,
            deadline=int(chain.clock.now_s()) + int(np.ceil(deadline_s)),
            task_count=len(model.manifest.tasks),
        )
        ends = asyncio.get_running_loop().time() + wanted.deadline - chain.clock.now_s()
        digest = inputs_digest or _NO_DIGEST
        try:
            signs = await is_frozen(chain, self.address, wanted.deadline, head.timestamp)
        except BaseException:
            self._reserved -= price
            raise
        request = self._request_signed if signs else self._request
        certificate = await request(wanted, nonce, digest, deadline_s)
        session = self._make_session(certificate, model, programs, ends)
        session.open()
        return session

    def _make_session(
        self,
        certificate: PlanCertificate,
        model: Model,
        programs: ClientPrograms | None,
        deadline: float,
    ) -> Session:
        parties = self._identity, self._http, self._gateway
        if programs is None:
            return Session(
                certificate,
                model.manifest,
                *parties,
                deadline=deadline,
                allow_loopback=self.config.allow_loopback,
            )
        return PrivateSession(
            certificate,
            model.manifest,
            *parties,
            deadline=deadline,
            allow_loopback=self.config.allow_loopback,
            programs=programs,
            thread=self._thread,
        )

    async def _load_programs(self, model: Model) -> ClientPrograms | None:
        """Return the tasks that the model leaves to us, None for most; compiles them once.

        Before any money moves: raises StorageUnavailable, PeerFault, InvalidModel.
        """
        manifest = model.manifest
        if manifest.client is None:
            return None
        async with self._loading:
            if model.model_id not in self._programs:
                cache = Cache(self.config.cache_directory, self._gateway, self._http.session)
                files = [
                    await cache.fetch_program(model.model_id, task)
                    for task in manifest.client.tasks
                ]
                loop = asyncio.get_running_loop()
                self._programs[model.model_id] = await loop.run_in_executor(
                    self._thread, ClientPrograms, manifest, files
                )
            return self._programs[model.model_id]

    async def _request(
        self,
        wanted: Wanted,
        nonce: int,
        inputs_digest: str,
        deadline_s: float,
    ) -> PlanCertificate:
        """Send the request and return its certificate, listening before the block is mined."""
        listening = asyncio.create_task(
            fetch_certificate(
                self._http, self._committee_source(wanted), wanted, timeout_s=deadline_s
            )
        )
        try:
            mined = await self.chain.send(
                "market",
                "requestExecution",
                wanted.model_id,
                wanted.steps,
                inputs_digest,
                wanted.client_key,
                wanted.max_price_micro_usdc,
                wanted.deadline,
                nonce,
            )
        except BaseException:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            raise
        finally:
            self._reserved -= wanted.max_price_micro_usdc
        self._request_blocks[wanted.execution_id] = mined.block_number or 0
        try:
            return await listening
        except SplitUpError as error:
            failed = ExecutionFailed(
                f"execution {wanted.execution_id} got no plan: {error}",
                execution_id=wanted.execution_id,
            )
            raise await self._recover(wanted, failed) from None

    def _committee_source(self, wanted: Wanted) -> Callable[[], Awaitable[CommitteeView]]:
        return partial(
            self._committees.fetch_of, wanted.execution_id, max_age_s=tuning.COMMITTEE_REFRESH_S
        )

    async def _request_signed(
        self,
        wanted: Wanted,
        nonce: int,
        inputs_digest: str,
        deadline_s: float,
    ) -> PlanCertificate:
        """Sign the request and return its certificate; no block is waited for."""
        await self._signing.acquire()
        try:
            head, signed = await asyncio.gather(
                self.chain.fetch_head(),
                make_request(self.chain, self._identity, wanted, nonce, inputs_digest),
            )
        except BaseException:
            self._reserved -= wanted.max_price_micro_usdc
            self._signing.release()
            raise
        self._request_blocks[wanted.execution_id] = head.number
        opening = asyncio.create_task(self._follow_opening(wanted))
        self._openings[wanted.execution_id] = opening
        try:
            return await fetch_signed_plan(
                self._http, self._committee_source(wanted), wanted, signed, timeout_s=deadline_s
            )
        except InvalidInput:
            opening.cancel()  # members that refuse it promise nothing
            raise
        except SplitUpError as error:
            failed = ExecutionFailed(
                f"execution {wanted.execution_id} got no plan: {error}",
                execution_id=wanted.execution_id,
            )
            raise await self._recover(wanted, failed) from None

    async def _follow_opening(self, wanted: Wanted) -> bool:
        try:
            return await wait_until_open(self.chain, wanted)
        finally:
            self._reserved -= wanted.max_price_micro_usdc
            self._signing.release()
            self._openings.pop(wanted.execution_id, None)

    async def _recover(self, wanted: Wanted | Request, error: ExecutionFailed) -> ExecutionFailed:
        """Fetch the money of a failed execution back; return the error that says so."""
        opening = self._openings.get(wanted.execution_id)
        if opening is not None and not await opening:
            return ExecutionFailed(
                f"{error}; the chain never held it, so nothing was locked",
                execution_id=error.execution_id,
                task=error.task,
                node=error.node,
                refunded_micro_usdc=0,
            )
        locked = format_usdc(wanted.max_price_micro_usdc)
        wait_s = max(0.0, wanted.deadline - self.chain.clock.now_s()) + _REFUND_PATIENCE_S
        skew = self.chain.clock.describe_skew()
        back: int | None = None
        try:
            back = await refund(self.chain, wanted.execution_id, patience_s=wait_s)
            money = (
                f"{format_usdc(back)} came back to your balance in the market"
                if back is not None
                else f"the {locked} locked for it are not back yet; see: "
                f"splitup receipt {wanted.execution_id}"
            )
        except SplitUpError as problem:
            money = f"the {locked} locked for it could not be fetched back yet ({problem})"
        return ExecutionFailed(
            f"{error}; {money}" + (f"; {skew}" if skew else ""),
            execution_id=error.execution_id,
            task=error.task,
            node=error.node,
            refunded_micro_usdc=back,
        )


async def wait_stored(storing: Collection[asyncio.Task[None]], *, quiet_s: float) -> None:
    """Wait for tasks that store; say after ``quiet_s`` which executions, the tasks' names, wait."""
    storing = tuple(storing)  # a set loses its tasks as they end
    if not storing:
        return
    _, waiting = await asyncio.wait(storing, timeout=quiet_s)
    if waiting:
        ids = ", ".join(task.get_name() for task in waiting)
        _log.warning("waiting until the store has the inputs of %s; Ctrl-C leaves", ids)
    await asyncio.gather(*storing, return_exceptions=True)


async def _store_and_close(session: Session) -> None:
    try:
        await session.leave()
        await session.store_inputs()
    except SplitUpError as error:
        _log.warning("inputs of %s were not stored: %s", session.execution_id, error)
    finally:
        await session.close()


def _digest_inputs(rows: Sequence[Mapping[str, Array]]) -> str:
    """Return a digest of all inputs, port by port, for the chain's record."""
    digests = {
        name: hashlib.sha256(b"".join(np.asarray(row[name]).tobytes() for row in rows)).hexdigest()
        for name in sorted(rows[0])
    }
    return "0x" + hashlib.sha256(encode_canonical(digests)).hexdigest()
