"""A private model as the server of a device runs it: its leases, files and description."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup_private.split.cut import Cut
from splitup_private.split.messages import PrivateModel

from splitup.client.execution.session import Session
from splitup.client.leases import LeasePool
from splitup.client.network import Network
from splitup.client.private.privacy import describe_measure
from splitup.graph.manifest import Manifest, TextInfo
from splitup.messages.snapshots import ModelHolders

_BLOCK: Final = re.compile(r"block (\d+)\b")


class NodeSessions:
    """Opens executions whose inputs and outputs are those of the nodes."""

    def __init__(self, net: Network) -> None:
        self._net = net

    def session(self, model: str, **terms: Any) -> AbstractAsyncContextManager[Session]:
        """Open an execution; see ``Network.session``."""
        return self._net.session(model, nodes_only=True, **terms)

    async def look(self, name: str) -> ModelHolders | None:
        """Return how far nodes have loaded a model; see ``Network.look``."""
        return await self._net.look(name)


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A private model, its leases, and the files that devices fetch, by digest."""

    name: str
    model_id: str
    manifest: Manifest
    info: TextInfo
    cut: Cut
    pool: LeasePool
    session_steps: int  # that a session's execution has left when it begins
    files: dict[str, Path]

    def describe(self) -> PrivateModel:
        """Return what a device needs to know."""
        client, info = self.manifest.client, self.info
        assert client is not None
        first = _BLOCK.match(self.manifest.tasks[0].label)
        return PrivateModel(
            name=self.name,
            model_id=self.model_id,
            private_blocks=int(first[1]) if first else 0,
            hidden_dim=self.cut.width,
            context=info.context,
            chunk=self.cut.chunk,
            max_rows=min(self.cut.max_rows, info.context),
            price_nano_usdc_per_step=self.manifest.price_nano_usdc,
            vocab=info.vocab,
            eos_ids=info.eos_ids,
            is_recurrent=info.is_recurrent,
            chat=None if info.chat is None else info.chat.model_dump(mode="json"),
            tokenizer_digest=info.tokenizer_digest,
            tokenizer_bytes=info.tokenizer_bytes,
            input=self.cut.hidden,
            output=self.cut.output,
            client=client.model_dump(mode="json"),
            measured=tuple(describe_measure(client.privacy)) if client.privacy else (),
        )
