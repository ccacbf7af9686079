"""What the chain records of a registered model, and whether a manifest says the same.

The ModelRegistry keeps ``keccak256(abi.encode(tasks, edges))``, with every task's id, memory, work
and price. A model's id binds only the manifest, which its developer writes: without this comparison
a copy of another developer's manifest, registered at price 0, would be computed for nothing.
"""

from __future__ import annotations

from typing import Any

from eth_abi.abi import encode
from eth_hash.auto import keccak

from splitup.chain.client import Chain
from splitup.core.errors import ChainRejected, InvalidModel
from splitup.graph.manifest import Manifest


def encode_tasks(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the tasks as ``ModelRegistry.register`` takes them."""
    return [
        {
            "taskId": "0x" + task.task_id,
            "vramBytes": task.vram_bytes,
            "flops": task.flops,
            "priceNanoUsdc": task.price_nano_usdc,
        }
        for task in manifest.tasks
    ]


def encode_edges(manifest: Manifest) -> list[int]:
    """Return the task graph's edges, ``from << 16 | to``, ascending."""
    return sorted(source << 16 | target for source, target in manifest.edges())


def compute_dag_root(manifest: Manifest) -> str:
    """Return the root that the ModelRegistry records for these tasks, prices and edges."""
    tasks = [
        (bytes.fromhex(task.task_id), task.vram_bytes, task.flops, task.price_nano_usdc)
        for task in manifest.tasks
    ]
    types = ("(bytes32,uint64,uint64,uint64)[]", "uint32[]")
    return "0x" + keccak(encode(types, (tasks, encode_edges(manifest)))).hex()


class RecordedModels:
    """Compares manifests with the chain's record, each once.

    Only a reorganisation of the chain can change a record. A result from before is kept: a request
    below the manifest's price gets no plan, whatever the chain records.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._agrees: dict[str, bool] = {}  # by model id; at most as many as are registered

    def is_refused(self, model_id: str) -> bool:
        """Return whether a manifest was compared before and differs from the record."""
        return self._agrees.get(model_id) is False

    async def check(self, manifest: Manifest) -> None:
        """Raise InvalidModel unless the chain records these tasks, edges and prices.

        Raises ChainUnavailable when the chain does not answer.
        """
        model_id = manifest.model_id
        if model_id not in self._agrees:
            try:
                model = await self._chain.call("models", "modelOf", model_id)
            except ChainRejected as error:
                raise InvalidModel(f"model {model_id} is not registered: {error}") from None
            self._agrees[model_id] = model["dagRoot"] == compute_dag_root(manifest)
        if not self._agrees[model_id]:
            raise InvalidModel(
                f"the manifest of model {model_id} states other tasks, edges or prices than the "
                "chain records, so no node serves it; register a changed model, for example with "
                "another --price"
            )
