"""From a finished execution to its payment: commit, see that on chain, reveal when it is due.

Near the deadline, the node commits to the client's interim ends, too, and to the steps that it
computed beyond them, so that the executors have a number in common even if the client sent its
final end to some of them only, or never.

The members bring all executors' commitments to the chain, in one transaction.

The completion with its salt is in the journal before anything is sent. So a node that crashes
commits and reveals the same bytes after its restart, or finds that it had done so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from splitup.chain.client import Chain
from splitup.chain.market import Status, distribute
from splitup.core import limits, tuning
from splitup.core.background import BackgroundTasks
from splitup.core.errors import SplitUpError, Unavailable
from splitup.messages import api
from splitup.messages.completions import Completion, ExecutorCommitment, Takeovers
from splitup.storage.journal import Journal
from splitup_node.committee.committee_client import CommitteeClient

_log = logging.getLogger("splitup.node.reports")


@dataclass(frozen=True, slots=True)
class CompletionReport:
    """A completion to be reported; no commitment is waited for after ``give_up_s`` (Unix seconds).

    ``earlier`` are those that may count if the executors of the other tasks lack the client's final
    end: for its earlier interim ends, and for steps that it ordered, as ``order`` shows.
    """

    completion: Completion
    earlier: tuple[Completion, ...]
    order: str
    give_up_s: int
    is_held: bool  # until the deadline is near: the client's next choice may do more

    @property
    def deadline_s(self) -> int:
        return self.give_up_s - limits.GRANT_GRACE_S

    @property
    def late_s(self) -> float:
        """Return from when on members are told what may count instead of the final end."""
        return self.deadline_s - tuning.STOP_MARGIN_S

    @property
    def reveal_until_s(self) -> int:
        """Until when it is revealed, if the chain has the commitments: hiding it costs stake."""
        return self.deadline_s + limits.VERIFICATION_GRACE_S

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
        self._waiting: asyncio.Queue[CompletionReport] = asyncio.Queue()
        self._background = BackgroundTasks()
        self._committed: dict[str, set[int]] = {}  # steps of what members got, by execution
        self._released_to = 0  # executions requested before this block are closed and released

    async def submit(
        self,
        completions: Sequence[Completion],
        deadline_s: int,
        order: str = "",
        *,
        is_held: bool = False,
    ) -> None:
        """Write completions to the journal; they are reported from then on, also after restarts.

        The first one is for the execution's end, the others for what may count instead. ``order``
        shows what the client ordered, "" if this node got none of its inputs. With ``is_held``
        members hear of them when the deadline is near.
        """
        completion, *earlier = completions
        give_up_s = deadline_s + limits.GRANT_GRACE_S
        value = {
            "completion": completion.model_dump(mode="json"),
            "earlier": [one.model_dump(mode="json") for one in earlier],
            "order": order,
            "give_up_s": give_up_s,
            "is_held": is_held,
        }
        stored = await asyncio.to_thread(
            self._journal.put_once, "completion", completion.execution_id, value
        )
        report = _read_report(stored)
        if (takeovers := _make_takeovers(report.completion)) is not None:
            # before our commitment is on chain
            self._background.start(self._committee_client.announce(takeovers, set()))
        self._waiting.put_nowait(report)

    async def tell_takeovers(self, message: Takeovers, deadline_s: int) -> None:
        """Tell the members who takes tasks over, and for how many steps the client has signed."""
        try:
            await self._committee_client.spread(api.TAKEOVERS, message, deadline_s)
        except SplitUpError as error:
            _log.warning(
                "members do not hear of takeovers of %s, nor how many steps the client signed for: "
                "%s",
                message.execution_id,
                error,
            )

    async def watch_taken(
        self,
        execution_id: str,
        deadline_s: int,
        is_over: Callable[[], bool],
        stop: Callable[[], None],
    ) -> None:
        """Call ``stop`` if the members agree on others' commitments before this node's.

        It takes tasks of the execution over, and its work would not be paid.
        """
        since_s = self._chain.clock.now_s()
        try:
            while not is_over() and self._chain.clock.now_s() < deadline_s:
                row = await self._chain.call("market", "executionOf", execution_id)
                if row["certified"] or Status(row["status"]) in (Status.SETTLED, Status.REFUNDED):
                    stop()
                    return
                await self._pause(since_s)
        except SplitUpError as error:
            _log.warning("takeovers of %s are not watched: %s", execution_id, error)

    def resume(self) -> None:
        """Take up the completions that an earlier run of the node has not fully reported."""
        for execution_id, value in self._journal.items("completion"):
            report = _read_report(value)
            if self._journal.get("revealed", execution_id) is None:
                self._waiting.put_nowait(report)
            elif report.give_up_s < self._chain.clock.now_s():
                with self._journal.transaction():
                    for kind in ("completion", "revealed"):
                        self._journal.delete(kind, execution_id)

    async def run(self) -> None:
        """Report what is submitted, for ever."""
        try:
            while True:
                self._background.start(self._report(await self._waiting.get()))
        finally:
            await self._background.close()

    async def release_stake(self, entry: Mapping[str, Any]) -> None:
        """Have closed executions credited when their locks take too much of the stake.

        ``entry`` is the node's in the registry.
        """
        if entry["locked"] <= tuning.DISTRIBUTE_LOCKED_SHARE * entry["stake"]:
            return
        done = await distribute(self._chain, self._chain.address, from_block=self._released_to)
        self._released_to = done.next_block
        _log.info("%d executions were credited, which releases stake", done.executions)

    async def _report(self, report: CompletionReport) -> None:
        """Commit towards the members; reveal once the chain has the root over all commitments."""
        execution_id = report.completion.execution_id
        reason = ""
        is_last = False
        if report.is_held:
            await self._wait_until(report.late_s)
        since_s = self._chain.clock.now_s()
        while not is_last:
            is_last = self._chain.clock.now_s() > report.give_up_s  # we may have been down
            if not report.is_held:
                self._send_commitments(report)
            try:
                execution = await self._chain.call("market", "executionOf", execution_id)
            except SplitUpError as error:
                reason = str(error)
            else:
                if execution["certified"]:
                    await self._reveal(report)
                    return
                if Status(execution["status"]) in (Status.SETTLED, Status.REFUNDED):
                    _log.warning("%s was closed without any commitment", execution_id)
                    self._committed.pop(execution_id, None)
                    await self._mark_revealed(report)
                    return
                reason = "the members have not brought it to the chain"
            self._send_commitments(report)
            if not is_last:
                await self._pause(since_s, report.late_s)
        _log.error("%s is not reported any more: %s", execution_id, reason)
        self._committed.pop(execution_id, None)

    async def _pause(self, since_s: float, next_s: float = 0.0) -> None:
        """Wait before the next look at the chain: the longer, the longer ago ``since_s`` is.

        A client can leave executions open until their deadlines, and each look takes a call of the
        endpoint. No pause goes beyond ``next_s``.
        """
        now_s = self._chain.clock.now_s()
        pause_s = min((now_s - since_s) / 8, tuning.CLOCK_PERIOD_S)
        if now_s < next_s:
            pause_s = min(pause_s, next_s - now_s)
        await asyncio.sleep(max(tuning.REPORT_RETRY_S, pause_s))

    async def _wait_until(self, at_s: float) -> None:
        while True:
            left_s = at_s - self._chain.clock.now_s()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, tuning.CLOCK_PERIOD_S))

    def _send_commitments(self, report: CompletionReport) -> None:
        """Send the members what is due, once in a run of this node."""
        completion = report.completion
        is_late = self._chain.clock.now_s() >= report.late_s
        due = [completion]
        if is_late or not completion.end.end.final:
            due += report.earlier
        committed = self._committed.setdefault(completion.execution_id, set())
        due = [one for one in due if one.steps not in committed]
        committed.update(one.steps for one in due)
        messages = [_make_commitment(one) for one in due if not one.end.is_count]
        for first, *rest in group_counts(due):
            earlier = tuple(one.root() for one in rest)
            messages.append(_make_commitment(first, earlier, report.order))
        for message in messages:
            self._background.start(
                self._committee_client.spread(api.EXECUTOR_COMMITMENT, message, report.give_up_s)
            )

    async def _reveal(self, report: CompletionReport) -> None:
        """Wait until it is time to reveal, then send the members the completion that counts."""
        completion = report.completion
        self._committed.pop(completion.execution_id, None)
        steps = await self._committee_client.wait_until_due(
            completion.execution_id, _make_takeovers(completion), report.reveal_until_s
        )
        revealed = report.find(steps)
        if revealed is None or await self._committee_client.spread(
            api.COMPLETION, revealed, report.reveal_until_s
        ):
            await self._mark_revealed(report)

    async def _mark_revealed(self, report: CompletionReport) -> None:
        execution_id = report.completion.execution_id
        try:
            await asyncio.to_thread(self._journal.put, "revealed", execution_id, {})
        except Unavailable as error:
            _log.error("the reveal of %s cannot be journaled: %s", execution_id, error)


def group_counts(completions: Sequence[Completion]) -> list[list[Completion]]:
    """Return the counts among completions, descending, in groups that fit one commitment each.

    Those of a group show the same takeovers, each for one step less than the one before. Of more
    groups than members keep of a node, those for the most steps of the most tasks are returned.
    """
    counted = enumerate(one for one in completions if one.end.is_count)
    found = groupby(
        counted,
        lambda pair: (pair[1].takeovers, pair[0] + pair[1].steps, pair[0] // limits.UNPAID_STEPS),
    )
    groups = [[one for _, one in group] for _, group in found]
    groups.sort(key=lambda group: group[0].steps * len(group[0].tasks))
    return groups[-limits.MAX_ENDS :]


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


def _read_report(value: dict[str, Any]) -> CompletionReport:
    return CompletionReport(
        Completion.from_value(value["completion"]),
        tuple(map(Completion.from_value, value.get("earlier", ()))),
        value.get("order", ""),
        value["give_up_s"],
        value.get("is_held", False),
    )
