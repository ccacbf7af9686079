"""What a newcomer needs to take part in a network; a storage gateway tells it to anybody."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from splitup.core import limits
from splitup.messages.base import AddressField, Bytes32Field, EndpointField, Message

RpcUrlField = Annotated[str, Field(pattern=r"^https?://\S+$", max_length=2048)]


class DeployedContracts(Message):
    """One chain, named by id and genesis block, and SplitUp's contracts on it.

    ``confirmations`` is how many blocks the members wait before they believe what they read. All of
    them derive from it how long complaints count. Nobody looks for events before ``first_block``.
    """

    chain_id: Annotated[int, Field(ge=1)]
    genesis_hash: Bytes32Field
    usdc: AddressField
    committee: AddressField
    bonds: AddressField
    nodes: AddressField
    models: AddressField
    market: AddressField
    confirmations: Annotated[int, Field(ge=0, le=limits.MAX_CONFIRMATIONS)] = 0
    first_block: Annotated[int, Field(ge=0)] = 0


class NetworkDescription(Message):
    """A network. ``rpc_url`` is "" where newcomers bring an RPC endpoint of their own."""

    contracts: DeployedContracts
    gateway_urls: Annotated[
        tuple[EndpointField, ...], Field(min_length=1, max_length=limits.MAX_GATEWAYS)
    ]
    rpc_url: RpcUrlField | Annotated[str, Field(max_length=0)] = ""
