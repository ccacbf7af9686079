from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.errors import InvalidInput, PeerFault
from splitup.graph.manifest import Manifest
from splitup.messages.completions import Completion, End, TaskCommitment
from splitup.messages.plans import Plan
from splitup.messages.verification import Ruling, VerificationResult
from splitup.protocol.execution.ends import sign_end
from splitup.protocol.planning.exposure import Economics, add_exposures, compute_exposures
from splitup.protocol.planning.selection import compute_plan
from splitup.protocol.settlement.proof_of_sampling import (
    MAX_JUDGES,
    Outcome,
    Verdict,
    check_completion,
    compute_ruling_s,
    compute_settlement,
    count_needed,
    find_usable,
    is_disputed,
    is_sampled,
    judge,
)
from tests.builders import (
    PRICE_MICRO_USDC,
    make_chain_manifest,
    make_request,
    make_snapshot,
)
from tests.protocol.committees import make_identity

TASKS, STEPS = 4, 4
MANIFEST = make_chain_manifest(TASKS)
CLIENT = make_identity(77)
REQUEST = make_request(STEPS).model_copy(update={"client_key": CLIENT.signing_key_hex})
PLAN = compute_plan(REQUEST, f"0x{7:064x}", make_snapshot(6, TASKS), MANIFEST)
ECONOMICS = Economics(sampling_bps=800, reward_milli=1200, slash_milli=100_000)
GOOD, BAD, WORSE, IN = "a" * 64, "b" * 64, "c" * 64, "1" * 64
V1, V2, V3, V4 = (f"0x{n:040x}" for n in (101, 102, 103, 104))
STATE = "e" * 64
decide = partial(compute_settlement, evidence_root="0x" + "e" * 64)
FLOOR = limits.EXPOSURE_FLOOR_MICRO_USDC


def commitment(task: int = 0, output: str = GOOD, state: str = STATE) -> TaskCommitment:
    return TaskCommitment(task=task, inputs=(IN,), outputs=(output,), state=state)


def rule(output: str = GOOD, *, inputs: str = IN, state: str = STATE) -> Ruling:
    return Ruling(task=0, inputs=(inputs,), outputs=(output,), state=state, error="")


def result(validator: str, output: str, *, inputs: str = IN, error: str = "") -> VerificationResult:
    return VerificationResult(
        execution_id=PLAN.request.execution_id,
        task=0,
        validator=validator,
        inputs=(inputs,),
        outputs=(output,),
        state=STATE,
        salt="0x" + "5" * 64,
        error=error,
    )


def completions(plan: Plan = PLAN, steps: int = STEPS) -> dict[str, Completion]:
    found: dict[str, list[TaskCommitment]] = {}
    for task, executor in enumerate(plan.executors()):
        found.setdefault(executor, []).append(commitment(task))
    end = End(execution_id=plan.request.execution_id, steps=steps, inputs=())
    return {
        node: Completion(
            execution_id=plan.request.execution_id,
            node=node,
            tasks=tuple(tasks),
            salt="0x" + "5" * 64,
            end=sign_end(CLIENT, end),
        )
        for node, tasks in found.items()
    }


def test_sampling_rate_is_eight_percent() -> None:
    drawn = sum(is_sampled(f"0x{i:064x}", t, 800) for i in range(400) for t in range(50))
    assert 0.073 < drawn / 20_000 < 0.087  # 3.6 sigma
    assert not any(is_sampled(f"0x{i:064x}", 0, 0) for i in range(100))
    assert all(is_sampled(f"0x{i:064x}", 0, 10_000) for i in range(100))


def test_equal_outputs_clear_the_executor() -> None:
    verdict = judge(commitment(), "executor", [result(V1, GOOD)], None)
    assert verdict == Verdict(0, Outcome.HONEST, (V1,), ())


def test_another_state_is_another_result() -> None:
    claimed = commitment(state="d" * 64)
    assert is_disputed(claimed, [result(V1, GOOD)])
    verdict = judge(claimed, "executor", [result(V1, GOOD)], rule())
    assert verdict == Verdict(0, Outcome.LIED, (V1,), ("executor",))


def test_one_validator_then_a_third_node_then_five() -> None:
    assert count_needed(commitment(), []) == 1
    assert count_needed(commitment(), [result(V1, GOOD)]) == 1
    assert count_needed(commitment(), [result(V1, BAD)]) == 2
    for second in (GOOD, BAD, WORSE):
        assert count_needed(commitment(), [result(V1, BAD), result(V2, second)]) == MAX_JUDGES == 4
        assert count_needed(commitment(), [result(V1, GOOD), result(V2, BAD)]) == 4


def test_the_ruling_convicts_whoever_differs() -> None:
    heard = [result(V1, GOOD), result(V2, BAD), result(V3, WORSE), result(V4, GOOD)]
    verdict = judge(commitment(output=BAD), "executor", heard, rule())
    assert verdict == Verdict(0, Outcome.LIED, (V1, V4), ("executor", V2, V3))
    verdict = judge(commitment(), "executor", heard, rule())
    assert verdict == Verdict(0, Outcome.HONEST, (V1, V4), (V2, V3))


@pytest.mark.parametrize("ruling", [None, rule(inputs="2" * 64)], ids=["none", "other inputs"])
def test_without_a_ruling_numbers_decide_the_pay_and_nobody_is_punished(
    ruling: Ruling | None,
) -> None:
    against = [result(v, BAD) for v in (V1, V2, V3, V4)]
    for count, outcome in ((1, Outcome.UNRESOLVED), (2, Outcome.OUTVOTED), (4, Outcome.OUTVOTED)):
        verdict = judge(commitment(), "executor", against[:count], ruling)
        assert verdict == Verdict(0, outcome, (), ())
    tied = [result(V1, BAD), result(V2, GOOD), result(V3, BAD), result(V4, GOOD)]
    assert judge(commitment(), "executor", tied, ruling).outcome is Outcome.UNRESOLVED
    assert judge(commitment(), "executor", [], ruling).outcome is Outcome.UNRESOLVED


def test_members_of_another_class_judge_each_party_by_the_numbers_that_it_stored() -> None:
    accepted = rule().model_copy(update={"compared": True})
    refused = accepted.model_copy(update={"outputs": ()})
    lost = refused.model_copy(update={"missing": (0,)})  # it stored none, or others
    against, agreeing = result(V1, BAD), result(V2, GOOD)
    usable, withheld = [against, agreeing], Outcome.WITHHELD
    lied, honest = Outcome.LIED, Outcome.HONEST
    assert judge(commitment(), "executor", [], accepted) == Verdict(0, Outcome.HONEST, (), ())
    assert judge(commitment(), "executor", [], refused) == Verdict(
        0, Outcome.LIED, (), ("executor",)
    )
    for ruling, first, second, outcome, right, wrong in (
        (refused, accepted, refused, lied, (V1,), ("executor", V2)),  # who repeats a lie lies
        (refused, refused, refused, lied, (), ("executor", V1, V2)),
        (refused, None, refused, lied, (), ("executor", V2)),
        (accepted, accepted, accepted, honest, (V1, V2), ()),
        (accepted, refused, accepted, honest, (V2,), (V1,)),
        (accepted, lost, accepted, honest, (V2,), (V1,)),
        (accepted, None, accepted, honest, (V2,), ()),
        (lost, refused, accepted, withheld, (V2,), (V1,)),
    ):
        verdict = judge(commitment(), "executor", usable, ruling, {V1: first, V2: second})
        assert verdict == Verdict(0, outcome, right, wrong)


def test_members_have_time_for_large_tasks() -> None:
    assert compute_ruling_s(10**6, 100) == 180 + 0.5 * 100
    assert compute_ruling_s(12 * 10**9, 100) == 180 + 6 * 100


def test_the_committee_decides_where_no_validator_could() -> None:
    assert judge(commitment(), "executor", [], rule()) == Verdict(0, Outcome.HONEST, (), ())
    assert judge(commitment(), "executor", [], rule(BAD)).liars == ("executor",)


def test_a_lie_upstream_is_not_the_executors() -> None:
    """A validator that saw other inputs, or none, says nothing about this executor."""
    others = [result(V1, BAD, inputs="2" * 64), result(V2, BAD, error="inputs missing")]
    assert find_usable(commitment(), others) == []
    usable = find_usable(commitment(), [*others, result(V3, GOOD)])
    assert judge(commitment(), "executor", usable, None) == Verdict(0, Outcome.HONEST, (V3,), ())


def test_a_result_s_root_hides_it_behind_its_salt() -> None:
    plain = result(V1, GOOD)
    assert plain.root() != plain.model_copy(update={"salt": "0x" + "6" * 64}).root()
    assert plain.root() != plain.model_copy(update={"state": "d" * 64}).root()


def test_honest_execution_pays_every_task_and_step() -> None:
    terms = decide(PLAN, MANIFEST, STEPS, (), [], ECONOMICS)
    assert terms.steps == STEPS and terms.slashes == ()
    assert sum(p.amount_micro_usdc for p in terms.payments) == TASKS * STEPS * PRICE_MICRO_USDC
    assert {p.account for p in terms.payments} == set(PLAN.executors())


def test_fewer_steps_cost_less() -> None:
    terms = decide(PLAN, MANIFEST, 1, (), [], ECONOMICS)
    assert sum(p.amount_micro_usdc for p in terms.payments) == TASKS * PRICE_MICRO_USDC


def test_liar_pays_validators_and_client_and_others_keep_their_pay() -> None:
    liar = PLAN.executors()[2]
    verdict = Verdict(2, Outcome.LIED, (V1, V2), (liar,))
    terms = decide(PLAN, MANIFEST, STEPS, (), [verdict], ECONOMICS)
    task_price = PRICE_MICRO_USDC * STEPS
    assert [(s.node, s.amount_micro_usdc) for s in terms.slashes] == [
        (liar, task_price * 100_000 // 1_200 + FLOOR)
    ]
    from_escrow = {p.account: p.amount_micro_usdc for p in terms.payments if not p.from_slash}
    from_slash = {p.account: p.amount_micro_usdc for p in terms.payments if p.from_slash}
    for node in set(PLAN.executors()):
        tasks = [t for t, e in enumerate(PLAN.executors()) if e == node and t != 2]
        assert from_escrow.get(node, 0) == len(tasks) * task_price
    assert from_slash == {V1: task_price, V2: task_price, PLAN.request.client: TASKS * task_price}
    assert sum(from_slash.values()) <= terms.slashes[0].amount_micro_usdc


def make_priced(*prices: int) -> Manifest:
    """Return a model whose tasks have these prices, in nano-USDC."""
    pairs = zip(MANIFEST.tasks, prices, strict=True)
    tasks = tuple(task.model_copy(update={"price_nano_usdc": price}) for task, price in pairs)
    return MANIFEST.model_copy(update={"tasks": tasks})


@given(
    st.lists(st.sampled_from(list(Outcome)), min_size=TASKS, max_size=TASKS),
    st.lists(st.integers(1, 2_000) | st.integers(1, 10**12), min_size=TASKS, max_size=TASKS),
    st.integers(0, STEPS),
)
def test_a24_settlement_never_exceeds_quote_or_slash(
    outcomes: list[Outcome], prices: list[int], steps: int
) -> None:
    """Escrow is the quote, twice the price; what liars pay covers what is paid out of it."""
    manifest = make_priced(*prices)
    verdicts = [
        Verdict(
            task,
            outcome,
            {Outcome.HONEST: (V1,), Outcome.WITHHELD: (V1,), Outcome.LIED: (V1, V2, V3, V4)}.get(
                outcome, ()
            ),
            (PLAN.executors()[task],) if outcome is Outcome.LIED else (),
        )
        for task, outcome in enumerate(outcomes)
    ]
    terms = decide(PLAN, manifest, steps, (), verdicts, ECONOMICS)
    escrow = sum(p.amount_micro_usdc for p in terms.payments if not p.from_slash)
    slash = sum(p.amount_micro_usdc for p in terms.payments if p.from_slash)
    assert escrow <= 2 * manifest.cost_micro_usdc(STEPS)
    assert slash <= sum(s.amount_micro_usdc for s in terms.slashes)


def test_a24_what_is_below_a_micro_usdc_is_earned_over_many_steps() -> None:
    manifest = make_priced(40, 40, 999, 1_000)
    verdict = Verdict(0, Outcome.HONEST, (V1,), ())
    for steps, *earned in (
        (1, 0, 0, 0, 1),
        (25, 1, 1, 24, 25),
        (65_536, 2_621, 2_621, 65_470, 65_536),
    ):
        pay = Counter({V1: earned[0]})  # a validator earns what the task does
        for executor, amount in zip(PLAN.executors(), earned, strict=True):
            pay[executor] += amount
        terms = decide(PLAN, manifest, steps, (), [verdict], ECONOMICS)
        assert {p.account: p.amount_micro_usdc for p in terms.payments} == dict(+pay)


def test_a24_a_lie_in_a_task_too_small_to_be_paid_costs_stake() -> None:
    manifest = make_priced(40, 40, 40, 40)
    verdict = Verdict(2, Outcome.LIED, (V1,), (PLAN.executors()[2],))
    terms = decide(PLAN, manifest, STEPS, (), [verdict], ECONOMICS)
    [slash] = terms.slashes
    assert slash.amount_micro_usdc == 40 * STEPS * 100_000 // 1_200 // 1_000 + FLOOR > FLOOR
    assert terms.payments == ()


@pytest.mark.parametrize("sampling_bps, cost_milli", [(800, 25_000), (10_000, 2_000), (1, 100_000)])
def test_withholding_costs_twice_the_break_even_and_at_most_s(
    sampling_bps: int, cost_milli: int
) -> None:
    economics = replace(ECONOMICS, sampling_bps=sampling_bps)
    assert economics.silence_milli == cost_milli
    executor = PLAN.executors()[2]
    verdict = Verdict(2, Outcome.WITHHELD, (V1,), ())
    terms = decide(PLAN, MANIFEST, STEPS, {executor}, [verdict], economics)
    price = PRICE_MICRO_USDC * STEPS
    assert [(s.node, s.amount_micro_usdc) for s in terms.slashes] == [
        (executor, price * cost_milli // 1_200 + FLOOR)
    ]
    assert executor not in {p.account for p in terms.payments}
    from_slash = {p.account: p.amount_micro_usdc for p in terms.payments if p.from_slash}
    assert from_slash[V1] == price
    if sampling_bps == 800:  # hiding a lie does not pay, not even from every second judge
        assert 0.08 * (1 - 0.5) * (1.2 + cost_milli / 1000) > 1


def test_a_validator_that_is_late_loses_its_fee_to_the_next_and_no_stake() -> None:
    late = Verdict(1, Outcome.HONEST, (V2,), (), silent=(V1,))
    terms = decide(PLAN, MANIFEST, STEPS, (), [late], ECONOMICS)
    assert terms.slashes == ()
    in_time = Verdict(1, Outcome.HONEST, (V2,), ())
    assert terms == decide(PLAN, MANIFEST, STEPS, (), [in_time], ECONOMICS)
    assert V1 not in {payment.account for payment in terms.payments}


def test_who_is_outvoted_is_not_paid_and_loses_nothing() -> None:
    verdict = Verdict(1, Outcome.OUTVOTED, (), ())
    terms = decide(PLAN, MANIFEST, STEPS, (), [verdict], ECONOMICS)
    assert not terms.slashes
    paid = sum(p.amount_micro_usdc for p in terms.payments)
    assert paid == (TASKS - 1) * STEPS * PRICE_MICRO_USDC


def test_compensation_never_exceeds_what_the_liar_pays() -> None:
    """80 % of S = 100 C alone buy back at most 66 prices: 120 tasks are compensated in part."""
    economics = replace(ECONOMICS, floor_micro_usdc=0)
    manifest = make_chain_manifest(120)
    plan = compute_plan(make_request(1), f"0x{3:064x}", make_snapshot(6, 120), manifest)
    verdict = Verdict(5, Outcome.LIED, (V1, V2), (plan.executors()[5],))
    terms = decide(plan, manifest, 1, (), [verdict], economics)
    rewards = sum(p.amount_micro_usdc for p in terms.payments if p.from_slash)
    assert rewards == terms.slashes[0].amount_micro_usdc * 80 // 100, "as the contract rounds it"


def test_at_most_as_many_are_slashed_as_the_contract_takes() -> None:
    """300 liars: the 256 largest penalties are taken, and every validator is paid."""
    count, most = 300, limits.MAX_SLASHES
    manifest = make_chain_manifest(count)
    request = make_request(1).model_copy(update={"verify_bps": 10_000})
    plan = compute_plan(request, f"0x{3:064x}", make_snapshot(6, count), manifest)
    executors = [f"0x{1000 + task:040x}" for task in range(count)]
    verdicts = [
        Verdict(task, Outcome.LIED, (f"0x{5000 + task:040x}",), (executors[task],))
        for task in range(count)
    ]
    terms = decide(plan, manifest, 1, (), verdicts, ECONOMICS, executors)
    assert [slash.node for slash in terms.slashes] == executors[:most], "of equal ones, the first"
    rewards = [p for p in terms.payments if p.from_slash]
    assert len(rewards) == most and sum(p.account == request.client for p in rewards) == 1
    paid = {p.account: p.amount_micro_usdc for p in terms.payments if p.account != request.client}
    assert paid == {verdict.validators[0]: PRICE_MICRO_USDC for verdict in verdicts}
    taken = sum(slash.amount_micro_usdc for slash in terms.slashes)
    assert sum(p.amount_micro_usdc for p in rewards) <= ECONOMICS.compute_rewards(taken)
    twice = [replace(verdict, liars=(executors[0],)) for verdict in verdicts[-2:]]
    twice = [*verdicts[:-2], *twice]  # the first node is guilty of three
    worst = decide(plan, manifest, 1, (), twice, ECONOMICS, executors).slashes[0]
    assert worst.node == executors[0]
    assert worst.amount_micro_usdc > 2 * (terms.slashes[0].amount_micro_usdc - FLOOR)


def test_the_slashes_that_fit_deter_at_least_as_much_as_the_least_share() -> None:
    """If every task of the largest model is a lie, a share of 25 % of the penalties is taken."""
    assert limits.MAX_SLASHES / limits.MAX_TASKS > 2 * 800 / 10_000


def test_a_completion_must_match_its_root_and_its_plan() -> None:
    node, completion = next(iter(completions().items()))
    check_completion(completion, PLAN, MANIFEST, completion.root())
    with pytest.raises(PeerFault, match="does not match the root"):
        check_completion(completion, PLAN, MANIFEST, "0x" + "0" * 64)
    longer = completions(steps=STEPS + 1)[completion.node]
    with pytest.raises(PeerFault, match="more steps"):
        check_completion(longer, PLAN, MANIFEST, longer.root())
    less = completion.model_copy(update={"tasks": ()})
    twice = completion.model_copy(update={"tasks": (completion.tasks[0],) * 2})
    for odd in (less, twice):
        with pytest.raises(PeerFault, match="list tasks in order"):
            check_completion(odd, PLAN, MANIFEST, odd.root())
    part = completion.model_copy(update={"tasks": completion.tasks[1:]})
    with pytest.raises(PeerFault, match="does not cover all its tasks"):
        check_completion(part, PLAN, MANIFEST, part.root())
    fallback = PLAN.tasks[0][1]
    taken = completion.model_copy(update={"node": fallback})
    with pytest.raises(PeerFault, match="which is not its own"):
        check_completion(taken, PLAN, MANIFEST, taken.root())
    executors = (fallback, *PLAN.executors()[1:])  # who was replaced may leave out what it lost
    check_completion(part, PLAN, MANIFEST, part.root(), executors)
    wrong = completion.tasks[0].model_copy(update={"outputs": ()})
    forged = completion.model_copy(update={"tasks": (wrong, *completion.tasks[1:])})
    with pytest.raises(PeerFault, match="misstates"):
        check_completion(forged, PLAN, MANIFEST, forged.root())
    stranger = completion.model_copy(update={"execution_id": "0x" + "0" * 64})
    with pytest.raises(PeerFault, match="another execution"):
        check_completion(stranger, PLAN, MANIFEST, stranger.root())
    assert node in PLAN.executors()


# ---- what a lie costs besides S ----------------------------------------------------------------


def settle(*verdicts: Verdict, locked: dict[str, int] | None = None) -> dict[str, int]:
    """Return what the nodes lose."""
    withheld = {
        PLAN.executors()[verdict.task]
        for verdict in verdicts
        if verdict.outcome is Outcome.WITHHELD
    }
    terms = decide(PLAN, MANIFEST, STEPS, withheld, verdicts, ECONOMICS, locked=locked or {})
    return {slash.node: slash.amount_micro_usdc for slash in terms.slashes}


def lie(task: int, *, close: bool = False) -> Verdict:
    return Verdict(task, Outcome.LIED, (V1,), (PLAN.executors()[task],), close=close)


def test_s14_a_lie_about_a_cheap_task_costs_what_the_execution_locks() -> None:
    """S = 100 C of a task at 40 micro-USDC alone would be a third of a cent."""
    liar = PLAN.executors()[2]
    assert settle(lie(2)) == {liar: PENALTY + FLOOR}
    assert settle(Verdict(2, Outcome.WITHHELD, (V1,), ()))[liar] > FLOOR  # hiding it is no cheaper


def test_s14_a_first_difference_that_a_bit_flip_explains_costs_a_tenth() -> None:
    liar = PLAN.executors()[2]
    assert settle(lie(2, close=True)) == {liar: PENALTY + FLOOR // 10}


def test_s14_the_ruling_says_whether_a_difference_is_close() -> None:
    for close in (False, True):
        ruling = rule().model_copy(update={"close": close})
        verdict = judge(commitment(output=BAD), "executor", [result(V1, GOOD)], ruling)
        assert verdict == Verdict(0, Outcome.LIED, (V1,), ("executor",), close=close)


def test_s14_a_second_difference_costs_the_whole_exposure() -> None:
    node, count = Counter(PLAN.executors()).most_common(1)[0]
    tasks = [task for task, executor in enumerate(PLAN.executors()) if executor == node]
    assert count > 1
    exposed = dict(compute_exposures(PLAN, MANIFEST, (), ECONOMICS))
    assert settle(*(lie(task, close=True) for task in tasks)) == {node: exposed[node]}
    # in the same execution, or in one before: then the chain has locked more
    liar = PLAN.executors()[2]
    locked = {liar: exposed[liar] + 3 * FLOOR}
    assert settle(lie(2, close=True), locked=locked) == {liar: PENALTY + 4 * FLOOR}


def test_s14_no_settlement_takes_more_than_is_locked() -> None:
    verdicts = [lie(task) for task in range(TASKS)]
    exposed = dict(compute_exposures(PLAN, MANIFEST, (), ECONOMICS))
    for extra in (0, 7, 10**9):
        locked = {node: amount + extra for node, amount in exposed.items()}
        assert settle(*verdicts, locked=locked) == locked


def test_s14_a_validator_loses_less_than_the_floor_that_it_is_exposed_with() -> None:
    verdict = Verdict(1, Outcome.HONEST, (V2,), (V1,), silent=(V3,))
    lost = settle(verdict)
    assert lost == {V1: PENALTY + FLOOR // 10}, "who is only late loses nothing"
    assert max(lost.values()) < FLOOR


# ---- exposures ---------------------------------------------------------------------------------

PENALTY = PRICE_MICRO_USDC * STEPS * 100_000 // 1200


def lock(free: dict[str, int]) -> Plan:
    """Plan with what is left of some nodes' stake."""
    snapshot = make_snapshot(6, TASKS)
    entries = tuple(
        entry.model_copy(
            update={
                "locked_micro_usdc": entry.stake_micro_usdc
                - limits.VALIDATION_RESERVE_MICRO_USDC
                - free.get(
                    entry.node, entry.stake_micro_usdc - limits.VALIDATION_RESERVE_MICRO_USDC
                )
            }
        )
        for entry in snapshot.entries
    )
    return add_exposures(
        PLAN, MANIFEST, snapshot.model_copy(update={"entries": entries}), ECONOMICS
    )


def test_every_executor_is_exposed_by_all_its_tasks() -> None:
    plan = lock({})
    assert plan.places == () and plan.executors() == PLAN.executors()
    counts = {node: PLAN.executors().count(node) for node in set(PLAN.executors())}
    assert dict(plan.exposures()) == {node: n * PENALTY + FLOOR for node, n in counts.items()}


def test_a_node_whose_free_stake_is_too_small_is_passed_over_and_stays_in_the_list() -> None:
    first = PLAN.executors()[0]
    plan = lock({first: FLOOR + PENALTY - 1})
    assert first not in plan.executors() and plan.tasks == PLAN.tasks
    assert plan.root() != lock({}).root()
    twice = Counter(PLAN.executors()).most_common(1)[0][0]
    plan = lock({twice: FLOOR + PENALTY})
    assert plan.executors().count(twice) == 1, "enough for one task, not for two"
    most = FLOOR + 2 * PENALTY
    for node, amount in lock({node.node: most for node in PLAN.nodes}).exposures():
        assert amount <= most, node


def test_a_plan_that_no_stake_covers_is_refused() -> None:
    with pytest.raises(InvalidInput, match="free stake covers task 0"):
        lock({node.node: 0 for node in PLAN.nodes})
