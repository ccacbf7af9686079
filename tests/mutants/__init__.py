"""Every protection of docs/security.md, what the code would say without it, and its test."""

from __future__ import annotations

from typing import Final

from tests.mutants import committee, costs, models, payment, transport

MUTANTS: Final = (
    *costs.MUTANTS,
    *payment.MUTANTS,
    *committee.MUTANTS,
    *models.MUTANTS,
    *transport.MUTANTS,
)
