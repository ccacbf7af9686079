"""A private model as the server of a device runs it: its leases, files and description."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from splitup_private.split.messages import MAX_MESSAGE_BYTES, PrivateModel

from splitup.client.execution.session import Session
from splitup.client.leases import LeasePool
from splitup.client.network import Network
from splitup.client.outcome import Array
from splitup.client.private.privacy import describe_measure
from splitup.core.errors import InvalidInput
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import InputSource, Manifest, Port, TextInfo
from splitup.messages.snapshots import ModelHolders

_BLOCK: Final = re.compile(r"block (\d+)\b")
_HEADER_BYTES: Final = 4_096  # that a message of the largest tensor leaves to its other fields


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
class Cut:
    """What crosses the network in a step: the layout, and hidden states of one width each way."""

    layout: str
    hidden: str
    output: str
    width: int
    chunk: int

    @classmethod
    def find(cls, manifest: Manifest, name: str) -> Cut:
        """Return a private model's cut; raise InvalidInput for one of another form."""
        client = manifest.client
        if client is None:
            raise InvalidInput(f"model {name} is not private: it leaves no task to the client")
        layouts: list[Port] = []
        hidden: list[Port] = []
        for port, source in zip(manifest.inputs, client.sends, strict=True):
            is_layout = isinstance(source, InputSource) and source.input == "layout"
            (layouts if is_layout else hidden).append(port)
        if len(layouts) == 1 and len(hidden) == 1 and len(manifest.outputs) == 1:
            sent, received = hidden[0], manifest.outputs[0]
            if (
                sent.dtype == received.dtype == "float32"
                and len(sent.shape) == 2
                and sent.shape == received.shape
                and sent.rows
                and sent.rows == received.rows == layouts[0].rows
            ):
                chunk, width = sent.shape
                return cls(layouts[0].name, sent.name, received.name, width, chunk)
        raise InvalidInput(
            f"model {name} exchanges other values with nodes than hidden states in float32, one "
            "way and back; split inference has no messages for them"
        )

    @property
    def max_rows(self) -> int:
        """The most rows of one message, in base64."""
        return (MAX_MESSAGE_BYTES - _HEADER_BYTES) * 3 // 4 // (4 * self.width)

    def count_steps(self, rows: int) -> int:
        """Return how many steps so many rows take."""
        return -(-rows // self.chunk)

    def split(self, rows: Array, position: int) -> list[dict[str, Array]]:
        """Return the steps that feed rows from a position on, each row attending to all before.

        The layout depends on positions alone, so that the server makes it.
        """
        steps = []
        for start in range(0, len(rows), self.chunk):
            part = rows[start : start + self.chunk]
            layout = make_arrays(make_causal_step((0,) * len(part), position + start), self.chunk)[
                "layout"
            ]
            steps.append({self.layout: layout, self.hidden: np.ascontiguousarray(part)})
        return steps


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
