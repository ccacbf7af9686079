"""The client's signed end message: the number of steps and the digests of the inputs it sent.

Executors keep it and show it with their commitments: it is the only statement of how many steps
are verified and paid. An interim end counts if the client never sends its final one. It
identifies an executor that commits to other inputs than the client sent
(``splitup.protocol.settlement.edge_faults``).

For what the client ordered, received and did not sign for, executors count the steps themselves,
and show an input of the last one, which the client signed (ADR 21). Pure functions.
"""

from __future__ import annotations

from typing import Final

from splitup.core import limits
from splitup.core.errors import BadSignature, PeerFault
from splitup.crypto.keys import Identity, verify_raw
from splitup.graph.manifest import Manifest
from splitup.messages.completions import End, SignedEnd
from splitup.messages.frames import read_delivery, read_order
from splitup.messages.plans import Plan

_DOMAIN: Final = b"splitup/end/v2\0"


def sign_end(identity: Identity, end: End) -> SignedEnd:
    """Return an end with the client's signature."""
    signature = identity.sign_raw(_DOMAIN + end.canonical_bytes())
    return SignedEnd(end=end, signature="0x" + signature.hex())


def check_end(signed: SignedEnd, plan: Plan, manifest: Manifest | None = None) -> None:
    """Raise PeerFault or BadSignature unless the plan's client signed this end message.

    With the ``manifest`` it has to be about the model's inputs and outputs, too: others' messages
    carry it, and it must not be larger than that.
    """
    end, request = signed.end, plan.request
    _check_number(end, plan)
    if manifest is not None and (
        len(end.inputs) not in (0, len(manifest.inputs))
        or len(end.outputs) not in (0, len(manifest.outputs))
    ):
        raise PeerFault(f"the end of {request.execution_id} is not about the model's ports")
    message = _DOMAIN + end.canonical_bytes()
    verify_raw(request.client_key, message, bytes.fromhex(signed.signature[2:]))


def make_count(execution_id: str, steps: int) -> SignedEnd:
    """Return an executor's own count of the steps that it computed."""
    end = End(execution_id=execution_id, steps=steps, inputs=(), final=False)
    return SignedEnd(end=end, signature="")


def check_count(counted: SignedEnd, plan: Plan) -> None:
    """Raise PeerFault unless this may be an executor's own count of steps."""
    _check_number(counted.end, plan)
    if counted != make_count(plan.request.execution_id, counted.end.steps):
        raise PeerFault(f"{plan.request.execution_id}: a count of steps states more than a number")


def check_order(order: str, plan: Plan) -> int:
    """Return how many steps the plan's client ordered, as it signed with their inputs.

    Raises PeerFault, BadSignature.
    """
    steps, seal = read_order(order, plan.request.execution_id)
    verify_raw(plan.request.client_key, seal.signed, seal.signature)
    return steps


def _check_number(end: End, plan: Plan) -> None:
    request = plan.request
    if end.execution_id != request.execution_id:
        raise PeerFault("an end message is for another execution")
    if end.steps > request.steps:
        raise PeerFault(f"{request.execution_id} ends after more steps than were paid for")


def check_interim(signed: SignedEnd, plan: Plan, manifest: Manifest, before: int) -> None:
    """Raise PeerFault, BadSignature unless this interim end may follow one of ``before`` steps.

    Interim ends come one after the other, and show that the last executors have computed all steps.
    So no client can lead a node away from the numbers that the others have (ADR 21).
    """
    check_end(signed, plan, manifest)
    end = signed.end
    if not end.steps or end.steps % limits.INTERIM_STEPS:
        raise PeerFault(f"an interim end of {end.execution_id} has {end.steps} steps")
    if before and end.steps != before + limits.INTERIM_STEPS:
        raise PeerFault(f"an interim end of {end.execution_id} is missing after {before} steps")
    if len(end.outputs) != len(manifest.outputs):
        raise PeerFault(f"an interim end of {end.execution_id} does not show what was received")
    for port, text in zip(manifest.outputs, end.outputs, strict=True):
        delivery = read_delivery(text) if text else None
        found = delivery and (delivery.execution_id, delivery.task, delivery.port, delivery.step)
        if delivery is None or found != (end.execution_id, port.task, port.port, end.steps - 1):
            raise PeerFault(
                f"an interim end of {end.execution_id} does not show output '{port.name}'"
            )
        keys = [plan.node_of(node).signing_key for node in plan.tasks[port.task]]
        if not any(_is_signed(key, delivery.seal.signed, delivery.seal.signature) for key in keys):
            raise BadSignature(f"output '{port.name}' in an interim end is signed by no candidate")


def _is_signed(key: str, data: bytes, signature: bytes) -> bool:
    try:
        verify_raw(key, data, signature)
    except BadSignature:
        return False
    return True
