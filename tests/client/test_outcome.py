from __future__ import annotations

import pytest

from splitup.chain.event_stream import ChainEvent
from splitup.client.market.receipts import make_receipt
from splitup.client.outcome import compute_percentile, compute_transitions, make_trace
from splitup.core.errors import Unavailable
from splitup.crypto.quorum import Payment, pack_word
from splitup.demo.screen import draw_gantt
from splitup.messages.progress import Span, Trace
from tests.builders import address, make_chain_manifest

ID, OTHER = "0x" + "ee" * 32, "0x" + "dd" * 32


def span(task: int, received: int, started: int, ended: int) -> Span:
    return Span(
        task=task,
        step=0,
        received_ns=str(received),
        started_ns=str(started),
        ended_ns=str(ended),
        sent_ns=str(ended),
    )


MANIFEST = make_chain_manifest(3)
TRACE = make_trace(
    MANIFEST,
    [
        Trace(execution_id=ID, node=address(2), spans=(span(2, 410, 450, 500),)),
        Trace(
            execution_id=ID, node=address(1), spans=(span(0, 0, 10, 100), span(1, 120, 130, 400))
        ),
    ],
)


def test_transitions_run_from_end_to_start() -> None:
    transitions = compute_transitions(MANIFEST, TRACE)
    assert [(t.source, t.target, t.nanoseconds) for t in transitions] == [(0, 1, 30), (1, 2, 50)]
    assert [t.is_local for t in transitions] == [True, False]


def test_a_missing_predecessor_hides_its_transition() -> None:
    assert [t.target for t in compute_transitions(MANIFEST, TRACE[1:])] == [2]


def test_trace_is_ordered_by_start() -> None:
    assert [(event.task, event.label) for event in TRACE] == [(i, f"task {i}") for i in range(3)]


def test_gantt_shows_transfer_waiting_and_compute_apart() -> None:
    names = {address(1): "A", address(2): "B"}
    lines = [line.plain for line in draw_gantt(TRACE, MANIFEST, names)]
    bars = [line.partition("│")[2].partition("│")[0] for line in lines]
    assert [bar.count("▒") for bar in bars] == [0, 3, 1]  # 20 and 10 of 500 ns on 64 columns
    assert [bar.count("█") > bar.count("·") for bar in bars] == [True, True, True]
    assert [line.split("│")[0].split()[-1] for line in lines] == ["A", "A", "B"]


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (99, 4), (100, 4), (1, 1)])
def test_percentiles_are_nearest_rank(percent: int, value: int) -> None:
    assert compute_percentile([4, 1, 3, 2], percent) == value


def event(name: str, index: int, **args: object) -> ChainEvent:
    return ChainEvent(name, {"executionId": ID, **args}, 7, "0xb", index, "0xt", "market")


ASKED = event("RequestNodeSelections", 0, modelId="0x" + "0d" * 32, verifyBps=5_000)


def test_receipt_of_a_settlement_lists_who_got_what() -> None:
    receipt = make_receipt(
        ID,
        [
            ASKED,
            event("Rewarded", 0, executionId=OTHER, to=address(9), amount=9),
            event("Slashed", 2, taken=("0x" + pack_word(address(2), 70).hex(),)),
            event("Rewarded", 3, to=address(3), amount=4),
            event(
                "Settled",
                4,
                steps=2,
                paid=5,
                fee=1,
                refunded=3,
                slashed=70,
                evidenceRoot="0x01",
                payouts=("0x" + pack_word(address(1), 5).hex(),),
            ),
        ],
    )
    assert receipt.payments == (Payment(address(1), 5, False), Payment(address(3), 4, True))
    assert receipt.slashes == ((address(2), 70),)
    assert (receipt.status, receipt.steps, receipt.paid_micro_usdc) == ("settled", 2, 5)
    assert receipt.fee_micro_usdc == 1
    assert (receipt.model_id, receipt.verify_bps) == ("0x" + "0d" * 32, 5_000)
    assert (receipt.refunded_micro_usdc, receipt.evidence_root) == (3, "0x01")


def test_receipt_of_a_refund_is_the_price_and_the_reservation() -> None:
    args = {"client": address(1), "amount": 12, "reservation": 2}
    receipt = make_receipt(ID, [ASKED, event("Refunded", 0, **args)])
    assert (receipt.status, receipt.refunded_micro_usdc, receipt.payments) == ("refunded", 12, ())
    assert receipt.fee_micro_usdc == 2


def test_events_that_lag_behind_are_said_so() -> None:
    with pytest.raises(Unavailable, match="ask for the receipt again"):
        make_receipt(ID, [event("PlanAccepted", 0)])
