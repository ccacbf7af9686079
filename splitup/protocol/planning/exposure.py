"""What an execution exposes of a node's stake: the contract's parameters and pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitup.core import limits, tuning
from splitup.core.errors import InvalidInput
from splitup.graph.manifest import Manifest, Task
from splitup.messages.plans import Plan
from splitup.messages.snapshots import Snapshot


@dataclass(frozen=True, slots=True)
class Economics:
    """The Market contract's parameters that settlement needs.

    ``sampling_bps`` is p in 1/10,000, the least share of tasks that a request may have verified.
    A price pays R = ``reward_milli``/1000 of a task's cost C,
    and a proven lie costs S = ``slash_milli``/1000 of C, of which at least ``treasury_bps`` in
    1/10,000 are the treasury's. ``floor_micro_usdc`` is F, what an execution exposes of an executor
    besides S for each of its tasks.
    """

    sampling_bps: int
    reward_milli: int
    slash_milli: int
    treasury_bps: int = 2_000
    floor_micro_usdc: int = limits.EXPOSURE_FLOOR_MICRO_USDC

    def compute_rewards(self, slashed_micro_usdc: int) -> int:
        """Return a slash without the treasury's share, rounded as by the contract."""
        return slashed_micro_usdc * (10_000 - self.treasury_bps) // 10_000

    @property
    def silence_milli(self) -> int:
        """The cost of withholding a drawn completion, in 1/1000 of C: twice the break-even C / p.

        It is less than S, because a crash looks the same, and enough to make hiding a lie a loss.
        A request with a larger share does not lower it: a liar that knows it will be drawn would
        rather be silent.
        """
        return min(self.slash_milli, 2 * 1000 * 10_000 // max(1, self.sampling_bps))

    def compute_outsider_bps(self, verify_bps: int) -> int:
        """Return the share, in 1/10,000, of drawn tasks of small pools that a member recomputes.

        If all validators repeat the executor's lie, it is found with probability p q 2/3, as two
        thirds of the members are honest. A lie saves C and then costs R + S, so it loses when
        q > 3/2 C / (p (R + S)). A third is added: q = 2 C / (p (R + S)). With p = ``verify_bps``,
        the request's share, the members' work per task, p q, is the same for every share.
        """
        stake_milli = max(1, verify_bps * (self.reward_milli + self.slash_milli))
        return min(10_000, -(-2 * 1000 * 10_000 * 10_000 // stake_milli))


def compute_penalty(task: Task, steps: int, economics: Economics) -> int:
    """Return S for a task over these steps: what one proven lie costs, in micro-USDC."""
    return _multiply(task, steps, economics.slash_milli, economics)


def compute_silence(task: Task, steps: int, economics: Economics) -> int:
    """Return what withholding a drawn task costs, in micro-USDC."""
    return _multiply(task, steps, economics.silence_milli, economics)


def _multiply(task: Task, steps: int, milli: int, economics: Economics) -> int:
    """Return so many thousandths of a task's cost C; a task too small to be paid can cost stake."""
    price = task.price_nano_usdc * steps
    return price * milli // (economics.reward_milli * limits.NANO_PER_MICRO)


def compute_exposure(
    tasks: Iterable[int], manifest: Manifest, steps: int, economics: Economics
) -> int:
    """Return what an executor of these tasks is exposed with: F, and S for each, in micro-USDC."""
    penalties = (compute_penalty(manifest.tasks[task], steps, economics) for task in tasks)
    return economics.floor_micro_usdc + sum(penalties)


def compute_exposures(
    plan: Plan, manifest: Manifest, executors: Sequence[str], economics: Economics
) -> tuple[tuple[str, int], ...]:
    """Return (executor, micro-USDC), sorted by executor, that the chain locks with the commitments.

    ``executors`` answer for the tasks; empty for the plan's.
    """
    tasks: dict[str, list[int]] = {}
    for task, executor in enumerate(executors or plan.executors()):
        tasks.setdefault(executor, []).append(task)
    steps = plan.request.steps
    return tuple(
        (node, compute_exposure(own, manifest, steps, economics))
        for node, own in sorted(tasks.items())
    )


def compute_spare(least_micro_usdc: int, percent: float = tuning.STAKE_SPARE_PERCENT) -> int:
    """Return what a node puts down above its least stake, rounded up.

    Raises InvalidInput for a share that is no number from 0 to 1,000 percent.
    """
    if not 0 <= percent <= 1_000:
        raise InvalidInput(f"a spare of {percent:g} % is not one from 0 to 1000")
    return math.ceil(least_micro_usdc * percent / 100)


def add_exposures(plan: Plan, manifest: Manifest, snapshot: Snapshot, economics: Economics) -> Plan:
    """Return the plan with the exposure of every executor: F, and S for each of its tasks.

    A node whose free stake does not cover its exposure is passed over, because the chain would
    refuse its commitment. Raises InvalidInput when no candidate is left for a task.
    """
    free = {entry.node: entry.free_micro_usdc for entry in snapshot.entries}
    exposures: dict[str, int] = {}
    places: list[int] = []
    floor = economics.floor_micro_usdc
    for number, (task, listed) in enumerate(zip(manifest.tasks, plan.tasks, strict=True)):
        penalty = compute_penalty(task, plan.request.steps, economics)
        able = [p for p, n in enumerate(listed) if exposures.get(n, floor) + penalty <= free[n]]
        if not able:
            raise InvalidInput(
                f"no node's free stake covers task {number} ({task.label}) over "
                f"{plan.request.steps} steps; ask for fewer, or wait until executions have ended"
            )
        places.append(able[0])
        executor = listed[able[0]]
        exposures[executor] = exposures.get(executor, floor) + penalty
    nodes = tuple(
        entry.model_copy(update={"exposure_micro_usdc": exposures.get(entry.node, 0)})
        for entry in plan.nodes
    )
    return plan.model_copy(update={"nodes": nodes, "places": tuple(places) if any(places) else ()})
