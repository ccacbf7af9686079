"""A market of honest and cheating nodes over hundreds of thousands of tasks, seeded.

It uses the protocol's own functions: ``is_sampled`` decides for every task whether it is verified,
``count_needed`` how many judges are heard, and ``judge`` every verdict. Judges and money are
computed for all tasks at once, because the real functions take milliseconds each; the tests show on
samples that ``order_judges`` equals ``rank_validators`` and that ``settle`` equals
``compute_settlement``, to the micro-USDC.

Profits are counted by role: executing a task, or judging one. Arrays are ``[E, n]`` for the
executing roles (E executions of a chain of n tasks) and ``[M, J]`` for the judging ones (M sampled
tasks, J judges in the order in which they are asked).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from splitup.messages.completions import EMPTY_DIGEST, TaskCommitment
from splitup.messages.verification import Ruling, VerificationResult
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.settlement.proof_of_sampling import (
    MAX_JUDGES,
    UNPAID,
    Outcome,
    count_needed,
    find_usable,
    is_disputed,
    is_sampled,
    judge,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COST_MICRO_USDC: Final = 1_000  # C, per task: everything below scales with it
NOBODY: Final = -1  # where a small market has no further judge

# The output that a role claims, as a number: equal numbers are equal bytes.
RIGHT: Final = 0
RING_LIE: Final = -1  # the wrong output that a ring has agreed on
LOW_PRECISION: Final = -2  # the same cheaper kernels give the same wrong bytes
_EXECUTOR_GARBAGE: Final = 1  # plus the task's number: no two are equal …
_JUDGE_GARBAGE: Final = 1 << 40  # … nor equal to these

_UNHEARD: Final = -3  # no answer

_BEHIND: Final = 1e9  # added to the clocks of neighbours, which are asked after all others


@dataclass(frozen=True, slots=True)
class Draws:
    """All random choices of a market; ``Behaviour`` holds what the nodes do."""

    nodes: int
    executors: Ints  # [E, n]
    sampled: Ints  # [M]: number of the task, execution * n + place in the chain
    judges: Ints  # [M, J]: NOBODY where there is none left

    @property
    def shape(self) -> tuple[int, int]:
        executions, tasks = self.executors.shape
        return executions, tasks

    def add_up(self, of_sampled: Floats) -> Floats:
        """Sum values of the sampled tasks [M] per execution [E]."""
        executions, tasks = self.executors.shape
        sums = np.bincount(self.sampled // tasks, weights=of_sampled, minlength=executions)
        return sums.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What every role claims and spends, and which roles belong to cheaters."""

    claims: Ints  # [E, n]
    answers: Ints  # [M, J], should the judge be asked
    execution_cost: Floats  # [E, n], in C
    answer_cost: Floats  # [M, J], in C, spent only when the judge is asked
    cheating_executors: Bools  # [E, n]
    cheating_judges: Bools  # [M, J]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What ``judge`` said about every sampled task."""

    outcomes: NDArray[np.object_]  # [M]
    heard: Bools  # [M, J]: asked, and therefore computed
    paid: Bools  # [M, J]
    accused_falsely: Bools  # [M, J]: judges that are slashed
    lied: Bools  # [M]: executors that are slashed
    unpaid: Bools  # [M]: executors that are not paid
    disputed: Bools  # [M]: tasks that the committee recomputed, or would have


@dataclass(frozen=True, slots=True)
class Money:
    """All payments and slashes, in micro-USDC."""

    to_executors: Ints  # [E, n]
    from_executors: Ints  # [E, n]: slashed
    to_judges: Ints  # [M, J]
    from_judges: Ints  # [M, J]: slashed
    from_client: Ints  # [E]: out of the deposit, to executors and judges
    to_client: Ints  # [E]: out of slashed stake; the unspent deposit is not counted
    to_treasury: Ints  # [E]


# ---- random choices ----------------------------------------------------------------------------


def draw_market(
    seed: int, nodes: int, executions: int, tasks: int, sampling_bps: int, *, weights: Floats
) -> Draws:
    """Draw executors, sampled tasks and their judges for chains of ``tasks`` tasks.

    ``weights`` [nodes] are those of the selection; the node with the smallest of independent
    exponential clocks is drawn, that is with probability weight / sum of weights.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    edges = np.cumsum(weights) / weights.sum()
    uniform = rng.random((executions, tasks))
    executors = np.minimum(np.searchsorted(edges, uniform, side="right"), nodes - 1)
    sampled = np.array(
        [
            execution * tasks + task
            for execution in range(executions)
            for draw in (_draw_seed(seed, execution),)
            for task in range(tasks)
            if is_sampled(draw, task, sampling_bps)
        ],
        dtype=np.int64,
    )
    clocks = -np.log1p(-rng.random((len(sampled), nodes))) / weights
    judges = order_judges(clocks, executors, sampled)
    return Draws(nodes, executors.astype(np.int64), sampled, judges)


def order_judges(clocks: Floats, executors: Ints, sampled: Ints) -> Ints:
    """Return the first judges [M, J] by their clocks [M, N]: never the executor, neighbours last.

    The rule of ``selection.rank_validators`` for a chain of tasks that every node holds.
    """
    tasks = executors.shape[1]
    execution, task = sampled // tasks, sampled % tasks
    rows = np.arange(len(sampled))
    executor = executors[execution, task]
    clocks = clocks.copy()
    near = np.zeros(clocks.shape, dtype=np.bool_)
    near[rows, executors[execution, np.maximum(task - 1, 0)]] |= task > 0
    near[rows, executors[execution, np.minimum(task + 1, tasks - 1)]] |= task < tasks - 1
    clocks[near] += _BEHIND
    clocks[rows, executor] = np.inf
    count = min(MAX_JUDGES, clocks.shape[1])
    first = np.argpartition(clocks, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(clocks, first, axis=1), axis=1)
    judges = np.take_along_axis(first, order, axis=1)
    judges[judges == executor[:, None]] = NOBODY
    padded = np.full((len(sampled), MAX_JUDGES), NOBODY, dtype=np.int64)
    padded[:, :count] = judges
    return padded


def _draw_seed(seed: int, execution: int) -> str:
    return "0x" + hashlib.sha256(f"market {seed} draw {execution}".encode()).hexdigest()


# ---- verdicts ----------------------------------------------------------------------------------


def judge_all(draws: Draws, behaviour: Behaviour, *, ruled: bool = True) -> Verdicts:
    """Ask the judges of every sampled task in turn until the protocol has heard enough of them.

    A verdict depends only on which of the answers are equal to each other and to the right one, so
    that the protocol is called once for every pattern of equality. ``ruled``: whether the members
    can recompute what is disputed; they get the right output then.
    """
    count = len(draws.sampled)
    claims = behaviour.claims.reshape(-1)[draws.sampled]
    outcomes = np.full(count, Outcome.UNRESOLVED, dtype=object)
    heard, paid, accused = (np.zeros((count, MAX_JUDGES), dtype=np.bool_) for _ in range(3))
    disputed = np.zeros(count, dtype=np.bool_)
    open_rows = np.arange(count)
    for depth in range(1, MAX_JUDGES + 1):
        is_left = draws.judges[open_rows, depth - 1] != NOBODY
        for rows, asked in ((open_rows[~is_left], depth - 1), (open_rows[is_left], depth)):
            heard[rows, :asked] = True
        right = np.full(len(open_rows), RIGHT, dtype=np.int64)
        answers = np.where(heard[open_rows], behaviour.answers[open_rows], _UNHEARD)
        said = np.column_stack((right, claims[open_rows], answers[:, :depth], is_left))
        patterns, which = np.unique(_name_by_first(said), axis=0, return_inverse=True)
        decided = np.zeros(len(open_rows), dtype=np.bool_)
        for number, _ in enumerate(patterns):
            mine = which.reshape(-1) == number
            example = said[np.argmax(mine)]
            given = [int(v) for v in example[2:-1] if v != _UNHEARD]
            verdict = judge_pattern(int(example[1]), given, bool(example[-1]), ruled=ruled)
            if verdict is None:
                continue
            outcome, paid_places, liar_places, is_open = verdict
            rows = open_rows[mine]
            decided |= mine
            outcomes[rows] = outcome
            disputed[rows] = is_open
            for place in paid_places:
                paid[rows, place] = True
            for place in liar_places:
                accused[rows, place] = True
        open_rows = open_rows[~decided]
    unpaid = np.isin(outcomes.astype(str), [str(outcome) for outcome in UNPAID])
    return Verdicts(outcomes, heard, paid, accused, outcomes == Outcome.LIED, unpaid, disputed)


def judge_pattern(
    claim: int, answers: list[int], more: bool, *, ruled: bool
) -> tuple[Outcome, list[int], list[int], bool] | None:
    """Let the protocol judge a claim and the answers so far; return judges by their place.

    Returns (outcome, judges to be paid, judges that accused falsely, whether it was disputed), or
    None when another judge must be heard and there are ``more``.
    """
    executor, inputs = f"0x{0xE:040x}", ("1" * 64,)
    names = [f"0x{1000 + place:040x}" for place in range(len(answers))]
    commitment = TaskCommitment(
        task=0,
        inputs=inputs,
        outputs=(digest_of(claim),),
        state=EMPTY_DIGEST,
    )
    results = [
        VerificationResult(
            execution_id="0x" + "e" * 64,
            task=0,
            validator=name,
            inputs=inputs,
            outputs=(digest_of(answer),),
            state=EMPTY_DIGEST,
            salt="0x" + "5" * 64,
            error="",
        )
        for name, answer in zip(names, answers, strict=True)
    ]
    usable = find_usable(commitment, results)
    if more and len(usable) < count_needed(commitment, usable):
        return None
    ruling = Ruling(
        task=0, inputs=inputs, outputs=(digest_of(RIGHT),), state=EMPTY_DIGEST, error=""
    )
    disputed = is_disputed(commitment, usable)
    is_asked = ruled and (disputed or not usable)
    verdict = judge(commitment, executor, usable, ruling if is_asked else None)
    liars = [names.index(liar) for liar in verdict.liars if liar != executor]
    return verdict.outcome, [names.index(name) for name in verdict.validators], liars, disputed


def digest_of(value: int) -> str:
    """Return the digest that stands for an output."""
    return f"{int(value) % 2**64:064x}"


def _name_by_first(said: Ints) -> Ints:
    """Replace every value of a row by the column in which it stands first."""
    equal = said[:, :, None] == said[:, None, :]
    return np.asarray(np.argmax(equal, axis=2))


# ---- money -------------------------------------------------------------------------------------


def settle(draws: Draws, verdicts: Verdicts, economics: Economics) -> Money:
    """Return what ``verification.compute_settlement`` pays and slashes, for all executions."""
    executions, tasks = draws.shape
    price = COST_MICRO_USDC * economics.reward_milli // 1000
    penalty = price * economics.slash_milli // economics.reward_milli

    def per_execution(values: Ints) -> Ints:
        return draws.add_up(values.astype(np.float64)).astype(np.int64)  # exact below 2^53

    convicted = np.zeros(executions * tasks, dtype=np.int64)
    convicted[draws.sampled[verdicts.lied]] = 1
    unpaid = np.zeros(executions * tasks, dtype=np.int64)
    unpaid[draws.sampled[verdicts.unpaid]] = 1
    to_executors = price * (1 - unpaid.reshape(executions, tasks))
    from_executors = penalty * convicted.reshape(executions, tasks)
    to_judges = price * verdicts.paid.astype(np.int64)
    from_judges = penalty * verdicts.accused_falsely.astype(np.int64)

    has_liars = verdicts.lied | verdicts.accused_falsely.any(axis=1)
    fees = to_judges.sum(axis=1)
    slashed = from_executors.sum(axis=1) + per_execution(from_judges.sum(axis=1))
    rewarded = per_execution(np.where(has_liars, fees, 0))
    left = slashed * (10_000 - economics.treasury_bps) // 10_000 - rewarded
    wronged = (unpaid.reshape(executions, tasks) == 1).any(axis=1)
    to_client = np.where(wronged, np.minimum(tasks * price, left), 0)
    return Money(
        to_executors=to_executors,
        from_executors=from_executors,
        to_judges=to_judges,
        from_judges=from_judges,
        from_client=to_executors.sum(axis=1) + per_execution(np.where(has_liars, 0, fees)),
        to_client=to_client,
        to_treasury=slashed - rewarded - to_client,
    )


# ---- profits -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half-width of its 95 % confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half_width:.3f}"


def estimate_ratio(values: Floats, counts: Floats) -> Estimate:
    """Estimate sum(values) / sum(counts) over independent executions, by linearisation."""
    ratio = float(values.sum() / counts.sum())
    residuals = values - ratio * counts
    half_width = 1.96 * float(residuals.std()) * len(values) ** 0.5 / float(counts.sum())
    return Estimate(ratio, half_width)


def compute_profit(
    draws: Draws, behaviour: Behaviour, verdicts: Verdicts, money: Money, *, of_cheats: bool
) -> Floats:
    """Return the profit per execution [E], in C, of the cheaters' roles or of all others."""
    executing = behaviour.cheating_executors == of_cheats
    judging = behaviour.cheating_judges == of_cheats
    executed = (money.to_executors - money.from_executors) / COST_MICRO_USDC
    judged = (money.to_judges - money.from_judges) / COST_MICRO_USDC
    executed -= behaviour.execution_cost
    judged -= behaviour.answer_cost * verdicts.heard
    of_judges = draws.add_up(np.where(judging, judged, 0).sum(axis=1))
    return np.asarray(np.where(executing, executed, 0).sum(axis=1) + of_judges)


# ---- behaviours --------------------------------------------------------------------------------


def behave_honestly(draws: Draws) -> Behaviour:
    """Everybody computes what is asked; the other behaviours start from this one."""
    executions, tasks = draws.shape
    judges = draws.judges.shape
    return Behaviour(
        claims=np.full((executions, tasks), RIGHT, dtype=np.int64),
        answers=np.full(judges, RIGHT, dtype=np.int64),
        execution_cost=np.ones((executions, tasks)),
        answer_cost=np.ones(judges),
        cheating_executors=np.zeros((executions, tasks), dtype=np.bool_),
        cheating_judges=np.zeros(judges, dtype=np.bool_),
    )


def make_garbage(draws: Draws) -> tuple[Ints, Ints]:
    """Return outputs for executors [E, n] and judges [M, J] of which no two are equal."""
    claims = _EXECUTOR_GARBAGE + np.arange(draws.executors.size).reshape(draws.shape)
    answers = _JUDGE_GARBAGE + np.arange(draws.judges.size).reshape(draws.judges.shape)
    return claims.astype(np.int64), answers.astype(np.int64)


def get_sampled(draws: Draws, of_tasks: Ints) -> Ints:
    """Return the entries [M, 1] of an ``[E, n]`` array that belong to the sampled tasks."""
    return of_tasks.reshape(-1)[draws.sampled][:, None]
