"""From a finished execution to its payment: commit, see that on chain, reveal when it is due.

Near the deadline, the node commits to the client's interim ends, too, and to the steps that it
computed beyond them, so that the executors have a number in common even if the client sent its
final end to some of them only, or never.

The members bring all executors' commitments to the chain in one transaction. If they have not done
so within a few blocks, the node commits on chain itself, in batches.

The completion with its salt is in the journal before anything is sent. So a node that crashes
commits and reveals the same bytes after its restart, or finds that it had done so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from splitup.chain.client import Block, Chain
from splitup.chain.market import distribute
from splitup.core import limits, tuning
from splitup.core.errors import ChainRejected, SplitUpError, Unavailable
from splitup.messages import api
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers
from splitup.storage.journal import Journal
from splitup_node.committee.committee_client import CommitteeClient

_log = logging.getLogger("splitup.node.reports")
_ZERO = "0x" + "00" * 32


class Status(IntEnum):
    """An execution's state as the Market contract numbers it."""

    UNKNOWN = 0
    REQUESTED = 1
    PLANNED = 2
    SETTLED = 3
    REFUNDED = 4


@dataclass(frozen=True, slots=True)
class Report:
    """A completion to be reported; it is given up after ``give_up_s`` (Unix seconds).

    ``earlier`` are those that may count if the executors of the other tasks lack the client's final
    end: for its earlier interim ends, and for steps that it ordered, as ``order`` shows.
    ``exposure_micro_usdc`` is what the node would lose if all its tasks were wrong: a commitment
    locks this part of the stake.
    """

    completion: Completion
    earlier: tuple[Completion, ...]
    order: str
    give_up_s: int
    exposure_micro_usdc: int

    @property
    def deadline_s(self) -> int:
        return self.give_up_s - limits.GRANT_GRACE_S

    def find(self, steps: int) -> Completion | None:
        """Return the completion for so many steps."""
        known = (self.completion, *self.earlier)
        return next((one for one in known if one.steps == steps), None)


class Reporter:
    """Commits and reveals completions for one node."""

    def __init__(
        self,
        journal: Journal,
        chain: Chain,
        committee_client: CommitteeClient,
    ) -> None:
        self._journal = journal
        self._chain = chain
        self._committee_client = committee_client
        self._waiting: asyncio.Queue[Report] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._planned_at: dict[str, int] = {}  # execution -> block in which its plan was seen
        self._committed: dict[str, set[int]] = {}  # steps of what members got, by execution
        self._released_to = 0  # executions requested before this block are closed and released

    async def submit(
        self,
        completions: Sequence[Completion],
        deadline_s: int,
        exposure_micro_usdc: int,
        order: str = "",
    ) -> None:
        """Write completions to the journal; they are reported from then on, also after restarts.

        The first one is for the execution's end, the others for what may count instead. ``order``
        shows what the client ordered, "" if this node got none of its inputs.
        """
        completion, *earlier = completions
        give_up_s = deadline_s + limits.GRANT_GRACE_S
        value = {
            "completion": completion.model_dump(mode="json"),
            "earlier": [one.model_dump(mode="json") for one in earlier],
            "order": order,
            "give_up_s": give_up_s,
            "exposure_micro_usdc": exposure_micro_usdc,
        }
        stored = await asyncio.to_thread(
            self._journal.put_once, "completion", completion.execution_id, value
        )
        report = _read_report(stored)
        if (takeovers := _make_takeovers(report.completion)) is not None:
            self._spawn(
                self._committee_client.announce(takeovers, set())
            )  # before our commitment is on chain
        self._waiting.put_nowait(report)

    def resume(self) -> None:
        """Take up the completions that an earlier run of the node has not fully reported."""
        for execution_id, value in self._journal.items("completion"):
            report = _read_report(value)
            if self._journal.get("revealed", execution_id) is None:
                self._waiting.put_nowait(report)
            elif report.give_up_s < self._chain.clock.now_s():
                with self._journal.transaction():
                    for kind in ("completion", "committed", "revealed"):
                        self._journal.delete(kind, execution_id)

    async def run(self) -> None:
        """Report what is submitted, for ever."""
        try:
            while True:
                batch = [await self._waiting.get()]
                await asyncio.sleep(tuning.COMMIT_WINDOW_S)
                while not self._waiting.empty() and len(batch) < limits.MAX_COMMITS:
                    batch.append(self._waiting.get_nowait())
                await self._commit(batch)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def release_stake(self) -> None:
        """Have closed executions credited when their locks take too much of the stake."""
        account = self._chain.address
        entry = await self._chain.call("nodes", "nodeOf", account)
        if entry["locked"] <= tuning.DISTRIBUTE_LOCKED_SHARE * entry["stake"]:
            return
        done = await distribute(self._chain, account, from_block=self._released_to)
        self._released_to = done.next_block
        _log.info("%d executions were credited, which releases stake", done.executions)

    async def _commit(self, batch: Sequence[Report]) -> None:
        """Commit in one transaction what the members left out; put off the others."""
        ready: list[Report] = []
        for report in batch:
            self._send_commitments(report)
        try:
            head = await self._chain.fetch_head()
            states = await asyncio.gather(*(self._fetch_state(report, head) for report in batch))
        except SplitUpError as error:
            self._put_off(batch, str(error))
            return
        for report, (status, committed) in zip(batch, states, strict=True):
            if status in (Status.SETTLED, Status.REFUNDED):
                if not committed:
                    _log.warning(
                        "%s was closed without this node's commitment",
                        report.completion.execution_id,
                    )
                await self._mark(report, "revealed", {})
            elif committed:
                self._spawn(self._reveal(report))
            elif status is not Status.PLANNED:
                self._put_off([report], "its plan is not on chain yet")
            elif report.completion.end.end.final and self._is_left_out(report, head.number):
                ready.append(report)
            else:
                self._put_off([report], "the members still have time to bring it to the chain")
        if ready:
            await self._send(ready)

    def _send_commitments(self, report: Report) -> None:
        """Send the members what is due, once in a run of this node."""
        completion = report.completion
        is_late = self._chain.clock.now_s() > report.deadline_s - tuning.STOP_MARGIN_S
        due = [completion]
        if is_late or not completion.end.end.final:
            due += report.earlier
        committed = self._committed.setdefault(completion.execution_id, set())
        due = [one for one in due if one.steps not in committed]
        committed.update(one.steps for one in due)
        messages = [_make_commitment(one) for one in due if not one.end.is_count]
        if counted := [one for one in due if one.end.is_count]:
            earlier = tuple(one.root() for one in counted[1:])
            messages.append(_make_commitment(counted[0], earlier, report.order))
        for message in messages:
            self._spawn(
                self._committee_client.spread(api.EXECUTOR_COMMITMENT, message, report.give_up_s)
            )

    def _is_left_out(self, report: Report, block_number: int) -> bool:
        """Return whether the members have had their time to commit, or the deadline is near."""
        since = self._planned_at.setdefault(report.completion.execution_id, block_number)
        confirmations = self._chain.deployment.confirmations  # members see the plan so much later
        return (
            block_number - since >= tuning.COMMIT_PATIENCE_BLOCKS + confirmations
            or self._chain.clock.now_s() > report.deadline_s - tuning.COMMIT_MARGIN_S
        )

    async def _send(self, reports: Sequence[Report]) -> None:
        rows = [
            (
                r.completion.execution_id,
                r.completion.steps,
                r.completion.root(),
                r.exposure_micro_usdc,
            )
            for r in reports
        ]
        try:
            receipt = await self._chain.send("market", "commitCompletions", rows)
        except ChainRejected as error:
            if len(reports) == 1:
                self._put_off(reports, str(error))
                return
            for report in reports:  # a single rejected report must not delay the others
                await self._send([report])
            return
        except SplitUpError as error:
            self._put_off(reports, str(error))
            return
        for report in reports:
            _log.info("committed %s in %s", report.completion.execution_id, receipt.transaction)
            await self._mark(report, "committed", {"transaction": receipt.transaction})
            self._spawn(self._reveal(report))

    async def _fetch_state(self, report: Report, head: Block) -> tuple[Status, bool]:
        """Return the execution's state, and whether a commitment of this node is on chain."""
        execution_id = report.completion.execution_id
        execution, commitment = await asyncio.gather(
            self._chain.call("market", "executionOf", execution_id, at=head),
            self._chain.call("market", "commitmentOf", execution_id, self._chain.address, at=head),
        )
        return Status(execution["status"]), execution["certified"] or commitment != _ZERO

    async def _reveal(self, report: Report) -> None:
        """Wait until it is time to reveal, then send the members the completion that counts."""
        completion = report.completion
        self._planned_at.pop(completion.execution_id, None)
        self._committed.pop(completion.execution_id, None)
        steps = await self._committee_client.wait_until_due(
            completion.execution_id, _make_takeovers(completion), report.give_up_s
        )
        revealed = report.find(steps)
        if revealed is None or await self._committee_client.spread(
            api.COMPLETION, revealed, report.give_up_s
        ):
            await self._mark(report, "revealed", {})

    def _put_off(self, reports: Sequence[Report], reason: str) -> None:
        for report in reports:
            if self._chain.clock.now_s() > report.give_up_s:
                _log.error(
                    "%s is not reported any more: %s", report.completion.execution_id, reason
                )
                self._planned_at.pop(report.completion.execution_id, None)
                self._committed.pop(report.completion.execution_id, None)
                continue
            _log.debug("commitment of %s waits: %s", report.completion.execution_id, reason)
            loop = asyncio.get_running_loop()
            loop.call_later(tuning.REPORT_RETRY_S, self._waiting.put_nowait, report)

    async def _mark(self, report: Report, kind: str, value: dict[str, Any]) -> None:
        try:
            execution_id = report.completion.execution_id
            await asyncio.to_thread(self._journal.put, kind, execution_id, value)
        except Unavailable as error:
            _log.error("'%s' of %s cannot be journaled: %s", kind, execution_id, error)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an execution cannot be reported", exc_info=error)


def _make_takeovers(completion: Completion) -> Takeovers | None:
    """Return the takeovers of tasks that this node has or had, None when there were none."""
    if not completion.takeovers:
        return None
    return Takeovers(
        execution_id=completion.execution_id,
        node=completion.node,
        takeovers=completion.takeovers,
    )


def _make_commitment(
    completion: Completion, earlier: tuple[str, ...] = (), order: str = ""
) -> ExecutorCommitment:
    return ExecutorCommitment(
        execution_id=completion.execution_id,
        node=completion.node,
        root=completion.root(),
        end=completion.end,
        earlier=earlier,
        order=order,
        takeovers=completion.takeovers,
    )


def _read_report(value: dict[str, Any]) -> Report:
    return Report(
        Completion.from_value(value["completion"]),
        tuple(map(Completion.from_value, value.get("earlier", ()))),
        value.get("order", ""),
        value["give_up_s"],
        value["exposure_micro_usdc"],
    )
