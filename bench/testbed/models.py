"""Random Llamas of known size, cut into as many tasks as there are nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes

from bench.testbed.engines import Model, save_model
from splitup.client.private.private_tasks import ClientPrograms
from splitup.client.text.drafting import bring_home
from splitup.demo.models import MODEL, find_example
from splitup.graph.manifest import Manifest
from tests.deploy.llamas import save_llama

NODES: Final = 4
DRAFT: Final = "packages-draft-0.7m"
RECORDS: Final = "records-0.7m"
BLOCKS: Final = "records-0.7m-blocks"  # adapted from it
CHUNK: Final = 8
_SIZES: Final = Sizes(context=256, chunk=CHUNK)
_TARGET_BYTES: Final = 10**9  # far more than a task needs, so that the number of tasks decides


def shape_llama(
    hidden: int, inner: int, *, layers: int, heads: int, kv_heads: int, **other: Any
) -> dict[str, Any]:
    """Return the config.json of a Llama; ``other`` fields replace the usual ones."""
    return {
        "vocab_size": 32_000,
        "max_position_embeddings": 256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **other,
    }


TIED: Final[dict[str, Any]] = {"tie_word_embeddings": True}
LLAMA_15M: Final = shape_llama(288, 768, layers=6, heads=6, kv_heads=6, **TIED)
LLAMA_124M: Final = shape_llama(768, 2_048, layers=12, heads=12, kv_heads=4)
LLAMA_693M: Final = shape_llama(1_536, 4_096, layers=24, heads=16, kv_heads=4)


def make_llama(folder: Path, config: dict[str, Any]) -> tuple[Path, Model]:
    """Write a random checkpoint; return it and its cut into four tasks of about equal time."""
    save_llama(folder / "checkpoint", config, scale=0.02)
    return folder / "checkpoint", _cut(folder / "checkpoint", folder / "cut", _SIZES)


def cut_example(folder: Path, chunk: int, name: str = MODEL) -> Model:
    """Cut an example into four tasks."""
    return _cut(find_example().with_name(name), folder, Sizes(chunk=chunk))


def cut_published(source: Path, folder: Path, chunk: int, context: int) -> Model:
    """Cut a model that others published into four tasks."""
    return _cut(source, folder, Sizes(context=context, chunk=chunk))


async def load_client(model: Model) -> ClientPrograms:
    """Load the client's tasks of a private model."""
    assert model.manifest.client is not None
    files = [
        (
            model.folder / task.task_id,
            model.folder / task.weights_digest if task.weights_digest else None,
        )
        for task in model.manifest.client.tasks
    ]
    return await ClientPrograms.load(model.manifest, files)


async def load_draft(
    folder: Path, chunk: int, name: str = DRAFT
) -> tuple[Manifest, ClientPrograms]:
    """Load an example, by default the draft model, as a client does with drafts, in one task."""
    source = find_example().with_name(name)
    model = await asyncio.to_thread(_cut, source, folder, Sizes(chunk=chunk), 1)
    manifest = bring_home(model.manifest, name)
    return manifest, await load_client(Model(manifest, model.folder))


def _cut(source: Path, folder: Path, sizes: Sizes, tasks: int = NODES) -> Model:
    compiled = build(str(source), _TARGET_BYTES, sizes=sizes, balance="throughput", max_tasks=tasks)
    return save_model(compiled, folder)


def spread_tasks(model: Model) -> list[int]:
    """Return which node runs which task: nodes in turn."""
    return [
        index * NODES // len(model.manifest.tasks) for index in range(len(model.manifest.tasks))
    ]


def place_tasks(models: list[Model]) -> list[list[tuple[Model, list[int]]]]:
    """Return the tasks that each node holds."""
    return [
        [
            (model, [task for task, runs in enumerate(spread_tasks(model)) if runs == node])
            for model in models
        ]
        for node in range(NODES)
    ]
