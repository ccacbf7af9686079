"""Proposals of settlements, and their wire form, which lists each statement of members once.

Members state the same about an execution, one entry for each validator of each task, and up to 31
of them do: statements repeated in each attestation were four fifths of a proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field

from splitup.core import limits
from splitup.core.errors import PeerFault
from splitup.messages.base import AddressField, Bytes32Field, Message
from splitup.messages.completions import Completion
from splitup.messages.verification import (
    Attestation,
    Draw,
    Held,
    Ruling,
    SignedAttestation,
    Silence,
)

S = TypeVar("S", Held, Silence, Ruling)
_MAX_LISTED: Final = limits.MAX_COMMITTEE * limits.MAX_STATEMENTS
_MAX_ATTESTATIONS: Final = limits.MAX_COMMITTEE * limits.MAX_CONFLICTING
TokenField = Annotated[str, Field(max_length=limits.MAX_JWS_BYTES)]
RoundField = Annotated[int, Field(ge=0, lt=limits.MAX_SETTLEMENT_ROUNDS)]
Numbers = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=_MAX_LISTED)], ...],
    Field(max_length=limits.MAX_STATEMENTS),
]


class SettlementProposal(Message):
    """All evidence of an execution, from which every member computes the same settlement.

    ``results`` are the validators' own tokens; ``settlement_hash`` is of the proposer's settlement.
    """

    execution_id: Bytes32Field
    round: RoundField
    draw: Draw
    completions: tuple[Completion, ...] = Field(max_length=limits.MAX_TASKS)
    results: tuple[TokenField, ...] = Field(max_length=limits.MAX_STATEMENTS)
    attestations: tuple[SignedAttestation, ...] = Field(max_length=_MAX_ATTESTATIONS)
    settlement_hash: Bytes32Field


class PackedAttestation(Message):
    """An attestation whose statements are numbers in the lists of its proposal."""

    member: AddressField
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)]
    due: bool
    held: Numbers
    silent: Numbers
    rulings: Numbers
    signature: Annotated[str, Field(pattern=r"^0x[0-9a-f]{128}$")]


class PackedSettlement(Message):
    """The wire form of a ``SettlementProposal``."""

    execution_id: Bytes32Field
    round: RoundField
    draw: Draw
    completions: tuple[Completion, ...] = Field(max_length=limits.MAX_TASKS)
    results: tuple[TokenField, ...] = Field(max_length=limits.MAX_STATEMENTS)
    held: tuple[Held, ...] = Field(max_length=_MAX_LISTED)
    silent: tuple[Silence, ...] = Field(max_length=_MAX_LISTED)
    rulings: tuple[Ruling, ...] = Field(max_length=_MAX_LISTED)
    attestations: tuple[PackedAttestation, ...] = Field(max_length=_MAX_ATTESTATIONS)
    settlement_hash: Bytes32Field


def pack_settlement(proposal: SettlementProposal) -> PackedSettlement:
    """Return the proposal with each statement listed once."""
    held: dict[Held, int] = {}
    silent: dict[Silence, int] = {}
    rulings: dict[Ruling, int] = {}
    attestations = tuple(
        PackedAttestation(
            member=signed.attestation.member,
            steps=signed.attestation.steps,
            due=signed.attestation.due,
            held=_number(signed.attestation.held, held),
            silent=_number(signed.attestation.silent, silent),
            rulings=_number(signed.attestation.rulings, rulings),
            signature=signed.signature,
        )
        for signed in proposal.attestations
    )
    return PackedSettlement(
        **_get_shared(proposal),
        held=tuple(held),
        silent=tuple(silent),
        rulings=tuple(rulings),
        attestations=attestations,
    )


def unpack_settlement(packed: PackedSettlement) -> SettlementProposal:
    """Restore the attestations as they were signed; raise PeerFault for what nobody signs."""
    attestations = tuple(
        SignedAttestation(
            attestation=Attestation(
                execution_id=packed.execution_id,
                member=row.member,
                steps=row.steps,
                due=row.due,
                held=_find(row.held, packed.held),
                silent=_find(row.silent, packed.silent),
                rulings=_find(row.rulings, packed.rulings),
            ),
            signature=row.signature,
        )
        for row in packed.attestations
    )
    return SettlementProposal(**_get_shared(packed), attestations=attestations)


def _get_shared(proposal: SettlementProposal | PackedSettlement) -> dict[str, Any]:
    """Return the fields that both forms have, without the attestations."""
    names = SettlementProposal.model_fields.keys() - {"attestations"}
    return {name: getattr(proposal, name) for name in names}


def _number(statements: Sequence[S], listed: dict[S, int]) -> tuple[int, ...]:
    return tuple(listed.setdefault(statement, len(listed)) for statement in statements)


def _find(numbers: Sequence[int], listed: Sequence[S]) -> tuple[S, ...]:
    """Return the statements of these numbers.

    Each counts once: no attestation unpacks to more than the proposal that carries it.
    """
    if len(set(numbers)) != len(numbers) or max(numbers, default=-1) >= len(listed):
        raise PeerFault("a settlement's proposal repeats a statement, or names one that it lacks")
    return tuple(listed[number] for number in numbers)
