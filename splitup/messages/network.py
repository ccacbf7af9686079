"""What a newcomer needs to take part in a network; a storage gateway tells it to anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from splitup.core import limits
from splitup.core.errors import ConfigurationError
from splitup.core.files import write_whole
from splitup.core.records import find_error
from splitup.messages.base import AddressField, Bytes32Field, EndpointField, Message

RpcUrlField = Annotated[str, Field(pattern=r"^https?://\S+$", max_length=2048)]


class Deployment(Message):
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

    def get_address(self, contract: str) -> str:
        """Return a contract's address by its short name."""
        address: str = getattr(self, contract)
        return address

    def save(self, path: Path) -> None:
        """Write the deployment as JSON, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a deployment; raise ConfigurationError when it is missing or damaged."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"the deployment file {path} cannot be read ({error.strerror}); "
                "get it from the operator of the network, or start one with: splitup up"
            ) from None
        except ValidationError as error:
            place, problem = find_error(error)
            raise ConfigurationError(
                f"the deployment file {path} is damaged: {place}: {problem}; get it again from "
                "the operator of the network"
            ) from None


class NetworkDescription(Message):
    """A network. ``rpc_url`` is "" where newcomers bring an RPC endpoint of their own."""

    contracts: Deployment
    gateway_urls: Annotated[
        tuple[EndpointField, ...], Field(min_length=1, max_length=limits.MAX_GATEWAYS)
    ]
    rpc_url: RpcUrlField | Annotated[str, Field(max_length=0)] = ""
