"""The results of a demo, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from splitup.client.execution.session import Session
from splitup.client.inputs import MICRO
from splitup.client.market.receipts import Receipt
from splitup.client.outcome import (
    Array,
    TraceEvent,
    Transition,
    compute_percentile,
    compute_transitions,
)
from splitup.demo.models import DemoModel
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Plan

_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation with everything it returned."""

    session: Session
    text: str
    tokens: int
    steps: tuple[dict[str, Array], ...]  # every step's inputs, by name
    logits: Array  # of all rows that were wanted: [rows, vocab]
    trace: tuple[TraceEvent, ...]
    elapsed_s: float
    plan_s: float
    first_s: float  # from the plan to the first token
    rest_s: float  # from the first token to the last

    @property
    def tokens_per_s(self) -> float:
        """Return how fast tokens came after the first one."""
        return (self.tokens - 1) / self.rest_s if self.rest_s else 0.0


@dataclass(frozen=True, slots=True)
class Verified:
    """A task that was drawn for verification, and the verdict."""

    execution_id: str
    task: int
    label: str
    executor: str
    validators: tuple[str, ...]
    verdict: str


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """The distributed output compared with that of the whole model in one process."""

    equal: bool
    compared_bytes: int
    largest_difference: float
    reference_s: float  # compute alone, of all steps
    determinism_class: str


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything ``splitup demo`` shows. Times of the main execution; money of all of them."""

    model: DemoModel
    main: Generation
    comparison: ResultComparison
    verified: tuple[Verified, ...]
    receipts: tuple[Receipt, ...]  # of all executions, run until a task was drawn
    setup_s: float
    total_s: float

    @property
    def manifest(self) -> Manifest:
        return self.main.session.manifest

    @property
    def plan(self) -> Plan:
        return self.main.session.plan

    @property
    def is_equal(self) -> bool:
        return self.comparison.equal

    def transitions(self) -> list[Transition]:
        """Return the transitions of the main execution."""
        return compute_transitions(self.manifest, self.main.trace)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        transitions = self.transitions()
        payments: dict[str, float] = {}
        for receipt in self.receipts:
            for payment in receipt.payments:
                usdc = payment.amount_micro_usdc / MICRO
                payments[payment.account] = round(payments.get(payment.account, 0.0) + usdc, 6)
        executors = self.plan.executors()
        return {
            "model": self.model.name,
            "tasks": len(executors),
            "nodes_used": len(set(executors)),
            "assignment": [
                {"task": index, "label": self.manifest.tasks[index].label, "node": node}
                for index, node in enumerate(executors)
            ],
            "steps": self.main.session.steps,
            "prompt": self.model.prompt,
            "output": self.main.text,
            "equal_to_reference": self.is_equal,
            "largest_difference": self.comparison.largest_difference,
            "compared_bytes": self.comparison.compared_bytes,
            "determinism_class": self.comparison.determinism_class,
            "transition_ms": summarise(transitions),
            "transition_remote_ms": summarise([t for t in transitions if not t.is_local]),
            "transition_local_ms": summarise([t for t in transitions if t.is_local]),
            "submit_to_result_s": round(self.main.elapsed_s, 3),
            "plan_s": round(self.main.plan_s, 3),
            "first_token_s": round(self.main.first_s, 3),
            "tokens_per_s": round(self.main.tokens_per_s, 2),
            "reference_s": round(self.comparison.reference_s, 3),
            "executions": len(self.receipts),
            "verified_tasks": [asdict(entry) for entry in self.verified],
            "payments_usdc": payments,
            "refunded_usdc": sum(r.refunded_micro_usdc for r in self.receipts) / MICRO,
            "slashed": [
                {"node": node, "usdc": amount / MICRO}
                for receipt in self.receipts
                for node, amount in receipt.slashes
            ],
            "setup_s": round(self.setup_s, 1),
            "total_s": round(self.total_s, 1),
        }


def summarise(transitions: Sequence[Transition]) -> dict[str, float | int | None]:
    """Return count, median and 99th percentile in milliseconds; None when there is nothing."""
    values = [transition.nanoseconds for transition in transitions]
    return {
        "count": len(values),
        "p50": round(compute_percentile(values, 50) / _NS_PER_MS, 3) if values else None,
        "p99": round(compute_percentile(values, 99) / _NS_PER_MS, 3) if values else None,
    }
