"""The final hidden states of a private model, and what an adapter adds to them.

They are what nodes return when all that follows on the client is the last norm and the head:
``splitup-deploy register --private 0``.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from splitup.core.errors import InvalidInput
from splitup.core.tensors import TensorSpec, array_to_bytes, bytes_to_array
from splitup.graph.manifest import Manifest
from splitup.net.http import SignedClient

_DTYPES: Final = ("float16", "float32")


class StateAdapter(Protocol):
    """An adapter of one session: it changes one hidden state after another."""

    async def apply(self, hidden: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return what it adds to a hidden state [width], float64; raise SplitUpError."""

    async def close(self) -> None:
        """End it."""

    def describe(self) -> str:
        """Return a line for the user: which one it is, and what it took."""


class AdapterChoice(Protocol):
    """Which adapter a user wants; what extras offer (``splitup.core.extras``)."""

    async def choose(
        self, http: SignedClient, question: str | None, width: int
    ) -> AdapterChoice | None:
        """Return the adapter that fits a question, None for none; raise SplitUpError."""

    async def open(self, http: SignedClient, width: int) -> StateAdapter:
        """Open it for hidden states of ``width`` elements; raise SplitUpError."""


def find_final_state(manifest: Manifest, model: str) -> TensorSpec:
    """Return what nodes return, the final hidden state of each row; raise InvalidInput."""
    client = manifest.client
    if client is None or manifest.text is None:
        raise InvalidInput(
            f"the model {model} computes its tokens on nodes, which would need what an encrypted "
            "adapter adds; use a text model that is registered with --private 0"
        )
    early = client.find_early()
    late = [task for index, task in enumerate(client.tasks) if index not in early]
    spec = manifest.outputs[0].spec
    if len(manifest.outputs) != 1 or any(task.label.startswith("block ") for task in late):
        raise InvalidInput(
            f"the model {model} leaves blocks to the client after the nodes; an adapter changes "
            "the final hidden state, which nodes return of models registered with --private 0"
        )
    if spec.dtype not in _DTYPES or len(spec.shape) != 2:
        raise InvalidInput(
            f"the nodes of model {model} return {spec}; an adapter takes rows of "
            f"{' or '.join(_DTYPES)}"
        )
    return spec


async def adapt_states(
    adapter: StateAdapter, spec: TensorSpec, data: bytes | memoryview, rows: list[int]
) -> bytes:
    """Return final hidden states with what the adapter adds to those of ``rows``.

    The others are not read any more. Raises what ``StateAdapter.apply`` raises.
    """
    states = bytes_to_array(spec, data)
    for row in sorted(set(rows)):
        if not 0 <= row < len(states):
            raise InvalidInput(f"output row {row} is wanted of a step of {len(states)} rows")
        state = states[row].astype(np.float64)
        states[row] = (state + await adapter.apply(state)).astype(states.dtype)
    return array_to_bytes(spec, states)
