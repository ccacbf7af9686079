"""What a draft worker and a target worker answer.

Each has one model. A draft worker makes trees of drafts, under the noise that the target's choices
will have. A target worker runs a tree through its model in one step, and says which tokens it
chooses along it.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import Future, Lock
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, Protocol

import numpy as np
import numpy.typing as npt

from splitup.client.leases import Lease, LeasePool
from splitup.core.errors import InvalidInput
from splitup.decode.adjusted_sampler import AdjustedSampler
from splitup.decode.prompt import TextRequest
from splitup.decode.sampler import TokenChooser
from splitup.decode.speculation.sources import ModelDrafts, ModelRates, TokenTree
from splitup.decode.speculation.tree import TreeNode, walk
from splitup.decode.step import StepInput, check_path, make_arrays, make_tree_step
from splitup.graph.manifest import TextInfo
from splitup_speculation import speculation_pb2 as pb
from splitup_speculation.rpc import Handler, get_caller, get_deadline_s, time_model
from splitup_speculation.sessions import S, SessionLimits, WorkerSessions, refuse_step
from splitup_speculation.trees import (
    HeldTokens,
    TreeSampling,
    compute_digest,
    read_sampling,
    read_tokens,
    read_tree,
    write_tree,
)

MAX_NODES: Final = 256  # of drafts in one answer
MAX_LEVELS: Final = 16  # of steps of the draft model behind one request
_AT_ONCE: Final = 16  # nodes behind which one step drafts
_MOST_GROWN: Final = 64  # requests behind one text, before its tree is made anew
_RESERVE_S: Final = 0.005  # of the caller's patience that the way back may take


Logits = npt.NDArray[np.float32]


class SessionModel(Protocol):
    """A model's cache and what computes on it, for one session."""

    async def compute(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Return the logits of a step, float32 [R, vocab]. Raises SplitUpError."""
        ...

    async def end(self) -> None:
        """Free the cache."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A worker's model: its id, settings and chunk, and what opens a cache of it."""

    model_id: str
    info: TextInfo
    chunk: int
    open: Callable[[], SessionModel]


def _check_digest(prefix: pb.Prefix, held: Sequence[int] | None) -> None:
    if held is None or len(held) != prefix.expected_prefix_length:
        raise refuse_step(
            f"a prefix of {prefix.expected_prefix_length} tokens is expected, which the session "
            "cannot continue"
        )
    if held and compute_digest(held) != prefix.digest:
        raise refuse_step(f"the first {len(held)} tokens of the session are others")


class _Worker(Generic[S]):
    def __init__(self, model: WorkerModel, limits: SessionLimits) -> None:
        self._model = model
        self._sessions: WorkerSessions[S] = WorkerSessions(limits)

    async def ping(self, request: pb.PingRequest) -> pb.PingResponse:
        """Say what this worker has."""
        info = self._model.info
        return pb.PingResponse(
            model_id=self._model.model_id,
            vocabulary=info.vocab,
            context=info.context,
            max_rows=self._model.chunk,
            sessions=len(self._sessions),
            is_recurrent=info.is_recurrent,
        )

    async def close(self) -> None:
        """End all sessions."""
        await self._sessions.close()


class _Verified:
    """A session of a target worker."""

    def __init__(self, model: SessionModel) -> None:
        self.model = model
        self.held = HeldTokens()
        self.last: StepInput | None = None
        self.logits: Future[Logits] | None = None  # of the last step

    async def end(self) -> None:
        await self.model.end()


class TargetWorker(_Worker[_Verified]):
    """Verifies drafts with one model."""

    service = "TargetService"

    def __init__(self, model: WorkerModel, limits: SessionLimits) -> None:
        super().__init__(model, limits)
        self.handlers: dict[str, Handler] = {
            "VerifyDrafts": self.verify_drafts,
            "EndSession": self.end_session,
            "Ping": self.ping,
        }

    async def verify_drafts(self, request: pb.VerifyDraftsRequest) -> pb.VerifyDraftsResponse:
        """Run the drafts through the model; return the tokens it chooses along them."""
        info, chunk, prefix = self._model.info, self._model.chunk, request.prefix
        tokens = read_tokens(request.tokens, vocabulary=info.vocab, most=chunk)
        tree = read_tree(request.drafts, vocabulary=info.vocab, most=chunk - len(tokens))
        sampling = read_sampling(request.sampling)
        certain, start, kept = len(tokens), prefix.expected_prefix_length, tuple(request.kept)
        if not tokens and not (tree.tokens and kept):
            raise InvalidInput("the request has no token behind the prefix; give at least one")
        parents = [
            *range(-1, certain - 1),
            *(certain + p if p >= 0 else certain - 1 for p in tree.parents),
        ]
        rows = range(max(certain - 1, 0), certain + len(tree.tokens))
        step = make_tree_step([*tokens, *tree.tokens], parents, start, rows, kept)
        if max(step.positions) >= info.context:
            raise InvalidInput(
                f"the request reaches position {max(step.positions)}; the model has {info.context}"
            )
        make = None if start else lambda: _Verified(self._model.open())
        with self._sessions.use(prefix.session_id, make, get_caller()) as session:
            before, last, earlier = session.held.find(start, kept), session.last, session.logits
            _check_digest(prefix, before)
            assert before is not None
            if not tokens and (last is None or kept[-1] not in last.outputs):
                raise refuse_step("the last request has no logits of the row to continue")
            if info.is_recurrent:
                check_path(step, last)
            session.held.feed(before, step)  # requests are computed in the order of their arrival
            session.last, session.logits = step, asyncio.ensure_future(session.model.compute(step))
            with time_model():
                logits = list(await session.logits)
                if not tokens:
                    assert last is not None and earlier is not None
                    logits = [(await earlier)[last.outputs.index(kept[-1])], *logits]
        chooser = sampling.make_chooser(info.vocab, [*before, *tokens])
        return pb.VerifyDraftsResponse(accepted=_follow(tree, logits, chooser, start + certain - 1))

    async def end_session(self, request: pb.EndSessionRequest) -> pb.EndSessionResponse:
        """Free a session, if it is there."""
        self._sessions.end(request.session_id)
        return pb.EndSessionResponse()


def _follow(
    tree: TokenTree, logits: Sequence[Logits], chooser: TokenChooser, position: int
) -> list[int]:
    """Return the target's tokens behind ``position``, as far as the tree has them, and one more.

    ``logits`` are those of that position, and of every node.
    """
    below = {pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    chosen: list[int] = []
    node: int | None = -1
    while node is not None:
        chosen.append(chooser.choose(logits[node + 1], position + len(chosen)))
        node = below.get((node, chosen[-1]))
    return chosen


class _Drafted:
    """A session of a draft worker: the certain text, and the tree behind it."""

    def __init__(
        self, model: SessionModel, sampling: TreeSampling, served: WorkerModel, rates: ModelRates
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.chooser = sampling.make_chooser(served.info.vocab, ())
        self.order = Lock()
        self.text: list[int] = []
        self.root: TreeNode | None = None
        self.grown = 0  # requests since the text last grew, each of which may extend the tree
        info = served.info
        request = TextRequest(
            (0,), self.chooser, 1, frozenset(info.eos_ids), info.vocab, info.context, served.chunk
        )
        self.source = ModelDrafts(request, rates, chunk=served.chunk, context=info.context)

    async def end(self) -> None:
        await self.model.end()

    def continue_text(self, held: int, tokens: Sequence[int]) -> TreeNode:
        """Take the certain text, and learn which drafts came true; return its last token's node."""
        self.grown = 0 if tokens else self.grown + 1
        if self.grown > _MOST_GROWN:
            self.grown, self.root = 0, None
        if held < len(self.text):
            del self.text[held:]
            self.root = None
            self.source.roll_back(held)
        for token in tokens:
            root, position = self.root, len(self.text)
            self.text.append(token)
            self.root = None
            if root is not None:
                for rate, drafts in root.drafts:
                    rate.learn(drafts.index(token) if token in drafts else None)
                self.root = root.children.get(token)
            if self.root is None:
                self.root = TreeNode(token, position)
            self.root.parent = None
        if self.root is None:
            self.root = TreeNode(self.text[-1], len(self.text) - 1)
        if isinstance(self.chooser, AdjustedSampler):
            length = self.sampling.prompt_length
            self.chooser.follow(self.text[:length], self.text[length:])
        return self.root


class DraftWorker(_Worker[_Drafted]):
    """Drafts with one model; what it learns of its drafts serves all sessions."""

    service = "DraftService"

    def __init__(self, model: WorkerModel, limits: SessionLimits) -> None:
        super().__init__(model, limits)
        self._rates = ModelRates()
        self.handlers: dict[str, Handler] = {
            "GenerateDrafts": self.generate_drafts,
            "Ping": self.ping,
        }

    async def generate_drafts(self, request: pb.GenerateDraftsRequest) -> pb.GenerateDraftsResponse:
        """Draft behind the certain and the guessed tokens, likeliest first.

        The tree is smaller when the caller's deadline comes before it is complete.
        """
        info, prefix = self._model.info, request.prefix
        start = prefix.expected_prefix_length
        tokens = read_tokens(request.tokens, vocabulary=info.vocab, most=info.context)
        # each becomes a node of the session's tree
        guessed = read_tokens(request.guessed, vocabulary=info.vocab, most=MAX_NODES)
        most, levels = request.max_nodes, request.max_depth
        if not (1 <= most <= MAX_NODES and 1 <= levels <= MAX_LEVELS):
            raise InvalidInput(
                f"drafts have 1 to {MAX_NODES} nodes and 1 to {MAX_LEVELS} levels, not {most} and "
                f"{levels}"
            )
        if not 1 <= start + len(tokens) <= info.context - len(guessed):
            raise InvalidInput(f"a text has 1 to {info.context} tokens here, guessed ones included")
        sampling = read_sampling(request.sampling)

        def make() -> _Drafted:
            return _Drafted(self._model.open(), sampling, self._model, self._rates)

        make_new = None if start else make
        sessions = self._sessions.use(prefix.session_id, make_new, get_caller())
        with sessions as session:
            async with session.order:
                _check_digest(prefix, session.text[:start])
                if session.sampling != sampling:
                    raise InvalidInput("a session has one sampling; begin another one")
                if info.is_recurrent and start < len(session.text):
                    raise refuse_step("the draft model cannot go back")
                root = place = session.continue_text(start, tokens)
                for token in guessed:
                    if token not in place.children:  # its chance is not known
                        place.children[token] = TreeNode(token, place.position + 1, place, 0.0)
                    place = place.children[token]
                await self._draft(session, root, place, most, levels)
                return pb.GenerateDraftsResponse(drafts=_collect(place, most, info.context))

    async def _draft(
        self, session: _Drafted, root: TreeNode, place: TreeNode, most: int, levels: int
    ) -> None:
        """Extend the tree below ``place`` by so many levels, or as long as the caller waits."""
        deadline, took_s, level = get_deadline_s(), 0.0, 0
        while level < levels:
            began = time.monotonic()
            if deadline is not None and began + took_s + _RESERVE_S > deadline:
                return
            found = [node for _, node, _ in islice(walk(place, self._model.info.context - 2), most)]
            unseen = [node for node in found if session.source not in node.seen_by]
            step = session.source.begin(session.text, root, unseen[:_AT_ONCE]) if unseen else None
            if step is None:
                return
            level += bool(session.source.awaited)  # other steps feed a part of a long text
            with time_model():
                logits = await session.model.compute(step)
            session.source.finish(root, logits)
            took_s = time.monotonic() - began


def _collect(place: TreeNode, most: int, context: int) -> pb.TokenTree:
    """Return the likeliest drafts below ``place``, parents first."""
    places: dict[TreeNode, int] = {place: -1}
    drafts: list[tuple[int, int, float]] = []
    for _, node, parent in islice(walk(place, context - 2), 1, most + 1):
        places[node] = len(drafts)
        drafts.append((node.token, places[parent], node.chance))
    tokens, parents, chances = zip(*drafts, strict=True) if drafts else ((), (), ())
    return write_tree(TokenTree(tokens, parents, chances))


class OrderedModel:
    """A model of this machine, whose steps are computed in order, and none behind a failed one."""

    def __init__(self, model: SessionModel) -> None:
        self._model = model
        self._order = Lock()
        self._has_failed = False

    async def compute(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Return the logits of a step."""
        try:
            async with self._order:
                if self._has_failed:
                    raise refuse_step("an earlier request of the session has failed")
                return await self._model.compute(step)
        except BaseException:
            self._has_failed = True
            raise

    async def end(self) -> None:
        """Free the cache."""
        await self._model.end()


class LeasedModel:
    """Computes on the market's nodes; a lease is borrowed at the first step."""

    def __init__(self, pool: LeasePool, chunk: int, steps: int) -> None:
        """Take leases of ``pool`` that have at least so many ``steps`` left."""
        self._pool = pool
        self._chunk = chunk
        self._steps = steps
        self._lease: Lease | None = None
        self._stack = AsyncExitStack()
        self._order = asyncio.Lock()

    async def compute(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Return the logits of a step; the next one may be sent meanwhile.

        Raises Refused when the lease has no step left, and what a session raises.
        """
        async with self._order:
            if self._lease is None:
                borrowed = self._pool.borrow("", step.tokens, self._steps)
                self._lease = await self._stack.enter_async_context(borrowed)
            if not self._lease.can_go_on(1, asyncio.get_running_loop().time()):
                raise refuse_step("the session's paid steps or seconds are used up")
            self._lease.contents.feed(step)
            result = self._lease.session.submit(make_arrays(step, self._chunk))
        logits: npt.NDArray[np.float32] = (await result)["logits"]
        return logits

    async def end(self) -> None:
        """Give the lease back."""
        await self._stack.aclose()
