"""What nodes sent one member before the draw: commitments, the client's ends, and its order.

Members share it when their votes differ. Whatever the order in which it arrives, members that hold
the same draw the same conclusions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    """A node's commitment for one number of steps."""

    root: str  # "" if the node signed two: then it counts as none
    tokens: tuple[str, ...]  # what the node signed: one message, or two that differ
    taken: frozenset[tuple[int, int]]  # (task, candidate): of others' tasks it answers for these
    is_final: bool  # for the client's final end


class HeldCounts(NamedTuple):
    """A node's commitments for the steps that it counted itself."""

    roots: dict[int, str]  # by number of steps; {} if the node signed two messages
    tokens: tuple[str, ...]  # as in a ``HeldCommitment``
    taken: frozenset[tuple[int, int]]


@dataclass(slots=True)
class CollectedCommitments:
    """What nodes sent to the members before the draw, and the members' votes about it."""

    by_node: dict[str, dict[int, HeldCommitment]] = field(default_factory=dict)  # and by steps
    counts: dict[str, HeldCounts] = field(default_factory=dict)  # by node
    ordered: int = 0  # steps that the client ordered, by its signature under their inputs
    order: str = ""  # the token that shows it
    asked: int = 0  # steps that the client signed for, by an order or an interim end
    end: SignedEnd | None = None  # the latest of the client's that was checked
    # the client's final ends, by steps: one, if it is honest; of more, two are kept
    finals: dict[int, SignedEnd] = field(default_factory=dict)
    # checked, by task and candidate
    takeovers: dict[tuple[int, int], SignedTakeover] = field(default_factory=dict)
    # by task and node: it was replaced, and has shown for how many steps the client had signed
    answered: set[tuple[int, str]] = field(default_factory=set)
    answer_until: float = 0.0  # until when those that were replaced are waited for
    waited_for: int = 0  # as many of the takeovers were known when that began
    votes: dict[str, CommitmentsVote] = field(default_factory=dict)  # each member's latest
    voted: dict[str, AgreedCommitments] = field(default_factory=dict)  # our own votes', by root
    vote_at: float = 0.0
    submit_at: float = math.inf
    changes: int = 0  # of what others may lack: commitments, final ends, takeovers, the order
    shared_changes: int = 0  # as many of them were shared

    def add_for_end(self, commitment: ExecutorCommitment, token: str, plan: Plan) -> None:
        """Keep a commitment for an end of the client; of too many numbers the highest are kept.

        Its takeovers have been checked.
        """
        steps, is_final = commitment.end.end.steps, commitment.end.end.final
        by_steps = self.by_node.setdefault(commitment.node, {})
        known = by_steps.get(steps)
        taken = list_taken(commitment.takeovers, plan, commitment.node)
        if known is None:
            by_steps[steps] = HeldCommitment(commitment.root, (token,), taken, is_final)
            if len(by_steps) > limits.MAX_ENDS:
                del by_steps[min(by_steps)]
        elif known.root and (known.root, known.taken) != (commitment.root, taken):
            by_steps[steps] = HeldCommitment("", (*known.tokens, token), frozenset(), is_final)
        self.changes += by_steps.get(steps) is not known

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
        known = self.counts.get(commitment.node)
        taken = list_taken(commitment.takeovers, plan, commitment.node)
        if known is None:
            self.counts[commitment.node] = HeldCounts(roots, (token,), taken)
        elif known.roots and (known.roots, known.taken) != (roots, taken):
            self.counts[commitment.node] = HeldCounts({}, (*known.tokens, token), frozenset())
        self.changes += self.counts[commitment.node] is not known

    def add_order(self, order: str, plan: Plan) -> int:
        """Return how many steps the plan's client ordered, and note that it did.

        0 if ``order`` is "". Raises PeerFault, BadSignature for what the client did not sign.
        """
        ordered = check_order(order, plan) if order else 0
        self.asked = max(self.asked, ordered)
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
            self.asked = max(self.asked, signed.end.steps)
        if signed.end.final and signed.end.steps not in self.finals and len(self.finals) < 2:
            self.finals[signed.end.steps] = signed
            self.changes += 1

    def list_tokens(self) -> list[str]:
        """Return the commitments here, as their nodes signed them."""
        ends = [held for by_steps in self.by_node.values() for held in by_steps.values()]
        tokens = [token for held in ends for token in held.tokens]
        tokens += [token for counts in self.counts.values() for token in counts.tokens]
        if self.order:
            tokens.append(self.order)
        return list(dict.fromkeys(tokens))

    def list_finals(self, steps: int) -> dict[str, str]:
        """Return the roots for the client's final end after a number of steps, by node."""
        held = ((node, by_steps.get(steps)) for node, by_steps in self.by_node.items())
        return {
            node: one.root for node, one in held if one is not None and one.is_final and one.root
        }

    def list_commitments(self, steps: int) -> dict[str, str]:
        """Return the roots for a number of steps, by node: for the client's ends, or counted."""
        nodes = self.by_node.keys() | self.counts.keys()
        roots = {node: self._list_roots(node).get(steps, "") for node in nodes}
        return {node: root for node, root in roots.items() if root}

    def list_taken(self, steps: int, nodes: Iterable[str]) -> set[tuple[int, int]]:
        """Return the (task, candidate) that nodes answer for, as their commitments show."""
        held = [self.by_node.get(node, {}).get(steps) or self.counts[node] for node in nodes]
        return {name for one in held for name in one.taken}

    def list_numbers(self) -> list[int]:
        """Return the numbers of steps that anybody committed to."""
        nodes = self.by_node.keys() | self.counts.keys()
        return sorted({steps for node in nodes for steps in self._list_roots(node)})

    def _list_roots(self, node: str) -> dict[int, str]:
        """Return a node's roots by number of steps; those for the client's ends come first."""
        counts, ends = self.counts.get(node), self.by_node.get(node, {})
        counted = counts.roots if counts is not None else {}
        return counted | {steps: held.root for steps, held in ends.items()}
