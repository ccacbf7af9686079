"""The caller's side of the workers: a target model and a draft model behind gRPC.

Several addresses may be given for each. A target worker that dies, or has lost the session, is
replaced by the next one, or begins again, and gets the whole text; a draft worker, too, and the
text goes on without drafts when there is none left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from splitup.client.network import Network
from splitup.client.outcome import Array
from splitup.client.telemetry import CallSpan
from splitup.client.text.drafting import Speculation
from splitup.client.text.generation import TextModel, Token, generate_tokens
from splitup.core.errors import InvalidInput, Refused, SplitUpError, Throttled, Unavailable
from splitup.decode.adjusted_sampler import Adjustments
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import Sampler
from splitup.decode.speculation.decoder import Experience
from splitup.decode.speculation.sources import DraftSource, TokenTree, TreeDrafts, TreeQuestion
from splitup.decode.step import StepInput, make_causal_step, read_arrays
from splitup.decode.stop import StopFilter
from splitup.graph.manifest import Manifest
from splitup_speculation import speculation_pb2 as pb
from splitup_speculation.rpc import Tls, call, open_channel
from splitup_speculation.trees import (
    HeldTokens,
    TreeSampling,
    compute_digest,
    find_path,
    read_tokens,
    read_tree,
    write_sampling,
    write_tree,
)

PING_S: Final = 5.0
_MAX_ANSWER_NODES: Final = 256
PLAIN: Final = Adjustments()
_log = logging.getLogger("splitup.workers")


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How long a worker may take, and where the spans of calls go."""

    target_timeout_s: float = 30.0
    draft_timeout_s: float = 5.0
    on_span: Callable[[CallSpan], None] | None = None


class WorkerGroup:
    """Workers of one service with one model, of which one is used at a time."""

    def __init__(self, service: str, addresses: Sequence[str], tls: Tls) -> None:
        """Raise InvalidInput for an address that cannot be used."""
        self.service = service
        self.addresses = tuple(addresses)
        self._channels = [open_channel(address, tls) for address in addresses]
        self._current = 0

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def address(self) -> str:
        """Return the address of the worker in use."""
        return self.addresses[self._current]

    @property
    def current(self) -> int:
        """Return the number of the worker in use."""
        return self._current

    def replace(self, failed: int) -> None:
        """Use the next worker, unless another call has replaced the failed one already."""
        if self._current == failed:
            self._current = (failed + 1) % len(self._channels)

    async def call(
        self,
        method: str,
        request: Any,
        options: CallOptions,
        *,
        timeout_s: float,
        worker: int | None = None,
    ) -> Any:
        """Ask a worker, by default the one in use; raise what ``rpc.call`` raises."""
        number = self._current if worker is None else worker
        if options.on_span is None or "telemetry" not in request.DESCRIPTOR.fields_by_name:
            return await call(
                self._channels[number], self.service, method, request, timeout_s=timeout_s
            )
        span_id = request.telemetry.span_id = secrets.randbits(63) + 1
        started_ns, clock_ns, found = time.time_ns(), time.monotonic_ns(), pb.TelemetryMetadata()
        error = ""
        try:
            answer = await call(
                self._channels[number], self.service, method, request, timeout_s=timeout_s
            )
            found = answer.telemetry
            return answer
        except SplitUpError as failure:
            error = str(failure)
            raise
        finally:
            options.on_span(
                CallSpan(
                    name=f"{self.service}/{method}",
                    worker=self.addresses[number],
                    span_id=span_id,
                    started_ns=started_ns,
                    wall_ns=time.monotonic_ns() - clock_ns,
                    worker_ns=found.wall_time_ns,
                    model_ns=found.model_time_ns,
                    error=error,
                )
            )

    async def ping(self) -> pb.PingResponse:
        """Return what the worker that answers first has, which is the nearest one, and use it.

        Raises Unavailable when no worker answers.
        """

        async def ask(number: int) -> tuple[int, pb.PingResponse]:
            request, options = pb.PingRequest(), CallOptions()
            try:
                return number, await self.call(
                    "Ping", request, options, timeout_s=PING_S, worker=number
                )
            except SplitUpError as error:
                raise Unavailable(f"{self.addresses[number]}: {error}") from None

        problems: list[str] = []
        tasks = [asyncio.create_task(ask(number)) for number in range(len(self))]
        try:
            for found in asyncio.as_completed(tasks):
                try:
                    self._current, answer = await found
                    return answer
                except Unavailable as error:
                    problems.append(str(error))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise Unavailable(f"no worker of {self.service} answers ({'; '.join(problems)})")

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()


def _make_prefix(session: str, tokens: Sequence[int]) -> pb.Prefix:
    return pb.Prefix(
        session_id=session,
        expected_prefix_length=len(tokens),
        digest=compute_digest(tokens) if tokens else 0,
    )


@dataclass(frozen=True, slots=True)
class RemoteChoice:
    """The tokens that a target worker has chosen, in the place of logits."""

    async def ready(self) -> None:
        """Return at once."""

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """Return the token, which is all that ``logits`` holds."""
        return int(logits[0])

    def rank(
        self, logits: npt.NDArray[np.float32], position: int, count: int, ahead: Sequence[int] = ()
    ) -> list[tuple[int, float]]:
        """Return nothing: no draft model's logits come here."""
        return []

    def prepare(self, position: int, count: int) -> None:
        """Do nothing: the worker draws."""


@dataclass(slots=True)
class _Pending:
    """A step behind ``before``, sent to a worker's session."""

    before: list[int]
    step: StepInput
    place: tuple[int, str] = (0, "")  # worker and session


class RemoteTarget:
    """One text at a target worker, as what takes its steps (``StepRunner``).

    In the place of logits come the tokens that the worker chooses, float64 [R, 1], -1 for rows off
    the chosen path.
    """

    def __init__(
        self, workers: WorkerGroup, model: TextModel, sampling: TreeSampling, options: CallOptions
    ) -> None:
        self.manifest: Manifest = model.manifest
        self._workers = workers
        self._model = model
        self._sampling = write_sampling(sampling)
        self._options = options
        self._session = secrets.token_hex(16)
        self._held = HeldTokens()
        self._is_begun = False  # a step has come back
        self._last: asyncio.Task[dict[str, Array]] | None = None
        self._tasks: set[asyncio.Task[dict[str, Array]]] = set()

    def submit(self, inputs: Mapping[str, Array]) -> asyncio.Task[dict[str, Array]]:
        """Send one step; the task gives the chosen tokens, and ends after those before it."""
        step = read_arrays(inputs, self._held.start)
        before = self._held.find(step.start, step.kept)
        if before is None:
            raise InvalidInput("a step continues rows that the last one has not made")
        self._held.feed(before, step)
        pending = _Pending(before, step)
        self._last = asyncio.create_task(self._complete(pending, self._last))
        self._tasks.add(self._last)
        self._last.add_done_callback(self._tasks.discard)
        return self._last

    async def _complete(
        self, pending: _Pending, previous: asyncio.Task[dict[str, Array]] | None
    ) -> dict[str, Array]:
        accepted, error = None, None
        if not self._is_begun and previous is not None:
            await asyncio.wait([previous])  # a server may take the calls of a new connection anyhow
        try:
            accepted = await self._ask(pending, pending.step.kept)
        except (Refused, Throttled, Unavailable) as failure:
            error = failure
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        if accepted is None:
            accepted = await self._mend(pending, error)
        self._is_begun = True
        return {"logits": _place(pending.step, accepted)}

    async def _mend(self, pending: _Pending, error: SplitUpError | None) -> list[int]:
        """Ask again: the session that an earlier step has moved to, or a new one with all text."""
        for _ in range(2 * len(self._workers) + 1):
            try:
                if pending.place != (self._workers.current, self._session):
                    return await self._ask(pending, pending.step.kept)
                worker, _ = pending.place
                if not isinstance(error, Refused):  # it is not there, busy or faulty
                    self._workers.replace(worker)
                self._session = secrets.token_hex(16)
                _log.warning("%s; going on at %s", error, self._workers.address)
                kept: Sequence[int] = ()
                for start in range(0, len(pending.before), self._model.chunk):
                    part = pending.before[start : start + self._model.chunk]
                    piece = _Pending(pending.before[:start], make_causal_step(part, start))
                    await self._ask(piece, kept)
                    kept = range(len(part))
                return await self._ask(pending, kept)
            except (Refused, Throttled, Unavailable) as failure:
                error = failure
                pending.place = self._workers.current, self._session
        raise Unavailable(f"no target worker goes on with the text: {error}")

    async def _ask(self, pending: _Pending, kept: Sequence[int]) -> list[int]:
        """Return the accepted tokens of a step.

        Raises Refused when the session is out of step, Throttled and Unavailable when the worker
        cannot do it, InvalidInput for a request that no worker takes.
        """
        step, worker = pending.step, self._workers.current
        pending.place = worker, self._session
        certain, tree = _split(step)
        request = pb.VerifyDraftsRequest(
            prefix=_make_prefix(self._session, pending.before),
            kept=kept,
            tokens=step.tokens[:certain],
            drafts=write_tree(tree),
            sampling=self._sampling,
        )
        try:
            answer = await self._workers.call(
                "VerifyDrafts",
                request,
                self._options,
                timeout_s=self._options.target_timeout_s,
                worker=worker,
            )
            return self._check(tree, answer.accepted)
        except (InvalidInput, Refused, Throttled):
            raise
        except SplitUpError as error:
            raise Unavailable(f"target worker {self._workers.addresses[worker]}: {error}") from None

    def _check(self, tree: TokenTree, accepted: Sequence[int]) -> list[int]:
        """Return the tokens if they are a path of the tree and one more token."""
        try:
            tokens = read_tokens(
                accepted, vocabulary=self._model.info.vocab, most=len(tree.tokens) + 1
            )
        except InvalidInput as error:
            raise SplitUpError(f"a wrong answer: {error}") from None
        if not tokens or find_path(tree, tokens) != len(tokens) - 1:
            raise SplitUpError("a wrong answer: it is no path of the drafts and one more token")
        return tokens

    async def close(self) -> None:
        """End the session."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        request = pb.EndSessionRequest(session_id=self._session)
        with contextlib.suppress(SplitUpError):
            await self._workers.call("EndSession", request, self._options, timeout_s=PING_S)


def _split(step: StepInput) -> tuple[int, TokenTree]:
    """Return how many leading rows of a step are certain, up to its first wanted row, and the rest.

    The rest is a tree below the last of them.
    """
    certain = step.outputs[0] + 1
    parents = tuple(max(seen[-2] - certain, -1) for seen in step.sees[certain:])
    return certain, TokenTree(step.tokens[certain:], parents)


def _place(step: StepInput, accepted: Sequence[int]) -> Array:
    """Return the tokens behind the rows of the accepted path, at their places among the outputs."""
    chosen = np.full((len(step.outputs), 1), -1.0)
    certain, tree = _split(step)
    below = {pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node: int | None = -1
    for token in accepted:
        assert node is not None
        if certain + node >= step.outputs[0]:
            chosen[certain + node - step.outputs[0], 0] = token
        node = below.get((node, token))
    return chosen


@dataclass(slots=True)
class RemoteDrafts:
    """A draft worker as the model of one text's drafts."""

    workers: WorkerGroup
    sampling: TreeSampling
    vocabulary: int
    options: CallOptions
    _held: tuple[int, ...] = ()  # what the session holds
    _session: str = field(default_factory=lambda: secrets.token_hex(16))

    def make_source(self, request: TextRequest, experience: Experience) -> DraftSource:
        """Return what asks for trees."""
        return TreeDrafts(request)

    async def compute(self, question: TreeQuestion) -> TokenTree:
        """Return a tree. Raises SplitUpError when no worker makes one."""
        error: SplitUpError | None = None
        for _ in range(len(self.workers) + 1):
            worker = self.workers.current
            try:
                return await self._ask(question)
            except Refused as failure:
                error = failure  # the session is lost, or its worker was replaced
            except InvalidInput:
                raise
            except SplitUpError as failure:
                error = failure
                _log.warning("draft worker %s: %s", self.workers.addresses[worker], failure)
                self.workers.replace(worker)
            self._session, self._held = secrets.token_hex(16), ()
        raise Unavailable(f"no draft worker is left: {error}")

    async def _ask(self, question: TreeQuestion) -> TokenTree:
        held = self._held if question.text[: len(self._held)] == self._held else ()
        request = pb.GenerateDraftsRequest(
            prefix=_make_prefix(self._session, held),
            tokens=question.text[len(held) :],
            guessed=question.guessed,
            sampling=write_sampling(self.sampling),
            max_nodes=question.most,
            max_depth=question.depth,
        )
        answer = await self.workers.call(
            "GenerateDrafts", request, self.options, timeout_s=self.options.draft_timeout_s
        )
        self._held = question.text
        try:
            return read_tree(answer.drafts, vocabulary=self.vocabulary, most=_MAX_ANSWER_NODES)
        except InvalidInput as error:
            raise SplitUpError(f"a wrong answer: {error}") from None

    async def end(self) -> None:
        """Leave the session to its worker, which forgets it in time."""


async def find_model(
    net: Network, target: WorkerGroup, drafts: WorkerGroup | None
) -> tuple[TextModel, WorkerGroup | None]:
    """Return the target workers' model, and the draft workers if one answers.

    Raises InvalidInput for a draft model with another vocabulary, and for a model that is not
    registered here, Unavailable when no target worker answers.
    """
    served = await target.ping()
    model = await net.fetch_text_model(served.model_id)
    if (served.vocabulary, served.max_rows) != (model.info.vocab, model.chunk):
        raise InvalidInput(f"the worker {target.address} runs another model than it names")
    if drafts is None:
        return model, None
    try:
        found = await drafts.ping()
    except Unavailable as error:
        _log.warning("the text goes on without a draft model: %s", error)
        return model, None
    await net.check_draft(served.model_id, found.model_id)
    return model, drafts


async def generate(
    target: WorkerGroup,
    drafts: WorkerGroup | None,
    model: TextModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampler: Sampler,
    adjustments: Adjustments = PLAIN,
    stop: Sequence[str] = (),
    experience: Experience | None = None,
    options: CallOptions | None = None,
) -> AsyncGenerator[Token, None]:
    """Yield the tokens that continue a prompt, from a target worker and perhaps a draft worker.

    They are those of the sequential decoder. ``adjustments`` may be penalties. Raises InvalidInput,
    Unavailable.
    """
    options = options or CallOptions()
    sampling = TreeSampling(sampler, adjustments, len(prompt))
    request = model.make_request(prompt, max_tokens=max_tokens, sampler=RemoteChoice())
    local = None if drafts is None else RemoteDrafts(drafts, sampling, model.info.vocab, options)
    speculation = Speculation(local, experience or Experience())
    decoder = speculation.make_decoder(request)
    runner = RemoteTarget(target, model, sampling, options)
    try:
        async for token in generate_tokens(
            runner,
            decoder,
            model.tokenizer,
            ends=StopFilter(stop),
            drafting=speculation.start(decoder),
        ):
            yield token
    finally:
        await runner.close()
