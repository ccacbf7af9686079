"""What nodes sent one member before the draw: commitments, the client's ends, and its order.

Members share it when their votes differ. Whatever the order in which it arrives, members that hold
the same draw the same conclusions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.completions import ExecutorCommitment, SignedEnd, SignedTakeover
from splitup.messages.plans import Plan
from splitup.protocol.committee.peer_messages import CommitmentsVote
from splitup.protocol.execution.ends import check_count, check_end, check_order
from splitup.protocol.execution.takeovers import list_taken
from splitup.protocol.settlement.chain_commitments import AgreedCommitments


class HeldCommitment(NamedTuple):
    """What a node commits to in one message: for an end of the client, or steps that it counted."""

    roots: dict[int, str]  # by number of steps; {} if the node signed two: then it counts as none
    tokens: tuple[str, ...]  # what the node signed: one message, or two that differ
    taken: frozenset[tuple[int, int]]  # (task, candidate): of others' tasks it answers for these
    is_final: bool  # for the client's final end


@dataclass(slots=True)
class CollectedCommitments:
    """What nodes sent to the members before the draw, and the members' votes about it."""

    # for the client's ends, by node and number of steps
    by_node: dict[str, dict[int, HeldCommitment]] = field(default_factory=dict)
    # for what nodes counted, by node and the most steps of the message
    counts: dict[str, dict[int, HeldCommitment]] = field(default_factory=dict)
    ordered: int = 0  # steps that the client ordered, by its signature under their inputs
    order: str = ""  # the token that shows it
    signed_steps: int = 0  # that the client signed for, by an order or an interim end
    end: SignedEnd | None = None  # the latest of the client's that was checked
    # the client's final ends, by steps: one, if it is honest; of more, two are kept
    finals: dict[int, SignedEnd] = field(default_factory=dict)
    # checked, by task and candidate
    takeovers: dict[tuple[int, int], SignedTakeover] = field(default_factory=dict)
    # by task and node: it was replaced, and has shown for how many steps the client had signed
    answered: set[tuple[int, str]] = field(default_factory=set)
    # by node and task: who was replaced and has not answered, and by which takeover
    replaced: dict[str, dict[int, SignedTakeover]] = field(default_factory=dict)
    answer_until: float = 0.0  # until when those that were replaced are waited for
    waited_for: int = 0  # as many of the takeovers were known when that began
    votes: dict[str, CommitmentsVote] = field(default_factory=dict)  # each member's latest
    voted: dict[str, AgreedCommitments] = field(default_factory=dict)  # our own votes', by root
    vote_at: float = 0.0
    submit_at: float = math.inf
    changes: int = 0  # of what others may lack: commitments, final ends, takeovers, the order
    shared_changes: int = 0  # as many of them were shared

    def add_for_end(self, commitment: ExecutorCommitment, token: str, plan: Plan) -> None:
        """Keep a commitment for an end of the client. Its takeovers have been checked."""
        roots = {commitment.end.end.steps: commitment.root}
        self._add(self.by_node, commitment, roots, token, plan)

    def add_counted(self, commitment: ExecutorCommitment, token: str, plan: Plan) -> None:
        """Keep the commitments for steps that a node counted, and the order of the plan's client.

        Its takeovers have been checked. Raises PeerFault, BadSignature.
        """
        check_count(commitment.end, plan)
        steps, hashes = commitment.end.end.steps, (commitment.root, *commitment.earlier)
        if len(hashes) > min(steps, limits.UNPAID_STEPS):
            raise PeerFault(
                f"{commitment.node} counts more steps than it may", peer=commitment.node
            )
        ordered = self.add_order(commitment.order, plan)
        if ordered > self.ordered:
            self.ordered, self.order = ordered, token
            self.changes += 1
        roots = {steps - place: root for place, root in enumerate(hashes)}
        self._add(self.counts, commitment, roots, token, plan)

    def _add(
        self,
        held: dict[str, dict[int, HeldCommitment]],
        commitment: ExecutorCommitment,
        roots: dict[int, str],
        token: str,
        plan: Plan,
    ) -> None:
        """Keep a node's message; of too many those for the most steps are kept."""
        steps, by_steps = max(roots), held.setdefault(commitment.node, {})
        known, is_final = by_steps.get(steps), commitment.end.end.final
        taken = list_taken(commitment.takeovers, plan, commitment.node)
        if known is None:
            by_steps[steps] = HeldCommitment(roots, (token,), taken, is_final)
            if len(by_steps) > limits.MAX_ENDS:
                del by_steps[min(by_steps)]
        elif known.roots and (known.roots, known.taken) != (roots, taken):
            by_steps[steps] = HeldCommitment({}, (*known.tokens, token), frozenset(), is_final)
        self.changes += by_steps.get(steps) is not known

    def add_order(self, order: str, plan: Plan) -> int:
        """Return how many steps the plan's client ordered, and note that it did.

        0 if ``order`` is "". Raises PeerFault, BadSignature for what the client did not sign.
        """
        ordered = check_order(order, plan) if order else 0
        self.signed_steps = max(self.signed_steps, ordered)
        return ordered

    def add_end(self, signed: SignedEnd, plan: Plan) -> None:
        """Keep the number of steps of the plan's client.

        Raises PeerFault, BadSignature for what the client did not sign, or without any step.
        """
        if signed == self.end:
            return
        check_end(signed, plan)
        if not signed.end.steps:
            raise PeerFault(f"{signed.end.execution_id} ended without steps: nothing is paid")
        self.end = signed
        if not signed.end.final:
            self.signed_steps = max(self.signed_steps, signed.end.steps)
        if signed.end.final and signed.end.steps not in self.finals and len(self.finals) < 2:
            self.finals[signed.end.steps] = signed
            self.changes += 1

    def add_takeover(self, signed: SignedTakeover, plan: Plan) -> None:
        """Keep a takeover that was checked, and whom it replaced; a client may sign thousands."""
        task, candidate = signed.takeover.task, signed.takeover.candidate
        self.takeovers[task, candidate] = signed
        self.changes += 1
        first = plan.places[task] if plan.places else 0
        later = range(first + 1, len(plan.tasks[task]))
        *before, last = (first, *(place for place in later if (task, place) in self.takeovers))
        for node in (plan.tasks[task][place] for place in before):
            if (task, node) not in self.answered:
                self.replaced.setdefault(node, {})[task] = self.takeovers[task, last]

    def add_answer(self, task: int, node: str) -> None:
        """Note that a node that was replaced has shown what the client signed."""
        self.answered.add((task, node))
        told = self.replaced.get(node, {})
        if told.pop(task, None) is not None and not told:
            del self.replaced[node]

    def list_tokens(self) -> list[str]:
        """Return the commitments here, as their nodes signed them."""
        tokens = [token for held in self._list_held() for token in held.tokens]
        if self.order:
            tokens.append(self.order)
        return list(dict.fromkeys(tokens))

    def list_finals(self, steps: int) -> dict[str, str]:
        """Return the roots for the client's final end after a number of steps, by node."""
        held = ((node, by_steps.get(steps)) for node, by_steps in self.by_node.items())
        return {
            node: one.roots[steps]
            for node, one in held
            if one is not None and one.is_final and one.roots
        }

    def list_commitments(self, steps: int) -> dict[str, str]:
        """Return the roots for a number of steps, by node: for the client's ends, or counted."""
        nodes = self.by_node.keys() | self.counts.keys()
        held = ((node, self._find(node, steps)) for node in nodes)
        return {node: one.roots[steps] for node, one in held if one is not None and one.roots}

    def sum_prices(
        self, plan: Plan, prices: Sequence[int], results: Collection[int]
    ) -> Iterator[tuple[int, int, bool]]:
        """Yield each number of steps, descending, that somebody committed to.

        With it the price of all tasks that are answered for then, and whether all ``results`` (of
        tasks) are. Takes time by what nodes sent: one of them may name hundreds of numbers, and
        looking at all tasks for each of them would keep a member from everything else.
        """
        numbers: dict[int, dict[str, HeldCommitment]] = {}
        for node in self.by_node.keys() | self.counts.keys():
            counts = sorted(self.counts.get(node, {}).items())
            by_steps = {steps: one for _, one in counts for steps in one.roots}
            for steps, one in (by_steps | self.by_node.get(node, {})).items():
                if one.roots:
                    numbers.setdefault(steps, {})[node] = one
        own: dict[str, list[int]] = {}
        for task, node in enumerate(plan.executors()):
            own.setdefault(node, []).append(task)
        answering, covered = [0] * len(prices), 0
        before: dict[str, HeldCommitment] = {}
        for steps, now in sorted(numbers.items(), reverse=True):
            for held, other, change in ((now, before, 1), (before, now, -1)):
                for node, one in held.items():
                    if other.get(node) is one:
                        continue
                    for task in (*own.get(node, ()), *(task for task, _ in one.taken)):
                        was, answering[task] = answering[task], answering[task] + change
                        covered += prices[task] * (bool(answering[task]) - bool(was))
            before = now
            yield steps, covered, all(answering[task] for task in results)

    def list_taken(self, steps: int, nodes: Iterable[str]) -> set[tuple[int, int]]:
        """Return the (task, candidate) that nodes answer for, as their commitments show."""
        held = (self._find(node, steps) for node in nodes)
        return {name for one in held if one is not None for name in one.taken}

    def _list_held(self) -> list[HeldCommitment]:
        both = (*self.by_node.values(), *self.counts.values())
        return [held for by_steps in both for held in by_steps.values()]

    def _find(self, node: str, steps: int) -> HeldCommitment | None:
        """Return what a node committed to: for the client's end, or in its highest such count."""
        for_end = self.by_node.get(node, {}).get(steps)
        counts = sorted(self.counts.get(node, {}).items(), reverse=True)
        return for_end or next((held for _, held in counts if steps in held.roots), None)


def check_extent(commitment: ExecutorCommitment, plan: Plan) -> None:
    """Raise PeerFault for a commitment that holds what its node has no use for.

    Members keep it as it was signed: one takeover of each task that the node is a candidate for,
    and the fields of a count in counts only.
    """
    tasks, node = [signed.takeover.task for signed in commitment.takeovers], commitment.node
    if (
        len(set(tasks)) < len(tasks)
        or not all(task < len(plan.tasks) and node in plan.tasks[task] for task in tasks)
        or (not commitment.end.is_count and (commitment.order or commitment.earlier))
    ):
        raise PeerFault(f"a commitment of {node} holds more than its own tasks need", peer=node)
