"""The client's signed end message: the number of steps and the digests of the inputs it sent.

Executors keep it and show it with their commitments: it is the only statement of how many steps
are verified and paid. It identifies an executor that commits to other inputs than the client sent
(``splitup.protocol.settlement.edge_faults``). Pure functions.
"""

from __future__ import annotations

from typing import Final

from splitup.core.errors import PeerFault
from splitup.crypto.keys import Identity, verify_raw
from splitup.graph.manifest import Manifest
from splitup.messages.completions import End, SignedEnd
from splitup.messages.plans import Plan

_DOMAIN: Final = b"splitup/end/v1\0"


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
    if end.execution_id != request.execution_id:
        raise PeerFault("an end message is for another execution")
    if end.steps > request.steps:
        raise PeerFault(f"{request.execution_id} ends after more steps than were paid for")
    if manifest is not None and (
        len(end.inputs) not in (0, len(manifest.inputs))
        or len(end.outputs) not in (0, len(manifest.outputs))
    ):
        raise PeerFault(f"the end of {request.execution_id} is not about the model's ports")
    message = _DOMAIN + end.canonical_bytes()
    verify_raw(request.client_key, message, bytes.fromhex(signed.signature[2:]))
