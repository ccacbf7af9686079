"""What a settlement rests on: the root that the chain keeps, and the form that anybody can read."""

from __future__ import annotations

from collections.abc import Sequence

from splitup.core.codec import compute_digest, encode_canonical
from splitup.messages.verification import Draw, Evidence, TaskVerdict
from splitup.protocol.settlement.proof_of_sampling import Verdict


def compute_evidence_root(evidence: Evidence) -> str:
    """Return what the chain keeps of the evidence: commitments, randomness, verdicts."""
    value = {
        "draw": evidence.draw.signature,
        "verdicts": [
            {
                "close": verdict.close,
                "liars": list(verdict.liars),
                "outcome": verdict.outcome,
                "silent": list(verdict.silent),
                "task": verdict.task,
                "validators": list(verdict.validators),
            }
            for verdict in evidence.verdicts
        ],
    }
    return "0x" + compute_digest(b"splitup/evidence/v3\0" + encode_canonical(value))


def make_evidence(draw: Draw, verdicts: Sequence[Verdict]) -> Evidence:
    """Return draw and verdicts as members show them to anybody."""
    return Evidence(
        draw=draw,
        verdicts=tuple(
            TaskVerdict(
                task=verdict.task,
                outcome=verdict.outcome.value,
                validators=verdict.validators,
                liars=verdict.liars,
                silent=verdict.silent,
                close=verdict.close,
            )
            for verdict in verdicts
        ),
    )
