"""A manifest counts only if the chain records its tasks, edges and prices."""

from __future__ import annotations

from typing import Any

import pytest

from splitup.chain.models import RecordedModels, compute_dag_root, encode_edges, encode_tasks
from splitup.core.errors import InvalidModel
from splitup.graph.manifest import Manifest
from splitup.graph.manifest_rules import load_manifest
from tests.builders import make_diamond_manifest
from tests.chain.conftest import Network

MANIFEST = make_diamond_manifest()
PRICES = (1, 40, 333, 999)  # nano-USDC


async def register(
    network: Network, manifest: Manifest, tasks: list[dict[str, Any]], edges: list[int]
) -> None:
    await network.owner.send("models", "register", manifest.model_id, "diamond", tasks, edges)


async def test_the_root_is_the_contracts(network: Network) -> None:
    await register(network, MANIFEST, encode_tasks(MANIFEST), encode_edges(MANIFEST))
    model = await network.owner.call("models", "modelOf", MANIFEST.model_id)
    assert model["dagRoot"] == compute_dag_root(MANIFEST)
    await RecordedModels(network.owner).check(MANIFEST)


async def test_a24_the_chain_locks_what_members_ask_for(network: Network) -> None:
    """Both round a price up to micro-USDC, once for execution and once for verification."""
    pairs = zip(MANIFEST.tasks, PRICES, strict=True)
    tasks = tuple(task.model_copy(update={"price_nano_usdc": price}) for task, price in pairs)
    small = load_manifest(MANIFEST.model_copy(update={"tasks": tasks}).to_bytes())
    await register(network, small, encode_tasks(small), encode_edges(small))
    for steps in (1, 2, 3, 727, 1_000, 65_536):
        parts = await network.owner.call("market", "quoteParts", small.model_id, steps, 60)
        assert parts["executors"] == parts["verification"] == small.cost_micro_usdc(steps)


@pytest.mark.parametrize("field", ["priceNanoUsdc", "vramBytes", "flops"])
async def test_s01_a_model_registered_with_other_figures_is_refused(
    network: Network, field: str
) -> None:
    tasks = [task | {field: 0} for task in encode_tasks(MANIFEST)]
    await register(network, MANIFEST, tasks, encode_edges(MANIFEST))
    recorded = RecordedModels(network.owner)
    assert not recorded.is_refused(MANIFEST.model_id), "nothing was compared yet"
    with pytest.raises(InvalidModel, match="other tasks, edges or prices"):
        await recorded.check(MANIFEST)
    assert recorded.is_refused(MANIFEST.model_id)


async def test_s01_a_model_registered_with_other_edges_is_refused(network: Network) -> None:
    await register(network, MANIFEST, encode_tasks(MANIFEST), encode_edges(MANIFEST)[:-1])
    with pytest.raises(InvalidModel, match="other tasks, edges or prices"):
        await RecordedModels(network.owner).check(MANIFEST)


async def test_s01_a_copy_with_another_label_has_a_record_of_its_own(network: Network) -> None:
    """The tasks of a copy are the same, and nodes hold them; its price has to be, too."""
    first, *rest = MANIFEST.tasks
    tasks_of_copy = (first.model_copy(update={"label": "copy"}), *rest)
    copy = load_manifest(MANIFEST.model_copy(update={"tasks": tasks_of_copy}).to_bytes())
    assert copy.model_id != MANIFEST.model_id
    await register(network, MANIFEST, encode_tasks(MANIFEST), encode_edges(MANIFEST))
    with pytest.raises(InvalidModel, match="is not registered"):
        await RecordedModels(network.owner).check(copy)
    tasks = [task | {"priceNanoUsdc": 0} for task in encode_tasks(copy)]
    await register(network, copy, tasks, encode_edges(copy))
    with pytest.raises(InvalidModel, match="other tasks, edges or prices"):
        await RecordedModels(network.owner).check(copy)
