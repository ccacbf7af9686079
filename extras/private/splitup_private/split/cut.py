"""What a private model's manifest says of the tensors between a device and the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from splitup.client.outcome import Array
from splitup.core.errors import InvalidInput
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.manifest import InputSource, Manifest, Port
from splitup_private.split.messages import MAX_MESSAGE_BYTES

_HEADER_BYTES: Final = 4_096  # that a message of the largest tensor leaves to its other fields


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
                cut = cls(layouts[0].name, sent.name, received.name, width, chunk)
                if not cut.max_rows:
                    raise InvalidInput(f"a hidden state of model {name} does not fit a message")
                return cut
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
