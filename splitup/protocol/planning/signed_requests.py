"""Requests that a client signed but did not send to the chain: one at a time per client.

Such a request is planned before the chain knows it; plan and request then open the execution in one
transaction. A member gives its shares and signatures to only one signed request of a client until
that request is on chain or can no longer be opened. Two quorums share an honest member, so no two
certified requests of a client compete for its balance, and the freeze keeps the balance in place.

A member writes the request that it supports to its journal before it acts, and reads it again after
a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from splitup.core import tuning
from splitup.core.errors import BadSignature, PeerFault, Unavailable
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import (
    Domain,
    compute_execution_id,
    recover_signer,
    sign_quorum,
)
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.plans import Request, SignedRequest, hash_request
from splitup.protocol.committee.commands import Command, Forget, Persist
from splitup.protocol.committee.events import SignedRequestReceived

SIGNED_REQUEST: Final = "opening"  # journal kind: configuration/client -> request we support


def check_signed(signed: SignedRequest) -> None:
    """Raise PeerFault, BadSignature unless a request is well-formed and signed by its client."""
    request = signed.request
    if request.block_hash != ZERO_BYTES32:
        raise PeerFault("a signed request is in no block yet; leave its block hash 0")
    place = request.chain_id, request.market, request.client, request.nonce
    if request.execution_id != compute_execution_id(*place):
        raise PeerFault("a signed request has the id of another client, number, chain or market")
    signer = recover_signer(
        Domain(request.chain_id, request.market),
        hash_request(request),
        bytes.fromhex(signed.signature[2:]),
    )
    if signer != request.client:
        raise BadSignature(f"the request is not signed by its client {request.client}")


def sign_request(identity: Identity, request: Request) -> SignedRequest:
    """Return a request with its client's signature."""
    domain = Domain(request.chain_id, request.market)
    signature = sign_quorum(identity.private_key, domain, hash_request(request))
    return SignedRequest(request=request, signature="0x" + signature.hex())


def is_same(first: Request, second: Request) -> bool:
    """Return whether two requests are equal except for the block that holds them."""
    return first.model_copy(update={"block_hash": second.block_hash}) == second


class SignedRequests:
    """The signed requests that one member supports in one configuration."""

    def __init__(
        self, configuration: int, kept: Sequence[SignedRequest], confirmations: int = 0
    ) -> None:
        self._configuration = configuration
        self._live = {signed.request.client: signed for signed in kept}
        self._confirmations = confirmations
        self._passed: dict[str, int] = {}  # execution -> first block seen past its deadline

    def find(self, execution_id: str) -> SignedRequest | None:
        """Return the signed request of an execution that is not on chain yet."""
        live = self._live.values()
        return next((s for s in live if s.request.execution_id == execution_id), None)

    def list_live(self) -> list[Request]:
        """Return the supported requests that are not on chain yet, the oldest first."""
        return [signed.request for signed in self._live.values()]

    def lacks_place(self, client: str) -> bool:
        """Return whether a request of this client needs the place of another."""
        return client not in self._live and len(self._live) >= tuning.MAX_OPEN_EXECUTIONS

    def check(self, event: SignedRequestReceived, timestamp_s: int) -> None:
        """Raise PeerFault, BadSignature for a wrong request, Unavailable while another is open."""
        signed, request = event.signed, event.signed.request
        if request.deadline <= timestamp_s:
            raise PeerFault(f"the deadline of {request.execution_id} has passed")
        if event.frozen_until <= request.deadline:
            raise PeerFault(
                f"the balance of {request.client} is frozen until {event.frozen_until}, and the "
                f"deadline is {request.deadline}; freeze it for longer"
            )
        if event.balance_micro_usdc < request.max_price_micro_usdc:
            raise PeerFault(
                f"{request.client} has {event.balance_micro_usdc} micro-USDC in the market, and "
                f"{request.max_price_micro_usdc} are needed; deposit more"
            )
        check_signed(signed)
        live = self._live.get(request.client)
        if live is not None and live.request != request:
            raise Unavailable(
                f"{request.client} has another signed request, {live.request.execution_id}, that "
                "is not on chain yet; try again"
            )

    def restore(self, signed: SignedRequest) -> list[Command]:
        """Support a request, also again when its block is gone, unless the client has another.

        Returns what to persist first.
        """
        client = signed.request.client
        if self._live.setdefault(client, signed) != signed:
            return []
        return [Persist(SIGNED_REQUEST, self._key(client), signed.model_dump(mode="json"))]

    def process_closed(self, execution_id: str) -> list[Command]:
        """Stop supporting a request that is on chain or can no longer be opened."""
        signed = self.find(execution_id)
        if signed is None:
            return []
        del self._live[signed.request.client]
        self._passed.pop(execution_id, None)
        return [Forget(SIGNED_REQUEST, self._key(signed.request.client))]

    def _key(self, client: str) -> str:
        return f"{self._configuration}/{client}"

    def list_expired(self, timestamp_s: int, block_number: int) -> list[Request]:
        """Return the requests that the chain did not open and opens no more.

        An opening in the last block before the deadline is seen ``confirmations`` blocks later.
        """
        live = [signed.request for signed in self._live.values()]
        passed = [request for request in live if request.deadline < timestamp_s]
        return [
            request
            for request in passed
            if block_number
            >= self._passed.setdefault(request.execution_id, block_number) + self._confirmations
        ]
