"""The results of a demo, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from splitup.client.inputs import MICRO
from splitup.client.outcome import (
    Receipt,
    TraceEvent,
    Transition,
    compute_percentile,
    compute_transitions,
)
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Plan

_NS_PER_MS: Final = 1_000_000


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

    model: str
    manifest: Manifest
    plan: Plan
    steps: int
    prompt: str
    is_chat: bool  # whether the output answers the prompt, or continues it
    output: str
    tokens: int
    trace: tuple[TraceEvent, ...]
    submit_to_result_s: float
    plan_s: float  # of which: until the certificate was here
    first_s: float  # then until the first token
    rest_s: float  # and then until the last
    comparison: ResultComparison
    executions: int  # run until a task was drawn for verification
    verified: tuple[Verified, ...]
    receipts: tuple[Receipt, ...]
    setup_s: float
    total_s: float

    @property
    def is_equal(self) -> bool:
        return self.comparison.equal

    @property
    def tokens_per_s(self) -> float:
        """Return how fast tokens came after the first one."""
        return (self.tokens - 1) / self.rest_s if self.rest_s else 0.0

    def transitions(self) -> list[Transition]:
        """Return the transitions of the main execution."""
        return compute_transitions(self.manifest, self.trace)

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
            "model": self.model,
            "tasks": len(executors),
            "nodes_used": len(set(executors)),
            "assignment": [
                {"task": index, "label": self.manifest.tasks[index].label, "node": node}
                for index, node in enumerate(executors)
            ],
            "steps": self.steps,
            "prompt": self.prompt,
            "output": self.output,
            "equal_to_reference": self.is_equal,
            "largest_difference": self.comparison.largest_difference,
            "compared_bytes": self.comparison.compared_bytes,
            "determinism_class": self.comparison.determinism_class,
            "transition_ms": summarise(transitions),
            "transition_remote_ms": summarise([t for t in transitions if not t.is_local]),
            "transition_local_ms": summarise([t for t in transitions if t.is_local]),
            "submit_to_result_s": round(self.submit_to_result_s, 3),
            "plan_s": round(self.plan_s, 3),
            "first_token_s": round(self.first_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "reference_s": round(self.comparison.reference_s, 3),
            "executions": self.executions,
            "verified_tasks": [
                {
                    "execution_id": entry.execution_id,
                    "task": entry.task,
                    "label": entry.label,
                    "executor": entry.executor,
                    "validators": list(entry.validators),
                    "verdict": entry.verdict,
                }
                for entry in self.verified
            ],
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
