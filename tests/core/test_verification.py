from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.errors import PeerFault
from splitup.protocol.selection import compute_plan
from splitup.protocol.verification import (
    Economics,
    Outcome,
    Verdict,
    check_completion,
    compute_settlement,
    is_sampled,
    judge,
)
from splitup.wire import Completion, Plan, TaskCommitment, VerificationResult
from tests.builders import (
    PRICE_MICRO_USDC,
    make_chain_manifest,
    make_request,
    make_snapshot,
    task_id,
)

TASKS, STEPS = 4, 4
MANIFEST = make_chain_manifest(TASKS)
PLAN = compute_plan(make_request(STEPS), f"0x{7:064x}", make_snapshot(6, TASKS), MANIFEST)
ECONOMICS = Economics(sampling_bps=800, reward_milli=1200, slash_milli=100_000)
GOOD, BAD, WORSE, IN = "a" * 64, "b" * 64, "c" * 64, "1" * 64
V1, V2, V3 = (f"0x{n:040x}" for n in (101, 102, 103))


def commitment(task: int = 0, output: str = GOOD) -> TaskCommitment:
    return TaskCommitment(task=task, task_id=task_id(task), inputs=(IN,), outputs=(output,))


def result(validator: str, output: str, *, inputs: str = IN, error: str = "") -> VerificationResult:
    return VerificationResult(
        execution_id=PLAN.request.execution_id,
        task=0,
        validator=validator,
        inputs=(inputs,),
        outputs=(output,),
        error=error,
    )


def completions(plan: Plan = PLAN, steps: int = STEPS) -> dict[str, Completion]:
    found: dict[str, list[TaskCommitment]] = {}
    for task, executor in enumerate(plan.executors()):
        found.setdefault(executor, []).append(commitment(task))
    return {
        node: Completion(
            execution_id=plan.request.execution_id,
            node=node,
            steps=steps,
            tasks=tuple(tasks),
            salt="0x" + "5" * 64,
        )
        for node, tasks in found.items()
    }


def test_sampling_rate_is_eight_percent() -> None:
    drawn = sum(is_sampled(f"0x{i:064x}", t, 800) for i in range(400) for t in range(50))
    assert 0.073 < drawn / 20_000 < 0.087  # 3.6 sigma
    assert not any(is_sampled(f"0x{i:064x}", 0, 0) for i in range(100))
    assert all(is_sampled(f"0x{i:064x}", 0, 10_000) for i in range(100))


def test_equal_outputs_clear_the_executor() -> None:
    verdict = judge(commitment(), "executor", [result(V1, GOOD)])
    assert verdict == Verdict(0, Outcome.HONEST, (V1,), ())


def test_one_accuser_is_not_enough() -> None:
    assert judge(commitment(), "executor", []) is None
    assert judge(commitment(), "executor", [result(V1, BAD)]) is None


def test_two_equal_recomputations_convict() -> None:
    verdict = judge(commitment(output=BAD), "executor", [result(V1, GOOD), result(V2, GOOD)])
    assert verdict == Verdict(0, Outcome.LIED, (V1, V2), ("executor",))


def test_a_false_accuser_is_the_liar() -> None:
    verdict = judge(commitment(), "executor", [result(V1, BAD), result(V2, GOOD)])
    assert verdict == Verdict(0, Outcome.HONEST, (V2,), (V1,))


def test_three_different_answers_punish_nobody() -> None:
    verdict = judge(commitment(), "executor", [result(V1, BAD), result(V2, WORSE)])
    assert verdict == Verdict(0, Outcome.UNRESOLVED, (), ())


def test_a_lie_upstream_is_not_the_executors() -> None:
    """A validator that saw other inputs, or none, says nothing about this executor."""
    others = [result(V1, BAD, inputs="2" * 64), result(V2, BAD, error="inputs missing")]
    assert judge(commitment(), "executor", others) is None
    verdict = judge(commitment(), "executor", [*others, result(V3, GOOD)])
    assert verdict == Verdict(0, Outcome.HONEST, (V3,), ())


def test_honest_execution_pays_every_task_and_step() -> None:
    terms = compute_settlement(PLAN, MANIFEST, completions(), [], ECONOMICS)
    assert terms.steps == STEPS and terms.slashes == ()
    assert sum(p.amount_micro_usdc for p in terms.payments) == TASKS * STEPS * PRICE_MICRO_USDC
    assert {p.to for p in terms.payments} == set(PLAN.executors())


def test_fewer_steps_cost_less() -> None:
    terms = compute_settlement(PLAN, MANIFEST, completions(steps=1), [], ECONOMICS)
    assert sum(p.amount_micro_usdc for p in terms.payments) == TASKS * PRICE_MICRO_USDC


def test_liar_pays_validators_and_client_and_others_keep_their_pay() -> None:
    liar = PLAN.executors()[2]
    verdict = Verdict(2, Outcome.LIED, (V1, V2), (liar,))
    terms = compute_settlement(PLAN, MANIFEST, completions(), [verdict], ECONOMICS)
    task_price = PRICE_MICRO_USDC * STEPS
    assert [(s.node, s.amount_micro_usdc) for s in terms.slashes] == [
        (liar, task_price * 100_000 // 1_200)
    ]
    from_escrow = {p.to: p.amount_micro_usdc for p in terms.payments if not p.from_slash}
    from_slash = {p.to: p.amount_micro_usdc for p in terms.payments if p.from_slash}
    for node in set(PLAN.executors()):
        tasks = [t for t, e in enumerate(PLAN.executors()) if e == node and t != 2]
        assert from_escrow.get(node, 0) == len(tasks) * task_price
    assert from_slash == {V1: task_price, V2: task_price, PLAN.request.client: TASKS * task_price}
    assert sum(from_slash.values()) <= terms.slashes[0].amount_micro_usdc


@given(st.lists(st.sampled_from(list(Outcome)), min_size=TASKS, max_size=TASKS))
def test_settlement_never_exceeds_quote_or_slash(outcomes: list[Outcome]) -> None:
    """Escrow is the quote, twice the price; what liars pay covers what is paid out of it."""
    verdicts = [
        Verdict(
            task,
            outcome,
            {Outcome.HONEST: (V1,), Outcome.LIED: (V1, V2), Outcome.UNRESOLVED: ()}[outcome],
            (PLAN.executors()[task],) if outcome is Outcome.LIED else (),
        )
        for task, outcome in enumerate(outcomes)
    ]
    terms = compute_settlement(PLAN, MANIFEST, completions(), verdicts, ECONOMICS)
    escrow = sum(p.amount_micro_usdc for p in terms.payments if not p.from_slash)
    slash = sum(p.amount_micro_usdc for p in terms.payments if p.from_slash)
    assert escrow <= 2 * TASKS * STEPS * PRICE_MICRO_USDC
    assert slash <= sum(s.amount_micro_usdc for s in terms.slashes)


def test_compensation_never_exceeds_what_the_liar_pays() -> None:
    """S = 100 C buys back at most 83 prices: a model of 120 tasks is compensated in part."""
    manifest = make_chain_manifest(120)
    plan = compute_plan(make_request(1), f"0x{3:064x}", make_snapshot(6, 120), manifest)
    verdict = Verdict(5, Outcome.LIED, (V1, V2), (plan.executors()[5],))
    terms = compute_settlement(plan, manifest, completions(plan, 1), [verdict], ECONOMICS)
    assert sum(p.amount_micro_usdc for p in terms.payments if p.from_slash) == (
        terms.slashes[0].amount_micro_usdc
    )


def test_a_completion_must_match_its_root_and_its_plan() -> None:
    node, completion = next(iter(completions().items()))
    check_completion(completion, PLAN, MANIFEST, completion.root())
    with pytest.raises(PeerFault, match="does not match the root"):
        check_completion(completion, PLAN, MANIFEST, "0x" + "0" * 64)
    longer = completion.model_copy(update={"steps": STEPS + 1})
    with pytest.raises(PeerFault, match="more steps"):
        check_completion(longer, PLAN, MANIFEST, longer.root())
    less = completion.model_copy(update={"tasks": ()})
    twice = completion.model_copy(update={"tasks": (completion.tasks[0],) * 2})
    for odd in (less, twice):
        with pytest.raises(PeerFault, match="list tasks in order"):
            check_completion(odd, PLAN, MANIFEST, odd.root())
    foreign = next(t for t, executor in enumerate(PLAN.executors()) if executor != node)
    moved = completion.tasks[0].model_copy(update={"task": foreign})
    more = completion.model_copy(update={"tasks": (moved,)})
    with pytest.raises(PeerFault, match="which is not its own"):
        check_completion(more, PLAN, MANIFEST, more.root())
    wrong = completion.tasks[0].model_copy(update={"task_id": "f" * 64})
    forged = completion.model_copy(update={"tasks": (wrong, *completion.tasks[1:])})
    with pytest.raises(PeerFault, match="misstates"):
        check_completion(forged, PLAN, MANIFEST, forged.root())
    stranger = completion.model_copy(update={"execution_id": "0x" + "0" * 64})
    with pytest.raises(PeerFault, match="another execution"):
        check_completion(stranger, PLAN, MANIFEST, stranger.root())
    assert node in PLAN.executors()
