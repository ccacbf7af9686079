"""Proof of Sampling: which tasks are checked, who lied, and who is paid what. Pure functions.

The draw's seed exists only after the outputs were committed. One validator recomputes a drawn task
from the stored inputs; equal digests clear the executor. After a mismatch a third node is asked,
then up to five in all, and finally 2f+1 committee members recompute the task themselves: only their
ruling takes anybody's stake. A node answers only for the inputs that it committed to, so a
validator with different inputs proves nothing about the executor.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.crypto.quorum import Payment, Settlement, Slash
from splitup.graph.manifest import Manifest, Task
from splitup.messages.completions import UNSTATED, Completion, TaskCommitment
from splitup.messages.plans import Plan
from splitup.messages.verification import Draw, Ruling, VerificationResult
from splitup.protocol.execution.ends import check_count, check_end
from splitup.protocol.execution.takeovers import get_candidate, is_given_away
from splitup.protocol.planning.exposure import (
    Economics,
    compute_exposures,
    compute_penalty,
    compute_silence,
)

MAX_JUDGES: Final = 4  # most validators per task; with the executor five nodes
BIT_FLIP_SHARE: Final = 10  # a difference that a bit flip explains costs 1/10 of F


class Outcome(Enum):
    HONEST = "honest"
    LIED = "lied"
    WITHHELD = "withheld"  # the executor committed and never revealed, or did not store its outputs
    CONTRADICTED = "contradicted"  # by its neighbour or the client, which state something else
    OUTVOTED = "outvoted"  # no ruling, more validators contradict than confirm: unpaid
    UNDECIDED = (
        "undecided"  # likewise, but members could have ruled if they had been faster: unpaid
    )
    UNRESOLVED = "unresolved"  # it cannot be decided: paid, and nobody is punished


OFFENCES: Final = frozenset({Outcome.LIED, Outcome.WITHHELD})  # of the executor
UNPAID: Final = OFFENCES | {Outcome.CONTRADICTED, Outcome.OUTVOTED, Outcome.UNDECIDED}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one task's verification; ``liars`` may be validators that accused falsely.

    ``close``: the executor's wrong outputs are within the task's tolerance, so that they would pass
    as right if its class were another.
    """

    task: int
    outcome: Outcome
    validators: tuple[str, ...]  # to be paid
    liars: tuple[str, ...]
    silent: tuple[str, ...] = ()  # validators that committed and revealed too late: unpaid
    close: bool = False


def is_sampled(seed: str, task: int, verify_bps: int) -> bool:
    """Return whether the draw picks ``task``: probability ``verify_bps`` / 10,000 each."""
    return _is_picked(b"splitup/sample/v1", seed, task, verify_bps)


def is_for_outsider(seed: str, task: int, economics: Economics, verify_bps: int) -> bool:
    """Return whether a member, too, recomputes a drawn task, if its validators are few."""
    return _is_picked(
        b"splitup/outsider/v1", seed, task, economics.compute_outsider_bps(verify_bps)
    )


def _is_picked(tag: bytes, seed: str, task: int, share_bps: int) -> bool:
    data = tag + bytes.fromhex(seed[2:]) + task.to_bytes(4, "big")
    value = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    return value * 10_000 < share_bps * 2**64


def get_sampled_tasks(draw: Draw, task_count: int, verify_bps: int) -> tuple[int, ...]:
    """Return the tasks that the draw picks, ascending."""
    return tuple(t for t in range(task_count) if is_sampled(draw.seed, t, verify_bps))


def check_completion(
    completion: Completion,
    plan: Plan,
    manifest: Manifest,
    root: str,
    executors: Sequence[str] = (),
) -> None:
    """Check a revealed completion against the plan and the root its node put on chain.

    ``executors`` answer for the tasks; by default the plan's. A task that the plan gave to the node
    may be missing if the completion shows that the client gave it to another node, which then did
    not commit; one that the node said it had taken over may not. Of a task that was given away the
    state may be unknown. Raises PeerFault naming the node and what is wrong, BadSignature.
    """
    node = completion.node
    planned = plan.executors()
    own = {t for t, executor in enumerate(executors or planned) if executor == node}
    if completion.execution_id != plan.request.execution_id:
        raise PeerFault(f"completion of {node} is for another execution", peer=node)
    if completion.root() != root:
        raise PeerFault(f"completion of {node} does not match the root it committed", peer=node)
    if completion.end.is_count:
        check_count(completion.end, plan)
    else:
        check_end(completion.end, plan, manifest)
    covered = [entry.task for entry in completion.tasks]
    if not covered or covered != sorted(set(covered)) or covered[-1] >= len(plan.tasks):
        raise PeerFault(f"completion of {node} does not list tasks in order", peer=node)
    missing = own - set(covered)
    if not all(planned[t] == node and is_given_away(completion, plan, t) for t in missing):
        raise PeerFault(f"completion of {node} does not cover all its tasks", peer=node)
    for entry in completion.tasks:
        get_candidate(completion, plan, entry.task)
        task = manifest.tasks[entry.task]
        if len(entry.inputs) != len(task.inputs) or len(entry.outputs) != len(task.outputs):
            raise PeerFault(f"completion of {node} misstates task {entry.task}", peer=node)
        is_unstated = completion.end.end.final and entry.state == UNSTATED
        if is_unstated and not is_given_away(completion, plan, entry.task):
            raise PeerFault(f"completion of {node} lacks the state of task {entry.task}", peer=node)


def agrees(claim: TaskCommitment, found: VerificationResult | Ruling) -> bool:
    """Return whether outputs and final state, if it is stated, are the same bytes."""
    return claim.outputs == found.outputs and claim.state in (UNSTATED, found.state)


def find_usable(
    commitment: TaskCommitment, results: Sequence[VerificationResult]
) -> list[VerificationResult]:
    """Return the results over the executor's committed inputs, at most ``MAX_JUDGES``."""
    return [r for r in results if not r.error and r.inputs == commitment.inputs][:MAX_JUDGES]


def count_needed(commitment: TaskCommitment, usable: Sequence[VerificationResult]) -> int:
    """Return how many validators' answers are needed, given those so far."""
    if all(agrees(commitment, result) for result in usable):
        return 1
    return 2 if len(usable) < 2 else MAX_JUDGES


def is_disputed(commitment: TaskCommitment, usable: Sequence[VerificationResult]) -> bool:
    """Return whether an answer contradicts the executor: then the committee recomputes the task."""
    return not all(agrees(commitment, result) for result in usable)


def compute_ruling_s(memory_bytes: int, steps: int) -> float:
    """Return how long a member may take to recompute a task of this size, in seconds."""
    step_s = max(limits.RULING_STEP_S, memory_bytes / limits.RULING_BYTES_PER_S)
    return limits.RULING_S + step_s * steps


def judge(
    commitment: TaskCommitment,
    executor: str,
    usable: Sequence[VerificationResult],
    ruling: Ruling | None,
    compared: Mapping[str, Ruling | None] = MappingProxyType({}),
    *,
    in_time: bool = True,
) -> Verdict:
    """Return the final verdict on a task, once all needed answers are here.

    ``usable`` are in the order of the validators' ranks. ``ruling`` is what 2f+1 members
    recomputed, None when they cannot, or not ``in_time``; if they compared across classes,
    ``compared`` are their rulings on each validator. Several validators may belong to one operator,
    so their answers alone never cost stake: without a ruling they decide only about the pay.
    """
    task = commitment.task
    contradicting = [r for r in usable if not agrees(commitment, r)]
    if ruling is not None and ruling.inputs != commitment.inputs:
        ruling = None
    if ruling is not None and ruling.compared:
        return _judge_numbers(task, executor, usable, ruling, compared)
    if ruling is None and not in_time:
        is_backed = 0 < len(contradicting) <= len(usable) - len(contradicting)
        return Verdict(task, Outcome.UNRESOLVED if is_backed else Outcome.UNDECIDED, (), ())
    if usable and not contradicting and ruling is None:
        return Verdict(task, Outcome.HONEST, (usable[0].validator,), ())
    if ruling is None:
        outvoted = 2 * len(contradicting) > len(usable) + 1
        return Verdict(task, Outcome.OUTVOTED if outvoted else Outcome.UNRESOLVED, (), ())
    truth = (ruling.outputs, ruling.state)
    right = tuple(r.validator for r in usable if (r.outputs, r.state) == truth)
    wrong = tuple(r.validator for r in usable if (r.outputs, r.state) != truth)
    if agrees(commitment, ruling):
        return Verdict(task, Outcome.HONEST, right, wrong)
    return Verdict(task, Outcome.LIED, right, (executor, *wrong), close=ruling.close)


def _judge_numbers(
    task: int,
    executor: str,
    usable: Sequence[VerificationResult],
    ruling: Ruling,
    compared: Mapping[str, Ruling | None],
) -> Verdict:
    """Return the verdict where members compared each party's outputs with their own.

    Outputs within the tolerance are right, and several different ones may be; states are not
    compared. A validator that has not stored the outputs to which it committed lied: it stores them
    first. One on which there is no ruling is neither paid nor punished.
    """
    outcome = Outcome.WITHHELD if ruling.missing else Outcome.LIED
    if ruling.outputs:
        outcome = Outcome.HONEST
    right: list[str] = []
    wrong = [executor] if outcome is Outcome.LIED else []
    for result in usable:
        found = compared.get(result.validator)
        if found is not None:
            (right if found.outputs else wrong).append(result.validator)
    return Verdict(task, outcome, tuple(right), tuple(wrong))


def compute_settlement(
    plan: Plan,
    manifest: Manifest,
    steps: int,
    withheld: Collection[str],
    verdicts: Sequence[Verdict],
    economics: Economics,
    executors: Sequence[str] = (),
    locked: Mapping[str, int] | None = None,
    *,
    evidence_root: str,
) -> Settlement:
    """Return who is paid and who is slashed for an execution that every executor committed to.

    ``executors`` are the nodes that ran the tasks; by default the plan's. ``locked`` is what the
    chain locked of each one's stake, which after recent offences is more than F and S for its
    tasks; by default no more.

    Executors earn the price of their tasks for every step, per task rounded down to micro-USDC.
    They earn nothing for tasks they lied about, and nothing at all if they never revealed their
    completion (``withheld``). Validators earn as much for the task they recomputed.

    An executor pays S for each lie, and less for each drawn task of a completion that it withholds
    (``Economics.silence_milli``). In both cases it also pays what is locked besides S for its
    tasks, F or more, once: wherever the lie earns something outside, hiding it must not be cheaper.
    Only a tenth of F is due for a single difference within the tolerance, by a node without recent
    offences: a bit that flipped explains it. A validator pays S and a tenth of F for each lie. One
    that commits and is not heard earns nothing and pays nothing: it may just be slow.

    Of each slash the treasury gets its share first. The rest pays the validators of that task, then
    refunds the client up to the price of the whole execution, and what remains is the treasury's,
    too, so nobody profits from slashing itself. The contract would scale down larger payments,
    which these rules never produce.

    The contract takes ``limits.MAX_SLASHES`` slashes. If more nodes are guilty, those with the
    largest penalties are slashed, of equal ones those with the lowest accounts. What the others
    would have paid is not distributed; validators for whom the list of payments out of slashes
    has no place are paid out of the escrow, like those of right results.
    """
    by_task = {verdict.task: verdict for verdict in verdicts}
    executors = executors or plan.executors()
    floors = _compute_floors(plan, manifest, executors, verdicts, economics, locked or {})
    price = [task.pay_micro_usdc(steps) for task in manifest.tasks]
    earned: Counter[str] = Counter()
    from_slash: Counter[str] = Counter()
    slashed: Counter[str] = Counter()
    for index, executor in enumerate(executors):
        verdict = by_task.get(index)
        if executor not in withheld and (verdict is None or verdict.outcome not in UNPAID):
            earned[executor] += price[index]
        if verdict is None:
            continue
        penalties = _compute_penalties(verdict, executor, manifest.tasks[index], steps, economics)
        if verdict.outcome in OFFENCES:
            penalties[executor] += floors.pop(executor, 0)
        slashed.update(penalties)
        funds = economics.compute_rewards(penalties.total())
        pot = from_slash
        has_room = len(from_slash.keys() | set(verdict.validators)) < limits.MAX_SLASHES
        if not penalties or not has_room:  # the escrow holds one verification of every task
            pot, funds = earned, price[index]
        for validator in verdict.validators:
            if funds >= price[index]:
                funds -= price[index]
                pot[validator] += price[index]
    kept = sorted(slashed.items(), key=lambda item: (-item[1], item[0]))[: limits.MAX_SLASHES]
    if any(verdict.outcome in UNPAID for verdict in verdicts):
        left = economics.compute_rewards(sum(amount for _, amount in kept)) - from_slash.total()
        from_slash[plan.request.client] += max(0, min(sum(price), left))
    payments = [Payment(to, amount, False) for to, amount in sorted(earned.items()) if amount]
    payments += [Payment(to, amount, True) for to, amount in sorted(from_slash.items()) if amount]
    return Settlement(
        steps=steps,
        evidence_root=evidence_root,
        payments=tuple(payments),
        slashes=tuple(Slash(node, amount) for node, amount in sorted(kept) if amount),
    )


def _compute_floors(
    plan: Plan,
    manifest: Manifest,
    executors: Sequence[str],
    verdicts: Sequence[Verdict],
    economics: Economics,
    locked: Mapping[str, int],
) -> dict[str, int]:
    """Return what each executor pays once, if it lied or withheld anything."""
    offences: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.outcome in OFFENCES:
            offences.setdefault(executors[verdict.task], []).append(verdict)
    least = economics.floor_micro_usdc
    floors = {}
    for node, exposed in compute_exposures(plan, manifest, executors, economics):
        floors[node] = least + max(0, locked.get(node, exposed) - exposed)
        found = offences.get(node, [])
        if floors[node] == least and len(found) == 1 and found[0].close:
            floors[node] = least // BIT_FLIP_SHARE
    return floors


def _compute_penalties(
    verdict: Verdict, executor: str, task: Task, steps: int, economics: Economics
) -> Counter[str]:
    """Return the stake that each node loses for one task, without what an executor pays once."""
    penalties: Counter[str] = Counter()
    for liar in verdict.liars:
        penalties[liar] += compute_penalty(task, steps, economics)
        if liar != executor:
            penalties[liar] += economics.floor_micro_usdc // BIT_FLIP_SHARE
    if verdict.outcome is Outcome.WITHHELD:
        penalties[executor] += compute_silence(task, steps, economics)
    return penalties
