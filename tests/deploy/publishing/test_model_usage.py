from __future__ import annotations

from typing import Any

from splitup_deploy.publishing.model_usage import ModelUsage, count_usage

from splitup.chain.event_stream import ChainEvent
from splitup.chain.registered_models import RegisteredModel


def make_model(model_id: str) -> RegisteredModel:
    return RegisteredModel(model_id, "tiny", "0xd", 3, 10, is_current=True, is_retired=False)


def make_event(name: str, **args: Any) -> ChainEvent:
    return ChainEvent(name, args, 1, "0xb", 0, "0xt", "market")


def request(execution: str, model: str, client: str) -> ChainEvent:
    return make_event("RequestNodeSelections", executionId=execution, modelId=model, client=client)


def test_settled_executions_count_with_steps_and_money_and_others_by_number_alone() -> None:
    events = [
        request("e1", "m1", "alice"),
        request("e2", "m2", "alice"),
        request("e3", "m1", "alice"),
        request("e4", "m1", "bob"),
        request("e5", "other", "bob"),
        make_event("Settled", executionId="e1", steps=7, paid=70, fee=2),
        make_event("Settled", executionId="e5", steps=1_000, paid=1_000, fee=1_000),
        make_event("Refunded", executionId="e3", client="alice", amount=9, reservation=1),
        make_event("Settled", executionId="e4", steps=3, paid=30, fee=1),
        make_event("Deposited", account="alice", amount=1),
    ]
    first, second = count_usage([make_model("m1"), make_model("m2")], events)
    assert first == ModelUsage(
        model_id="m1",
        name="tiny",
        executions=3,
        settled=2,
        refunded=1,
        open=0,
        clients=2,
        steps=10,
        paid_micro_usdc=100,
        fee_micro_usdc=3,
    )
    assert (second.executions, second.open, second.clients, second.steps) == (1, 1, 1, 0)
