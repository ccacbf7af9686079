"""The simulated market: its fast paths are the protocol's functions, and no cheat pays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench.economics.market_simulation import (
    COST_MICRO_USDC,
    NOBODY,
    RIGHT,
    Behaviour,
    Bools,
    Draws,
    Verdicts,
    digest_of,
    draw_market,
    judge_all,
    order_judges,
    settle,
)
from bench.economics.report import (
    PAGE,
    PAGES,
    Games,
    Results,
    account_all,
    compute_user_cost,
    count_wronged,
    estimate_verification_cost,
    fill,
    find_break_even,
    make_tables,
    watch_all,
)
from bench.economics.scenarios import (
    DEFAULT,
    EXECUTIONS,
    PUBLISHED,
    SCENARIOS,
    TASKS,
    Scenario,
    account,
    collude,
    compute_threshold,
    draw,
    expect_ring,
    play,
    watch,
)
from splitup.chain.deployment import MarketParameters
from splitup.core import limits
from splitup.crypto.quorum import Settlement
from splitup.graph.manifest import Manifest
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.completions import EMPTY_DIGEST, TaskCommitment
from splitup.messages.plans import Plan
from splitup.messages.snapshots import compute_reference
from splitup.messages.verification import (
    Attestation,
    Held,
    Ruling,
    SignedAttestation,
    VerificationResult,
)
from splitup.protocol.planning.exposure import Economics
from splitup.protocol.planning.sampling_clocks import VALIDATOR, compute_clock, compute_weight
from splitup.protocol.planning.selection import compute_plan, rank_validators
from splitup.protocol.settlement.attestations import Attestations
from splitup.protocol.settlement.proof_of_sampling import (
    MAX_JUDGES,
    Outcome,
    Verdict,
    compute_settlement,
    is_disputed,
    is_sampled,
    judge,
)
from splitup.protocol.settlement.task_checks import TaskCheck, ValidatorAnswer
from tests.builders import (
    NO_TERMS,
    address,
    make_chain_manifest,
    make_request,
    make_snapshot,
    rank_all,
)

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
CLIENT = address(1_000_000)  # no node
CERTAIN = 3.29 / 1.96  # half-widths of 95 % that make a two-sided interval of 99.9 %
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)


@pytest.fixture(scope="module")
def draws() -> Draws:
    return draw()


@pytest.fixture(scope="module")
def games(draws: Draws) -> Games:
    return watch_all(draws)


@pytest.fixture(scope="module")
def results(games: Games) -> Results:
    return account_all(games)


@pytest.fixture(scope="module")
def few() -> Draws:
    return draw(executions=120, seed=5)


# ---- the fast paths are the protocol -------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 12])
def test_judges_are_those_that_the_protocol_ranks_first(nodes: int) -> None:
    tasks = 6
    manifest = make_chain_manifest(tasks)
    snapshot = make_snapshot(
        nodes,
        tasks,
        stakes={n: 1_000_000_000 * (1 + n % 3) for n in range(1, nodes + 1)},
    )
    reference = compute_reference(snapshot.entries)
    executors, clocks, expected = [], [], []
    for number in range(15):
        plan = compute_plan(make_request(1), f"0x{number:064x}", snapshot, manifest)
        executors.append([int(executor, 16) - 1 for executor in plan.executors()])
        seed = f"0x{1000 + number:064x}"
        for task in range(tasks):
            weighed = [(e.node, compute_weight(e, NO_TERMS, reference)) for e in snapshot.entries]
            clocks.append([compute_clock(seed, task, VALIDATOR, *each) / 2**64 for each in weighed])
            ranked = rank_validators(seed, task, plan, snapshot, manifest)
            expected.append([int(node, 16) - 1 for node in ranked])
    ours = order_judges(np.array(clocks), np.array(executors), np.arange(15 * tasks))
    for judges, wanted in zip(ours, expected, strict=True):
        assert [judge for judge in judges if judge != NOBODY] == wanted[: len(judges)]


def test_nodes_are_drawn_as_often_as_the_protocol_draws_them() -> None:
    nodes = 6
    snapshot = make_snapshot(
        nodes, 1, stakes={n: 1_000_000_000 * (1 + n % 4) for n in range(1, nodes + 1)}
    )
    reference = compute_reference(snapshot.entries)
    weights = np.array(
        [compute_weight(entry, NO_TERMS, reference) for entry in snapshot.entries], dtype=np.float64
    )
    market = draw_market(1, nodes, 5_000, 1, 10_000, weights=weights)
    first = Counter(rank_all(f"0x{seed:064x}", 0, VALIDATOR, snapshot)[0] for seed in range(3_000))
    for node, share in enumerate(weights / weights.sum()):
        deviation = 4 * (share * (1 - share)) ** 0.5
        assert abs(first[address(node + 1)] / 3_000 - share) < deviation / 3_000**0.5
        assert abs(np.mean(market.executors == node) - share) < deviation / 5_000**0.5
    # as a judge, given that another node executed
    for node, other in ((1, 4), (3, 2)):
        rows = market.executors[:, 0] == other
        share = weights[node] / (weights.sum() - weights[other])
        seen = np.mean(market.judges[rows, 0] == node)
        assert abs(seen - share) < 4 * (share * (1 - share) / rows.sum()) ** 0.5


def test_sampled_tasks_are_those_of_the_protocol(few: Draws) -> None:
    assert 0.05 < len(few.sampled) / few.executors.size < 0.11
    every = draw_market(1, 4, 3, 5, 10_000, weights=np.ones(4))
    assert every.sampled.tolist() == list(range(15))
    assert is_sampled(f"0x{0:064x}", 0, 10_000)


@each_scenario
def test_verdicts_are_those_of_the_protocol(scenario: Scenario, few: Draws) -> None:
    behaviour = scenario.behave(few)
    verdicts = judge_all(few, behaviour)
    for row in range(len(few.sampled)):
        verdict, heard = judge_by_protocol(few, behaviour, row)
        assert verdicts.outcomes[row] is verdict.outcome
        assert verdicts.heard[row].sum() == heard
        assert name_judges(few, row, verdicts.paid) == list(verdict.validators)
        executor = [address_of(few.executors.reshape(-1)[few.sampled[row]])]
        liars = name_judges(few, row, verdicts.accused_falsely)
        assert (executor if verdicts.lied[row] else []) + liars == list(verdict.liars)


@each_scenario
@pytest.mark.parametrize("economics", [DEFAULT, PUBLISHED], ids=["100C", "10C"])
def test_money_is_that_of_the_protocol(
    scenario: Scenario, economics: Economics, few: Draws
) -> None:
    price = COST_MICRO_USDC * economics.reward_milli // 1000
    manifest = make_chain_manifest(TASKS)
    nano = price * limits.NANO_PER_MICRO
    priced = tuple(t.model_copy(update={"price_nano_usdc": nano}) for t in manifest.tasks)
    manifest = manifest.model_copy(update={"tasks": priced})
    behaviour = scenario.behave(few)
    verdicts = judge_all(few, behaviour)
    money = settle(few, verdicts, economics)
    for execution in range(few.shape[0]):
        terms = settle_by_protocol(few, verdicts, economics, manifest, execution)
        paid: Counter[str] = Counter()
        slashed: Counter[str] = Counter()
        for task, executor in enumerate(few.executors[execution]):
            paid[address_of(executor)] += int(money.to_executors[execution, task])
            slashed[address_of(executor)] += int(money.from_executors[execution, task])
        for row in np.flatnonzero(few.sampled // TASKS == execution):
            for place, node in enumerate(few.judges[row]):
                paid[address_of(node)] += int(money.to_judges[row, place])
                slashed[address_of(node)] += int(money.from_judges[row, place])
        paid[CLIENT] = int(money.to_client[execution])
        expected: Counter[str] = Counter()
        for payment in terms.payments:
            expected[payment.account] += payment.amount_micro_usdc
        assert +paid == +expected
        assert +slashed == {slash.node: slash.amount_micro_usdc for slash in terms.slashes}
        deposit = sum(p.amount_micro_usdc for p in terms.payments if not p.from_slash)
        assert money.from_client[execution] == deposit


@each_scenario
def test_every_micro_usdc_is_accounted_for(scenario: Scenario, results: Results) -> None:
    money = results[scenario.name, 100].money
    into = money.from_client.sum() + money.from_executors.sum() + money.from_judges.sum()
    out = money.to_executors.sum() + money.to_judges.sum()
    assert into == out + money.to_client.sum() + money.to_treasury.sum()
    assert (money.to_treasury >= 0).all()  # nobody gets more out of a slash than was slashed


# ---- does cheating pay? --------------------------------------------------------------------------


def test_the_parameters_are_the_deployed_ones() -> None:
    deployed = MarketParameters()
    assert replace(DEFAULT, slash_milli=deployed.slash_milli) == DEFAULT
    assert deployed.sampling_bps == DEFAULT.sampling_bps == 800
    assert deployed.reward_milli == DEFAULT.reward_milli
    assert compute_threshold(DEFAULT) < deployed.sampling_bps / 10_000
    assert EXECUTIONS * TASKS >= 100_000


LOSING = [s.name for s in SCENARIOS if s.name not in ("honest", "copying-30")]


@pytest.mark.parametrize("name", LOSING)
def test_cheating_loses_at_the_default_parameters(name: str, results: Results) -> None:
    gain = results[name, 100].gain
    assert gain.mean + CERTAIN * gain.half_width < 0


@pytest.mark.parametrize("name", ["lazy", "copying", "ring-10", "ring-30"])
def test_cheating_pays_at_the_published_slash(name: str, results: Results) -> None:
    gain = results[name, 10].gain
    assert gain.mean - CERTAIN * gain.half_width > 0


def test_copying_a_right_answer_cannot_be_seen_and_pays_little(results: Results) -> None:
    """No slash deters what no comparison can show; the gain is p times the ring's share times C."""
    theory = expect_ring(100, 30)
    for slash in (10, 100):
        gain = results["copying-30", slash].gain
        assert abs(gain.mean - 0.08 * theory.copied) < CERTAIN * gain.half_width
        assert count_wronged(results["copying-30", slash]) == (0, 0)


@pytest.mark.parametrize("slash", [10, 100])
@pytest.mark.parametrize("name", [s.name for s in SCENARIOS if s.theory])
def test_theory_and_simulation_agree(name: str, slash: int, results: Results) -> None:
    result = results[name, slash]
    assert result.scenario.theory is not None
    expected = result.scenario.theory.expect_gain(result.economics)
    assert abs(result.gain.mean - expected) < CERTAIN * result.gain.half_width


@pytest.mark.parametrize("holders, ring", [(5, 3), (4, 2), (3, 2), (2, 1)])
def test_theory_and_simulation_agree_where_few_nodes_hold_a_task(holders: int, ring: int) -> None:
    market = draw_market(3, holders, 4_000, 1, 800, weights=np.ones(holders))
    theory = expect_ring(holders, ring)
    scenario = Scenario("ring", "ring", lambda d: collude(d, ring), theory)
    gain = play(scenario, market, DEFAULT).gain
    assert abs(gain.mean - theory.expect_gain(DEFAULT)) < CERTAIN * gain.half_width + 1e-9


def test_one_judge_and_the_committee_are_enough() -> None:
    market = draw_market(3, 2, 1_000, 1, 10_000, weights=np.ones(2))
    result = play(BY_NAME["lazy"], market, DEFAULT)
    assert set(result.verdicts.outcomes) == {Outcome.LIED}
    assert result.money.from_executors.all() and not result.money.to_executors.any()


def test_the_contract_s_condition_is_where_gain_turns_to_loss(games: Games) -> None:
    assert compute_threshold(PUBLISHED, 0.1, 1) == pytest.approx(0.0992, abs=5e-5)
    assert compute_threshold(PUBLISHED, 0.1, 2) == pytest.approx(0.1102, abs=5e-5)
    assert compute_threshold(DEFAULT) == pytest.approx(0.0122, abs=5e-5)
    for name, collusion in (("lazy", 0.0), ("ring-10", 0.1), ("ring-30", 0.3)):
        theory = BY_NAME[name].theory
        assert theory is not None
        by_contract = 1 / (0.08 * (1 - collusion)) - 1.2  # k = 1: one honest judge is enough
        exact = theory.break_even_slash(DEFAULT)
        assert exact == pytest.approx(by_contract, rel=0.04)  # without replacement, judges' fees
        simulated = find_break_even(games[name])
        assert abs(simulated.mean - exact) < CERTAIN * simulated.half_width


# ---- what verification costs, and whom -----------------------------------------------------------


def test_verification_costs_an_honest_network_less_than_a_tenth(
    results: Results, draws: Draws
) -> None:
    honest = results["honest", 100]
    cost = estimate_verification_cost(honest, draws)
    assert abs(cost.mean - 0.08) < CERTAIN * cost.half_width
    assert cost.mean + CERTAIN * cost.half_width < 0.1
    assert count_wronged(honest) == (0, 0)
    assert honest.money.to_client.sum() == 0


def test_a_user_whose_liar_is_found_gets_the_whole_price_back(
    results: Results, draws: Draws
) -> None:
    for slash, expected in ((100, 1.0), (10, (0.8 * 10 / 1.2 - MAX_JUDGES) / TASKS)):
        result = results["lazy", slash]
        back, _ = compute_user_cost(result, draws)
        found = result.money.from_executors.any(axis=1)
        assert found.any() and (back[~found] == 0).all()
        # a hundredth: penalties are rounded down to the micro-USDC
        assert back[found] == pytest.approx(expected, abs=1e-2)


@each_scenario
@pytest.mark.parametrize("ruled", [True, False], ids=["ruled", "unruled"])
def test_honest_stake_is_safe(
    scenario: Scenario, ruled: bool, draws: Draws, results: Results
) -> None:
    """Judges can be a ring, or all be wrong alike; only the committee's ruling takes stake."""
    if ruled:
        result = results[scenario.name, 100]
    else:
        result = account(watch(scenario, draws, ruled=False), DEFAULT)
    assert count_wronged(result) == (0, 0)


def test_where_the_committee_cannot_rule_a_lie_costs_no_more_than_its_pay(draws: Draws) -> None:
    result = account(watch(BY_NAME["lazy"], draws, ruled=False), DEFAULT)
    assert Outcome.OUTVOTED in result.verdicts.outcomes
    assert result.money.from_executors.sum() == result.money.from_judges.sum() == 0
    caught = result.verdicts.unpaid.sum() / result.behaviour.cheating_executors.sum()
    assert abs(result.gain.mean - (1 - caught * 1.2)) < CERTAIN * result.gain.half_width + 0.02


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_is_up_to_date(games: Games, results: Results, draws: Draws) -> None:
    tables = make_tables(games, results, draws)
    command = "run: python -m bench.economics.report"
    assert all(f"<!-- {name} -->" in PAGE.read_text() for name in tables)
    for page in PAGES:
        assert fill(page.read_text(), tables) == page.read_text(), command


# ---- the protocol, one task at a time ------------------------------------------------------------


def address_of(node: int) -> str:
    return address(int(node) + 1)


def name_judges(market: Draws, row: int, which: Bools) -> list[str]:
    return [address_of(node) for node in market.judges[row, which[row]]]


def judge_by_protocol(market: Draws, behaviour: Behaviour, row: int) -> tuple[Verdict, int]:
    """Let a real ``TaskCheck`` ask the judges of one sampled task; return how many were asked."""
    number = market.sampled[row]
    commitment = TaskCommitment(
        task=int(number % TASKS),
        inputs=("1" * 64,),
        outputs=(digest_of(behaviour.claims.reshape(-1)[number]),),
        state=EMPTY_DIGEST,
    )
    results = {
        address_of(node): VerificationResult(
            execution_id="0x" + "e" * 64,
            task=commitment.task,
            validator=address_of(node),
            inputs=commitment.inputs,
            outputs=(digest_of(answer),),
            state=EMPTY_DIGEST,
            salt="0x" + "5" * 64,
            error="",
        )
        for node, answer in zip(market.judges[row], behaviour.answers[row], strict=True)
    }
    attestations = attest(commitment, results)
    check = TaskCheck(commitment.task, tuple(results), steps=1)
    while True:
        check.advance(attestations, commitment, 0.0, 1.0, 0.0)
        for name in check.asked_at:
            check.add(ValidatorAnswer(results[name], ""), attestations)
        if check.is_heard(attestations, commitment):
            break
    executor = address_of(market.executors.reshape(-1)[number])
    usable = check.get_usable(attestations, commitment)
    ruling = attestations.find_ruling(commitment.task)
    is_asked = is_disputed(commitment, usable) or not usable
    verdict = judge(commitment, executor, usable, ruling if is_asked else None)
    return verdict, len(check.asked_at)


def attest(commitment: TaskCommitment, results: dict[str, VerificationResult]) -> Attestations:
    """Return a committee of one, which holds every judge's commitment and knows the truth."""
    attestations = Attestations(quorum=1)
    ruling = Ruling(
        task=commitment.task,
        inputs=commitment.inputs,
        outputs=(digest_of(RIGHT),),
        state=EMPTY_DIGEST,
        error="",
    )
    attestation = Attestation(
        execution_id="0x" + "e" * 64,
        member=CLIENT,
        steps=1,
        due=True,
        held=tuple(
            Held(task=commitment.task, validator=name, root=result.root())
            for name, result in results.items()
        ),
        silent=(),
        rulings=(ruling,),
    )
    attestations.add(SignedAttestation(attestation=attestation, signature="0x" + "0" * 128))
    return attestations


def settle_by_protocol(
    market: Draws, verdicts: Verdicts, economics: Economics, manifest: Manifest, execution: int
) -> Settlement:
    executors = [address_of(executor) for executor in market.executors[execution]]
    plan = Plan(
        request=make_request(1).model_copy(update={"client": CLIENT}),
        seed="0x" + "0" * 64,
        tasks=tuple((executor,) for executor in executors),
        nodes=(),
    )
    found = []
    for row in map(int, np.flatnonzero(market.sampled // TASKS == execution)):
        task = int(market.sampled[row] % TASKS)
        liars = name_judges(market, row, verdicts.accused_falsely)
        if verdicts.lied[row]:
            liars.append(executors[task])
        paid = tuple(name_judges(market, row, verdicts.paid))
        found.append(Verdict(task, verdicts.outcomes[row], paid, tuple(liars)))
    return compute_settlement(plan, manifest, 1, (), found, economics, evidence_root=ZERO_BYTES32)
