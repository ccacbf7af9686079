"""Proof of Sampling: which tasks are checked, who lied, and who is paid what. Pure functions.

The draw's seed exists only after the outputs were committed. A drawn task is recomputed from the
stored inputs; equal digests clear the executor, and a third node breaks a tie. A node answers only
for the inputs it committed to: a validator whose inputs differ says nothing about the executor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from splitup.errors import PeerFault
from splitup.graph.manifest import Manifest
from splitup.protocol.takeovers import get_candidate
from splitup.wire import Completion, Draw, Plan, TaskCommitment, VerificationResult


@dataclass(frozen=True, slots=True)
class Economics:
    """The Market contract's parameters that settlement needs.

    ``sampling_bps`` is p in 1/10,000; a price pays R = ``reward_milli``/1000 of a task's cost C,
    and a proven lie costs S = ``slash_milli``/1000 of C.
    """

    sampling_bps: int
    reward_milli: int
    slash_milli: int


class Outcome(Enum):
    HONEST = "honest"
    LIED = "lied"
    UNRESOLVED = "unresolved"  # no majority, or nobody could recompute it: nobody is punished


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of one task's verification; ``liars`` may name a validator that accused falsely."""

    task: int
    outcome: Outcome
    validators: tuple[str, ...]  # to be paid
    liars: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Payment:
    to: str
    amount_micro_usdc: int
    from_slash: bool


@dataclass(frozen=True, slots=True)
class Slash:
    node: str
    amount_micro_usdc: int


@dataclass(frozen=True, slots=True)
class SettlementTerms:
    """What the committee signs: who gets what, in the order the contract encodes it."""

    execution_id: str
    steps: int
    payments: tuple[Payment, ...]
    slashes: tuple[Slash, ...]


def is_sampled(seed: str, task: int, sampling_bps: int) -> bool:
    """Return whether the draw picks ``task``: probability ``sampling_bps`` / 10,000 each."""
    data = b"splitup/sample/v1" + bytes.fromhex(seed[2:]) + task.to_bytes(4, "big")
    value = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    return value * 10_000 < sampling_bps * 2**64


def get_sampled_tasks(draw: Draw, task_count: int, sampling_bps: int) -> tuple[int, ...]:
    """Return the tasks that the draw picks, ascending."""
    return tuple(t for t in range(task_count) if is_sampled(draw.seed, t, sampling_bps))


def check_completion(completion: Completion, plan: Plan, manifest: Manifest, root: str) -> None:
    """Check a revealed completion against the plan and the root its node put on chain.

    Raises PeerFault naming the node and what does not fit.
    """
    node = completion.node
    if completion.execution_id != plan.request.execution_id:
        raise PeerFault(f"completion of {node} is for another execution", peer=node)
    if completion.root() != root:
        raise PeerFault(f"completion of {node} does not match the root it committed", peer=node)
    if completion.steps > plan.request.steps:
        raise PeerFault(f"completion of {node} claims more steps than were paid for", peer=node)
    covered = [entry.task for entry in completion.tasks]
    if not covered or covered != sorted(set(covered)) or covered[-1] >= len(plan.tasks):
        raise PeerFault(f"completion of {node} does not list tasks in order", peer=node)
    for entry in completion.tasks:
        get_candidate(completion, plan, entry.task)
        task = manifest.tasks[entry.task]
        if (
            entry.task_id != task.task_id
            or len(entry.inputs) != len(task.inputs)
            or len(entry.outputs) != len(task.outputs)
        ):
            raise PeerFault(f"completion of {node} misstates task {entry.task}", peer=node)


def judge(
    commitment: TaskCommitment, executor: str, results: Sequence[VerificationResult]
) -> Verdict | None:
    """Return the verdict on one task, or None while another validator has to be heard.

    ``results`` are in the order of the validators' ranks. Only results over the executor's
    committed inputs count, and at most two of them.
    """
    usable = [r for r in results if not r.error and r.inputs == commitment.inputs][:2]
    if not usable:
        return None
    first = usable[0]
    if first.outputs == commitment.outputs:
        return Verdict(commitment.task, Outcome.HONEST, (first.validator,), ())
    if len(usable) < 2:
        return None
    second = usable[1]
    if second.outputs == commitment.outputs:
        return Verdict(commitment.task, Outcome.HONEST, (second.validator,), (first.validator,))
    if second.outputs == first.outputs:
        both = (first.validator, second.validator)
        return Verdict(commitment.task, Outcome.LIED, both, (executor,))
    return Verdict(commitment.task, Outcome.UNRESOLVED, (), ())


def compute_settlement(
    plan: Plan,
    manifest: Manifest,
    completions: Mapping[str, Completion],
    verdicts: Sequence[Verdict],
    economics: Economics,
    executors: Sequence[str] | None = None,
) -> SettlementTerms:
    """Return who is paid and who is slashed for an execution that every executor completed.

    ``executors`` ran the tasks in the end; by default the plan's first candidates.

    Executors earn the price of their tasks for every step, except for tasks they lied about;
    validators earn the price of the task they recomputed. A liar pays S for each lie: out of it the
    validators who found it are paid, then the client gets back the price of the whole execution, as
    far as it reaches; the rest is the treasury's, so that slashing oneself does not pay.
    """
    steps = min(completion.steps for completion in completions.values())
    by_task = {verdict.task: verdict for verdict in verdicts}
    price = [task.price_micro_usdc * steps for task in manifest.tasks]
    earned: dict[str, int] = {}
    from_slash: dict[str, int] = {}
    slashed: dict[str, int] = {}
    for index, executor in enumerate(executors or plan.executors()):
        verdict = by_task.get(index)
        lied = verdict is not None and verdict.outcome is Outcome.LIED
        if not lied:
            earned[executor] = earned.get(executor, 0) + price[index]
        if verdict is None:
            continue
        for liar in verdict.liars:
            penalty = price[index] * economics.slash_milli // economics.reward_milli
            slashed[liar] = slashed.get(liar, 0) + penalty
        pot = from_slash if verdict.liars else earned
        for validator in verdict.validators:
            pot[validator] = pot.get(validator, 0) + price[index]
    if any(verdict.outcome is Outcome.LIED for verdict in verdicts):
        left = sum(slashed.values()) - sum(from_slash.values())
        from_slash[plan.request.client] = min(sum(price), left)
    payments = [Payment(to, amount, False) for to, amount in sorted(earned.items()) if amount]
    payments += [Payment(to, amount, True) for to, amount in sorted(from_slash.items()) if amount]
    return SettlementTerms(
        execution_id=plan.request.execution_id,
        steps=steps,
        payments=tuple(payments),
        slashes=tuple(Slash(node, amount) for node, amount in sorted(slashed.items()) if amount),
    )
