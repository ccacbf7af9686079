"""What a text costs its key, also when its first lease fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_gateway import generation
from splitup_gateway.access import Access
from splitup_gateway.api_keys import ApiKeys
from splitup_gateway.apis.answers import make_cost
from splitup_gateway.charges import Charge, Charges
from splitup_gateway.generation import GenerationOptions, Piece, Report, generate_text
from splitup_gateway.timelines import Timelines

from splitup.client.leases import Lease
from splitup.client.text.generation import Token
from splitup.core.errors import ExecutionFailed, Implausible
from splitup.decode.adjusted_sampler import Adjustments
from splitup.decode.sampler import Sampler
from tests.client.lease_pools import make_pool

PRICE = 12
LOST = 3  # steps of the attempt that fails
OPTIONS = GenerationOptions((1, 2), 4, (), Sampler(), Adjustments())
MODEL: Any = SimpleNamespace(manifest=SimpleNamespace(cost_micro_usdc=lambda steps: PRICE * steps))


@pytest.fixture(autouse=True)
def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first lease fail after some steps, and the next one write two tokens."""
    failing = [True]

    async def write(
        lease: Lease, model: Any, options: GenerationOptions, report: Report, *_: object
    ) -> AsyncGenerator[Piece, None]:
        fails, failing[0] = failing[0], False
        steps = LOST if fails else 2
        lease.session.steps += steps  # type: ignore[misc]
        report.add_steps(steps, model.manifest)
        if fails:
            lease.session.failure = SimpleNamespace()  # type: ignore[assignment]
            raise ExecutionFailed("a node failed", execution_id=lease.session.execution_id)
        for _ in range(2):
            report.completion_tokens += 1
            yield Piece(Token(id=1, text="x"), None)

    monkeypatch.setattr(generation, "_generate", write)
    monkeypatch.setattr(generation, "count_steps", lambda *_: 6)


async def generate(charge: Charge) -> Report:
    report = Report(OPTIONS.prompt)
    async with make_pool(warm=0) as (pool, _):
        try:
            async for _ in generate_text(pool, MODEL, OPTIONS, report, charge):
                pass
        finally:
            charge.used = report.total_micro_usdc
            assert pool.totals.cost_micro_usdc == charge.used
    return report


@pytest.mark.parametrize(
    ("budget", "limit", "spent"),
    [
        (1_000, None, 5 * PRICE),
        (6 * PRICE + LOST * PRICE, None, 5 * PRICE),
        (6 * PRICE + LOST * PRICE - 1, None, LOST * PRICE),  # no second attempt
        (1_000, 6 * PRICE, LOST * PRICE),  # nor beyond what the client agreed to
    ],
)
async def test_all_attempts_are_charged_and_shown(
    budget: int, limit: int | None, spent: int, tmp_path: Path
) -> None:
    keys = ApiKeys.open(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    access = Access(keys)
    key = await access.authorise(f"Bearer {keys.create('ann', budget_micro_usdc=budget)}")
    async with access.charges.open(key, 6 * PRICE, limit) as charge:
        if spent == LOST * PRICE:
            with pytest.raises(ExecutionFailed):
                await generate(charge)
        else:
            cost = make_cost([await generate(charge)])
            assert cost["steps"] == 5 and cost["cost_micro_usdc"] == spent
            assert len(cost["executions"]) == 2
    assert keys.list()[0].spent_micro_usdc == spent
    keys.close()


def test_a_cost_is_rounded_once() -> None:
    """Tokens of a model that costs half a micro-USDC a step."""
    report = Report(OPTIONS.prompt)
    manifest: Any = SimpleNamespace(cost_micro_usdc=lambda steps: -(-steps // 2))
    for _ in range(9):
        report.add_steps(1, manifest)
    assert report.cost_micro_usdc == 5


async def test_logits_that_cannot_be_right_are_asked_for_on_another_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Lease] = []

    async def write(lease: Lease, *_: object) -> AsyncGenerator[Piece, None]:
        used.append(lease)
        lease.session.plan.executors = lambda: ("0xa",)  # type: ignore[misc]
        if len(used) == 1:
            raise Implausible("the logits at position 3 contain NaN")
        yield Piece(Token(id=1, text="x"), None)

    monkeypatch.setattr(generation, "_generate", write)
    async with make_pool(warm=0) as (pool, _), Charges(None).open(None, 6 * PRICE) as charge:
        found = [p async for p in generate_text(pool, MODEL, OPTIONS, Report((1,)), charge)]
        assert len(found) == 1 and used[0] is not used[1]
        assert used[0].is_spoiled and not used[1].is_spoiled


async def test_s21_times_are_shown_to_whose_texts_they_are_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = SimpleNamespace(
        node="0x", task=0, label="", step=0, received_ns=0, started_ns=0, ended_ns=0, sent_ns=0
    )
    monkeypatch.setattr("splitup_gateway.timelines.make_trace", lambda *_: (event,))

    async def finish() -> None:
        return None

    timelines = Timelines()
    session = SimpleNamespace(execution_id="0x1", manifest=None, finish=finish)
    lease: Any = SimpleNamespace(session=session, principal="key ann")
    await timelines.keep(lease)
    assert len(timelines.show("0x1", "key ann", 0)["spans"]) == 1
    for other in ("key bob", "group ann", ""):
        assert timelines.show("0x1", other, 0) == {"is_known": False, "spans": []}
