"""``Network``: a user's open connection, and what it does.

``execute`` runs a model once over arrays, ``session`` keeps an execution open for step after step,
``generate`` does that for text, ``embed`` gives vectors of texts, ``quote`` tells what these would
cost, ``receipt`` what they cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, closing
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from splitup.chain.client import Chain
from splitup.chain.committee_reader import Committees
from splitup.chain.market import fetch_economics
from splitup.client import defaults
from splitup.client.execution.opening import (
    SessionOpener,
    store_and_close,
    wait_stored,
)
from splitup.client.execution.session import Session
from splitup.client.images.image_prompts import (
    ImageFile,
    PromptImages,
    expand_prompt,
    find_pixels,
    load_image,
)
from splitup.client.images.image_reader import ImageReader
from splitup.client.inputs import (
    MICRO,
    check_execution_id,
    digest_inputs,
    format_usdc,
    parse_usdc,
    split_steps,
)
from splitup.client.market.account import MarketAccount
from splitup.client.market.holders import ask_all, is_served
from splitup.client.market.member_answers import (
    fetch_latest_snapshot,
    fetch_plan,
    fetch_snapshot,
)
from splitup.client.market.offers import Offer, fetch_offers
from splitup.client.market.payments import Quote, fetch_quote
from splitup.client.market.plan_check import CheckedPlan, check_choices
from splitup.client.market.receipts import PendingReceipt, Receipt, wait_for_receipt
from splitup.client.market.settlement_evidence import find_evidence
from splitup.client.models import Model, Models
from splitup.client.outcome import Array, Result, make_trace
from splitup.client.private.final_states import AdapterChoice, find_final_state
from splitup.client.text.drafting import LocalModel, Speculation, bring_home, check_vocabulary
from splitup.client.text.encoding import Embeddings, EncoderModel, get_encoder_info, run_texts
from splitup.client.text.generation import (
    DecoderName,
    TextModel,
    Token,
    check_decoder,
    encode_prompt,
    generate_tokens,
    get_chunk,
    get_text_info,
    make_decoder,
)
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.config import NetworkConfig
from splitup.core.background import BackgroundTasks, Closing
from splitup.core.errors import ExecutionFailed, InvalidInput
from splitup.crypto.keys import Identity
from splitup.decode.block_diffusion import DiffusionOptions
from splitup.decode.sampler import Sampler
from splitup.decode.speculation.decoder import Experience
from splitup.decode.speculation.lookahead import LookaheadOptions
from splitup.decode.step import Decoder
from splitup.decode.stop import StopFilter
from splitup.graph.manifest import Manifest, Port
from splitup.messages.network import Deployment
from splitup.messages.snapshots import ModelHolders, Snapshot
from splitup.messages.verification import Evidence
from splitup.net.http import SignedClient
from splitup.protocol.committee.certificates import CommitteeView
from splitup.storage.gateway_client import GatewayClient

Usdc = float | int | str | Decimal


class Network(Closing):
    """A connection as one user, made by ``SplitUp.connect``; open inside ``async with``."""

    def __init__(self, config: NetworkConfig, identity: Identity) -> None:
        self.config = config
        self._identity = identity
        self._http = SignedClient(identity)
        self._gateway = GatewayClient(config.gateway_urls, identity, http=self._http)
        self._background = BackgroundTasks()
        self._experiences: dict[tuple[str, str], Experience] = {}  # by names of target and draft
        self._equal_vocabularies: set[tuple[str, str]] = set()  # pairs of tokenizers, by digest
        self._chain: Chain | None = None
        self._committees: Committees  # these four exist once the connection is open
        self._account: MarketAccount
        self._opener: SessionOpener
        self._models: Models

    async def __aenter__(self) -> Self:
        deployment = Deployment.load(self.config.deployment)
        chain = await Chain.connect(
            self.config.rpc_url, deployment, private_key=self._identity.private_key
        )
        self._chain = chain
        self._committees = Committees(chain)
        self._account = MarketAccount(chain, self._identity, self._http, self._committees)
        self._models = Models(chain, self._gateway, self._http, self.config.cache_directory)
        self._opener = SessionOpener(
            chain,
            self._committees,
            self._account,
            self._models,
            (self._identity, self._http, self._gateway),
            allow_loopback=self.config.allow_loopback,
        )
        return self

    async def drain(self) -> None:
        """Wait until the nodes and the store have everything that ended executions owe them."""
        await wait_stored(self._background.tasks)

    async def close(self) -> None:
        """Finish storing the inputs of ended executions, then close every connection."""
        if self._chain is not None:
            await self._account.close()
        try:
            await self.drain()
        finally:  # also when the wait is cancelled
            await self._background.close()
            await self._http.close()
            if self._chain is not None:
                self._models.close()
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
        """Move USDC from the wallet into the market, for later executions."""
        amount = parse_usdc(amount_usdc, name="amount_usdc")
        self._check_open()
        await self._account.deposit(amount)

    async def withdraw(self, amount_usdc: Usdc | None = None) -> int:
        """Move USDC of the deposit back into the wallet, by default all; return the micro-USDC.

        What executions of the last week left locked that nobody closed is fetched back first.
        Raises InvalidInput when the deposit is smaller, and ChainRejected while it is frozen.
        """
        amount = None if amount_usdc is None else parse_usdc(amount_usdc, name="amount_usdc")
        self._check_open()
        return await self._account.withdraw(amount)

    async def freeze(self, seconds: float) -> int:
        """Reserve the balance in the market for signed requests; return until when (Unix time).

        From then on executions start without waiting for a block. Until its end the balance can
        neither be withdrawn nor spent otherwise; the contract allows 30 days.
        """
        self._check_open()
        return await self._account.freeze(seconds)

    async def quote(
        self,
        model: str,
        *,
        steps: int = 1,
        deadline_s: float | None = None,
        verify: float | str | None = None,
    ) -> Quote:
        """Return what an execution of so many steps locks, and what it costs on average.

        ``deadline_s`` and ``verify`` are as for ``session``. What nodes and committee do not earn
        comes back at the settlement.
        """
        found = await self.fetch_model(model)
        return await fetch_quote(self.chain, found.model_id, steps, verify, deadline_s)

    async def quote_generation(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = defaults.MAX_TOKENS,
        decoder: DecoderName | None = None,
        lookahead: LookaheadOptions | None = None,
        diffusion: DiffusionOptions | None = None,
        images: int = 0,
        deadline_s: float | None = None,
        verify: float | str | None = None,
    ) -> Quote:
        """Return what ``generate`` with these arguments locks, and costs for its most steps.

        ``images`` is their number; each is a step of the model's tower for images.
        """
        machine, _ = await self.make_decoder(
            model,
            prompt,
            max_tokens=max_tokens,
            sampler=Sampler(),
            decoder=decoder,
            lookahead=lookahead,
            diffusion=diffusion,
            images=images,
        )
        ask = partial(self.quote, deadline_s=deadline_s, verify=verify)
        quote = await ask(model, steps=machine.max_steps)
        if images:
            tower, _ = await self.fetch_tower(model)
            quote += await ask(tower.model_id, steps=images)
        return quote

    # ---- running -------------------------------------------------------------------------------

    async def execute(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        max_price_usdc: Usdc | None = None,
        deadline_s: float | None = None,
        verify: float | str | None = None,
    ) -> Result:
        """Run a model, by name or id, and return its complete, verified result.

        Arrays have their port's shape, or a leading axis of n steps, which the outputs have then,
        too. Raises InvalidInput before any payment, and ExecutionFailed, after the refund, naming
        the task and node at fault.
        """
        found = await self.fetch_model(model)
        steps = split_steps([port.spec for port in found.manifest.user_inputs], inputs)
        is_private = found.manifest.client is not None  # a digest of a short text would reveal it
        started = time.monotonic()
        async with self.session(
            model,
            steps=len(steps.rows),
            max_price_usdc=max_price_usdc,
            deadline_s=deadline_s,
            verify=verify,
            inputs_digest=None if is_private else digest_inputs(steps.rows),
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
        deadline_s: float | None = None,
        verify: float | str | None = None,
        inputs_digest: str | None = None,
        nodes_only: bool = False,
        adapter: AdapterChoice | None = None,
        on_failure: Callable[[ExecutionFailed], None] | None = None,
    ) -> AsyncIterator[Session]:
        """Open an execution of up to ``steps`` steps; leaving the block ends it and pays its steps.

        ``verify``: the share of its tasks that are verified, such as 0.5 or "50%"; by default, and
        at least, the network's. ``deadline_s`` counts from the request, by default 30 s and 2 s for
        each step, up to 600 s. Before it, this waits until live nodes hold the model, as long as
        some go on loading it, and logs how far they are; Unavailable says that none does.
        ``nodes_only``: the client's tasks of a private model run elsewhere, and a step's inputs and
        outputs are those of the nodes. ``adapter`` changes the final hidden states of a private
        model, encrypted at its host. When it fails, leaving the block waits for the refund and
        raises ExecutionFailed; so does entering it when there is no plan, and ``on_failure`` is
        called before that wait. When the block raises or is cancelled, the steps submitted so far
        are paid. Nodes stop what has not ended 7 s before the deadline, and are paid for the steps
        that they computed.
        """
        self._check_open()
        limit = (
            None if max_price_usdc is None else parse_usdc(max_price_usdc, name="the maximum price")
        )
        session = await self._opener.open(
            model,
            steps=steps,
            most_micro_usdc=limit,
            deadline_s=deadline_s,
            verify=verify,
            inputs_digest=inputs_digest,
            nodes_only=nodes_only,
            adapter=adapter,
            on_failure=on_failure,
        )
        try:
            yield session
            await session.finish()
        except ExecutionFailed as error:
            await session.close()
            raise await self._account.recover(session.plan.request, error) from None
        except BaseException:
            self._background.start(store_and_close(session), session.execution_id)
            raise
        self._background.start(store_and_close(session), session.execution_id)

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = defaults.MAX_TOKENS,
        temperature: float = 0.0,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        decoder: DecoderName | None = None,
        lookahead: LookaheadOptions | None = None,
        draft: str | None = None,
        diffusion: DiffusionOptions | None = None,
        max_price_usdc: Usdc | None = None,
        deadline_s: float | None = None,
        verify: float | str | None = None,
        adapter: AdapterChoice | None = None,
        images: Sequence[ImageFile] = (),
        on_images: Callable[[Result], None] | None = None,
        on_session: Callable[[Session], None] | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Yield the tokens that continue ``prompt``; equal arguments give equal text.

        Sampling happens on the client: nodes see tokens and positions, never the seed. The text
        ends before the first string of ``stop``. ``decoder`` changes the number of steps, not the
        text; ``lookahead`` are options of the lookahead decoder. Only a model that writes blocks of
        tokens is decoded by "diffusion", which is its default, and its text depends on the options
        ``diffusion``. ``draft`` is a registered model
        with the same vocabulary, small enough for this machine, which drafts for the speculative
        decoder. ``adapter`` is applied under encryption to the final hidden states of a private
        model; without its host there is no token. If it names none, the prompt's words choose one
        of the host's, or none. ``images`` are files, or the bytes of files, JPEG, PNG or WebP; each
        takes a place that the prompt has for it, as the model's chat template writes it, or they
        come before the prompt. They are an execution of their own, of the model's tower for images,
        whose price ``max_price_usdc`` includes. Raises InvalidInput, before any payment, for
        options without room in the model's steps and for more tokens than the model has positions,
        and otherwise like ``execute``. ``on_images`` is called with the result of the images'
        execution, ``on_session`` with the session before the first token. Close the iterator (or
        exhaust it) to end and pay the execution.
        """
        check_decoder(decoder, lookahead, draft, diffusion)
        ends = StopFilter(stop)
        if adapter is not None:
            adapter = await self._choose_adapter(model, prompt, adapter)
        speculation = await self.speculate(model, draft) if decoder == "speculative" else None
        machine, tokenizer = await self.make_decoder(
            model,
            prompt,
            max_tokens=max_tokens,
            sampler=Sampler(temperature, seed, top_k, top_p),
            decoder=decoder,
            lookahead=lookahead,
            speculation=speculation,
            diffusion=diffusion,
            images=len(images),
        )
        placed = None
        if images:
            seen, max_price_usdc = await self._see(
                model, images, machine.max_steps, max_price_usdc, deadline_s, verify
            )
            if on_images is not None:
                on_images(seen)
            (rows,) = seen.outputs.values()
            placed = PromptImages.place(machine.request.images, rows.reshape(-1, rows.shape[-1]))
        drafting = None if speculation is None else speculation.start(machine)
        async with self.session(
            model,
            steps=machine.max_steps,
            max_price_usdc=max_price_usdc,
            deadline_s=deadline_s,
            verify=verify,
            adapter=adapter,
        ) as session:
            if on_session is not None:
                on_session(session)
            async for token in generate_tokens(
                session, machine, tokenizer, ends=ends, drafting=drafting, images=placed
            ):
                yield token

    async def _see(
        self,
        model: str,
        images: Sequence[ImageFile],
        steps: int,
        max_price_usdc: Usdc | None,
        deadline_s: float | None,
        verify: float | str | None,
    ) -> tuple[Result, Usdc | None]:
        """Return what a model's tower makes of images, and what is left of the price.

        ``steps`` are those of the text, whose price has to be left.
        """
        found, port = await self.fetch_tower(model)
        tower = found.model_id
        _, height, width = port.shape
        pixels = []
        with closing(ImageReader()) as reader:
            for image in images:
                name, file = await asyncio.to_thread(load_image, image)
                pixels.append(await reader.read(file, height, width, name=name))
        price = left = None
        if max_price_usdc is not None:
            limit = parse_usdc(max_price_usdc, name="the maximum price")
            ask = partial(self.quote, deadline_s=deadline_s)
            own = (await ask(tower, steps=len(images))).locked_micro_usdc
            text = (await ask(model, steps=steps)).locked_micro_usdc
            if limit < own + text:
                raise InvalidInput(
                    f"the maximum price is {format_usdc(limit)}, and {len(images)} images and "
                    f"{steps} steps of model {model} cost up to {format_usdc(own + text)}; raise "
                    "it to that"
                )
            price, left = Decimal(own) / MICRO, Decimal(limit - own) / MICRO
        result = await self.execute(
            tower,
            {port.name: np.stack(pixels)},
            max_price_usdc=price,
            deadline_s=deadline_s,
            verify=verify,
        )
        return result, left

    async def fetch_tower(self, model: str) -> tuple[Manifest, Port]:
        """Return the model that makes rows of a text model's images, and its input of pixels.

        Raises InvalidInput for a model that takes no images, InvalidModel for what is no tower.
        """
        info = get_text_info((await self.fetch_model(model)).manifest, model).images
        if info is None:
            raise InvalidInput(f"model {model} takes no images; it was registered without --images")
        tower = (await self.fetch_model(info.tower)).manifest
        return tower, find_pixels(tower, info)

    async def embed(
        self,
        model: str,
        texts: Sequence[str | Sequence[int]],
        *,
        max_price_usdc: Usdc | None = None,
        deadline_s: float | None = None,
        verify: float | str | None = None,
    ) -> Embeddings:
        """Return the vectors of texts, each a string or its tokens with the special ones.

        Short texts share a step, which changes no vector. Raises InvalidInput, before any payment,
        for a model that gives no embeddings, for no texts, an empty and a too long one, and
        otherwise like ``execute``.
        """
        found = await self.fetch_encoder_model(model)
        if found.is_ranker:
            raise InvalidInput(
                f"model {model} gives no embeddings; it ranks texts, which splitup serve offers"
            )
        if not texts or isinstance(texts, str):
            raise InvalidInput("give a list of texts, at least one")
        encoded = await found.encode_all(texts)
        async with self.session(
            model,
            steps=len(found.pack(encoded)),
            max_price_usdc=max_price_usdc,
            deadline_s=deadline_s,
            verify=verify,
        ) as session:
            vectors = await run_texts(session, found, encoded)
        return Embeddings(
            vectors,
            sum(len(text.tokens) for text in encoded),
            session.execution_id,
            session.plan,
            self.pending_receipt(session.execution_id),
        )

    async def make_decoder(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        sampler: Sampler,
        decoder: DecoderName | None = None,
        lookahead: LookaheadOptions | None = None,
        speculation: Speculation | None = None,
        diffusion: DiffusionOptions | None = None,
        images: int = 0,
    ) -> tuple[Decoder, ModelTokenizer]:
        """Return the decoder and the tokenizer that ``generate`` would use, for so many images."""
        check_decoder(decoder, lookahead, diffusion=diffusion)
        found = await self.fetch_text_model(model)
        if images and isinstance(prompt, str) and (info := found.info.images) is not None:
            expand = partial(expand_prompt, prompt, found.tokenizer, info, images)
            prompt = await found.tokenizer.run(expand)
        tokens = await found.tokenizer.run(partial(encode_prompt, found.tokenizer, prompt))
        request = found.make_request(tokens, max_tokens=max_tokens, sampler=sampler, images=images)
        if decoder == "speculative" and speculation is None:
            speculation = await self.speculate(model)
        machine = make_decoder(decoder, request, lookahead, speculation, diffusion)
        return machine, found.tokenizer

    async def speculate(self, model: str, draft: str | None = None) -> Speculation:
        """Return what one text of a model drafts with: n-grams, and a registered model if named.

        Texts share what is learnt of the pair. Raises InvalidInput for a model that writes blocks
        and for a draft model with another vocabulary, and what ``open_local`` raises.
        """
        info = get_text_info((await self.fetch_model(model)).manifest, model)
        if info.diffusion is not None:
            raise InvalidInput(
                f"model {model} writes blocks of tokens; drafts are for models that write one "
                "token after the other"
            )
        local = None
        if draft is not None:
            await self.check_draft(model, draft)
            local = await self.open_local(draft)
        experience = self._experiences.setdefault((model, draft or ""), Experience())
        return Speculation(local, experience)

    async def check_draft(self, model: str, draft: str) -> None:
        """Raise InvalidInput unless a registered model has the vocabulary of another one."""
        target, found = await asyncio.gather(self.fetch_model(model), self.fetch_model(draft))
        infos = [get_text_info(each.manifest, each.name) for each in (target, found)]
        pair = infos[0].tokenizer_digest, infos[1].tokenizer_digest
        if pair[0] != pair[1] and pair not in self._equal_vocabularies:
            ours, theirs = [await self._models.fetch_tokenizer(each) for each in (target, found)]
            await asyncio.to_thread(check_vocabulary, ours.data, theirs.data, draft)
            self._equal_vocabularies.add(pair)

    async def open_local(self, model: str) -> LocalModel:
        """Return a registered text model ready to run as a whole on this machine.

        Raises InvalidInput, and InvalidModel and StorageUnavailable when it cannot be loaded.
        """
        found = await self.fetch_model(model)
        info = get_text_info(found.manifest, model)
        local = Model(found.name, found.model_id, bring_home(found.manifest, model))
        programs = await self._models.load_programs(local)
        assert programs is not None
        return LocalModel(model, local.manifest, info, programs)

    async def fetch_text_model(self, model: str) -> TextModel:
        """Return a registered text model with its tokenizer; raise InvalidInput for another one."""
        found = await self.fetch_model(model)
        info = get_text_info(found.manifest, model)
        tokenizer = await self._models.fetch_tokenizer(found)
        grammars = self._models.get_grammars(found, tokenizer)
        return TextModel(
            model, found.manifest, info, tokenizer, grammars, get_chunk(found.manifest)
        )

    async def fetch_client_files(self, model: Model) -> dict[str, Path]:
        """Return the files that a device needs of a private model, by digest; fetch missing ones.

        They are the manifest, the tokenizer, and the client's graphs and weights.
        """
        self._check_open()
        return await self._models.fetch_client_files(model)

    async def fetch_encoder_model(self, model: str) -> EncoderModel:
        """Return a registered encoder with its tokenizer; raise InvalidInput for another model."""
        found = await self.fetch_model(model)
        info = get_encoder_info(found.manifest, model)
        tokenizer = await self._models.fetch_tokenizer(found)
        return EncoderModel(model, found.manifest, info, tokenizer)

    async def fetch_model(self, model: str) -> Model:
        """Return a registered model by name or id; raise InvalidInput when there is none."""
        self._check_open()
        return await self._models.fetch(model)

    async def list_offers(self) -> list[Offer]:
        """Return the models on the market, with their prices and whether nodes hold them."""
        self._check_open()
        committee = await self.fetch_committee()
        return await fetch_offers(self.chain, self.fetch_model, self._http, committee)

    # ---- results -------------------------------------------------------------------------------

    async def receipt(self, execution_id: str, *, timeout_s: float | None = None) -> Receipt:
        """Wait until an execution is settled or refunded, and return its receipt.

        Without ``timeout_s``, it waits until 120 s after the execution's deadline.

        When an execution of this account is not settled by its deadline, this also asks for the
        refund. Raises InvalidInput for an id of another form, and Unavailable.
        """
        check_execution_id(execution_id)
        return await wait_for_receipt(
            self.chain,
            execution_id,
            from_block=self._account.get_request_block(execution_id),
            timeout_s=timeout_s,
            account=self.address,
        )

    async def evidence(self, receipt: Receipt) -> Evidence:
        """Return the drawn tasks of a settled execution and their verdicts, checked."""
        return await find_evidence(self.chain, self._committees, self._http, receipt)

    async def check_plan(self, execution_id: str) -> CheckedPlan:
        """Compute every choice of an execution's plan again, of any account's execution."""
        check_execution_id(execution_id)
        self._check_open()
        committee = await self._committees.fetch_of(execution_id)
        certificate = await fetch_plan(self._http, committee, execution_id)
        request = certificate.plan.request
        snapshot, model, economics = await asyncio.gather(
            fetch_snapshot(self._http, committee.members, request.snapshot_root),
            self.fetch_model(request.model_id),
            fetch_economics(self.chain),
        )
        return await asyncio.to_thread(
            check_choices, certificate, snapshot, model.manifest, economics
        )

    async def fetch_committee(self) -> CommitteeView:
        """Return the committee in force; raise Unavailable."""
        return await self._committees.fetch_current()

    async def fetch_snapshot(self) -> Snapshot | None:
        """Return the list of live nodes, the latest on chain; None before the committee's first.

        Raises Unavailable.
        """
        members = (await self._committees.fetch_current()).members
        return await fetch_latest_snapshot(self.chain, self._http, members)

    def pending_receipt(self, execution_id: str) -> PendingReceipt:
        """Return the receipt as an awaitable, which fetches it when it is awaited."""
        return PendingReceipt(execution_id, lambda: self.receipt(execution_id))

    async def look(self, name: str) -> ModelHolders | None:
        """Return how far live nodes have loaded a model, None when they have or nobody knows."""
        model = await self.fetch_model(name)
        committee = await self._committees.fetch_current()
        return await ask_all(self._http, committee, model.model_id, is_served)

    async def _choose_adapter(
        self, name: str, prompt: str | Sequence[int], choice: AdapterChoice
    ) -> AdapterChoice | None:
        width = find_final_state((await self.fetch_model(name)).manifest, name).shape[1]
        question = prompt if isinstance(prompt, str) else None
        return await choice.choose(self._http, question, width)

    def _check_open(self) -> None:
        """Raise InvalidInput before ``async with``."""
        _ = self.chain
