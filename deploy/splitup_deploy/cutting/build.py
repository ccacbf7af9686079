"""Compile a model: trace, check, cut, and describe it by a manifest and the objects to store.

The same model and target give the same bytes in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Final

from splitup.backend.tinygrad_types import TINYGRAD_VERSION
from splitup.core.codec import MAX_SAFE_INTEGER, compute_digest
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.garbage_collection import pause_garbage_collection
from splitup.core.tensors import TensorSpec, encode_safetensors_header
from splitup.graph.cost import (
    compute_flops,
    compute_price_nano_usdc,
    compute_state_bytes,
    compute_vram_bytes,
)
from splitup.graph.gates import find_gate
from splitup.graph.ir import Graph
from splitup.graph.manifest import (
    VERSION,
    ClientInput,
    ClientPart,
    ClientTask,
    InputSource,
    Manifest,
    NetworkSource,
    OutputPort,
    Port,
    Task,
    TaskInput,
    TaskSource,
    TextInfo,
    get_blob_key,
    get_manifest_key,
    get_task_key,
    get_weights_key,
)
from splitup.graph.manifest_rules import check_manifest
from splitup.graph.rules import CheckedGraph, check_graph
from splitup_deploy.cutting.advice import advise_target, check_least, measure_bounds
from splitup_deploy.cutting.divide import divide
from splitup_deploy.cutting.partition import (
    Balance,
    Region,
    TargetTooSmall,
    check_target,
    find_regions,
    partition,
)
from splitup_deploy.cutting.passes import materialise_shared_reductions
from splitup_deploy.cutting.private_ends import Separation, find_borders, list_ends, separate
from splitup_deploy.cutting.task_graphs import CutTask, cut_graph
from splitup_deploy.cutting.timing import Clock
from splitup_deploy.frontends import SourceModel, trace_model
from splitup_deploy.frontends.chat import check_text
from splitup_deploy.frontends.source_model import Sizes, SourceText
from splitup_deploy.frontends.tracing import TracedModel
from splitup_deploy.frontends.weight_sources import (
    FileSlice,
    compute_digest_of,
    read_safetensors,
    start_hashing,
)

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Blob:
    """An object to store. Every call of ``open`` yields its bytes in chunks."""

    key: str
    length: int
    digest: str
    open: Callable[[], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """A cut model. ``blobs`` holds every object but the manifest, which is stored last.

    Without ``is_complete`` only the weights' shapes were known: sizes and edges are right, digests
    and ``model_id`` are meaningless, and weights cannot be read. ``times_ps`` are the predicted
    times per step of the nodes' tasks (``splitup_deploy.cutting.timing``). ``notes`` are sentences
    about the source that the developer should read.
    """

    manifest: Manifest
    manifest_bytes: bytes
    model_id: str
    blobs: tuple[Blob, ...]
    times_ps: tuple[int, ...]
    is_complete: bool
    notes: tuple[str, ...] = ()

    @property
    def has_vectors(self) -> bool:
        """Say whether the tasks have self-test vectors."""
        return all(task.reference_digest for task in self.manifest.tasks)

    @property
    def manifest_blob(self) -> Blob:
        """Return the manifest as an object to store."""
        return make_blob(get_manifest_key(self.model_id), self.manifest_bytes)


def parse_size(text: str) -> int:
    """Return the bytes of "12GB" (10^9), "12GiB" (2^30), "1.5MB" or "900000"; at least 1."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"'{text:.40}' is no size; write for example 12GB, 12GiB or 900000")
    number, unit = match.groups()
    base = 1024 if "i" in unit.lower() else 1000
    result = int(Decimal(number) * base ** _POWERS[unit.lower().rstrip("b").rstrip("i")])
    if not 1 <= result <= MAX_SAFE_INTEGER:
        raise InvalidInput(f"size '{text:.40}' is not possible; write for example 12GB")
    return result


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the distinct sizes of a list such as "8GB,12GB,24GB", smallest first."""
    return tuple(sorted({parse_size(part) for part in text.split(",")}))


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Return the sizes of symbolic dimensions that are given as NAME=SIZE."""
    result: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if not name or not re.fullmatch(r"[1-9][0-9]{0,9}", size) or name in result:
            raise InvalidInput(f"'{text:.80}' is no dimension; write each one once, as batch=1")
        result[name] = int(size)
    return result


@pause_garbage_collection()
def build(
    model: str,
    target_vram_bytes: int | Collection[int],
    *,
    sizes: Sizes | None = None,
    balance: Balance = "latency",
    max_tasks: int | None = None,
    private: int | None = None,
    reads_weights: bool = True,
) -> CompiledModel:
    """Compile ``model`` so that each task fits the target memory; see ``frontends.load_model``.

    Several targets are the cards of a mixed fleet, which get tasks in turn. ``balance`` and
    ``max_tasks`` choose among the possible cuts (``splitup_deploy.cutting.partition``). ``private``
    is the number of blocks at each end that the client runs
    (``splitup_deploy.cutting.private_ends``). Without ``reads_weights`` the result is that of a
    model of which only the shapes are known. Raises InvalidModel when the model is missing, corrupt
    or not supported, or when the target is too small: that is said before the weights are read.
    """
    source = _trace(model, sizes)
    whole = source.traced if reads_weights else source.traced.forget_weights()
    targets = (target_vram_bytes,) if isinstance(target_vram_bytes, int) else target_vram_bytes
    cut = partial(_cut, balance=balance, max_tasks=max_tasks, private=private)
    bounds = measure_bounds(whole)
    try:
        if private is None:  # the client's part needs no card
            check_least(bounds, targets)
        check_text(source.text)
        traced, graph, ends, parts = cut(whole, targets)
    except TargetTooSmall as error:
        advice = advise_target(whole, bounds, targets, cut, error)
        raise InvalidModel(f"{error}: {advice}") from None
    tasks = cut_graph(graph, parts)
    separation = None if ends is None else separate(tasks, parts, ends)
    blobs: dict[str, Blob] = {}
    if traced.is_complete:
        start_hashing("tasks", sum(_measure_weights_file(task.graph) for task in tasks))
    manifest = Manifest(
        version=VERSION,
        kind=source.kind,
        tinygrad=TINYGRAD_VERSION,
        **_describe_dag(traced, tasks, separation, blobs),
        text=None if source.text is None else _describe_text(source.text, blobs),
    )
    check_manifest(manifest)
    data = manifest.to_bytes()
    clock = Clock(graph)
    nodes = tasks if separation is None else separation.nodes
    wanted = {task.outputs for task in nodes}
    times = tuple(
        sum(clock.predict_ps(r.root, r.nodes) for r in part)
        for part, task in zip(parts, tasks, strict=True)
        if task.outputs in wanted
    )
    return CompiledModel(
        manifest,
        data,
        manifest.model_id,
        tuple(blobs.values()),
        times,
        traced.is_complete,
        traced.notes,
    )


def _cut(
    whole: TracedModel,
    targets: Collection[int],
    *,
    balance: Balance,
    max_tasks: int | None,
    private: int | None,
) -> tuple[TracedModel, CheckedGraph, tuple[int, int] | None, list[list[Region]]]:
    """Return the divided model, its graph, the borders of the client's part, and the tasks."""
    _, kept = _find_ends(whole, private)
    divided = divide(whole, max(targets), kept)
    ends, kept = _find_ends(divided.model, private)
    if divided.model.is_complete:  # partition says it, too, but reading weights takes long
        check_target(check_graph(divided.model.graph), divided.model.labels, max(targets), kept)
    traced = divided.model.read_weights()
    graph = check_graph(traced.graph)
    parts = partition(
        graph,
        traced.labels,
        targets,
        balance=balance,
        max_tasks=max_tasks,
        borders=divided.borders | frozenset(ends or ()),
        kept=kept,
    )
    return traced, graph, ends, parts


def _find_ends(
    model: TracedModel, private: int | None
) -> tuple[tuple[int, int] | None, frozenset[int]]:
    """Return the borders of the client's part, and the roots of its regions."""
    if private is None:
        return None, frozenset()
    regions = find_regions(model.graph, model.labels)
    ends = find_borders(regions, private)
    return ends, list_ends(regions, ends)


def _describe_dag(
    traced: TracedModel,
    tasks: Sequence[CutTask],
    separation: Separation | None,
    blobs: dict[str, Blob],
) -> dict[str, Any]:
    """Return the manifest's inputs, outputs and tasks, and the client's part."""
    inputs = tuple(_make_port(spec) for spec in traced.graph.inputs)
    if separation is None:
        return {
            "inputs": inputs,
            "outputs": _describe_outputs(traced, tasks),
            "tasks": tuple(_describe_task(traced, task, blobs) for task in tasks),
        }
    nodes = tuple(_describe_task(traced, task, blobs) for task in separation.nodes)
    outputs = tuple(
        OutputPort(task=task, port=port, **{**dict(nodes[task].outputs[port]), "name": name})
        for name, (task, port) in separation.outputs.items()
    )
    client = ClientPart(
        inputs=inputs,
        outputs=_describe_outputs(traced, separation.client),
        tasks=tuple(
            _describe_client_task(traced, task, sources, blobs)
            for task, sources in zip(separation.client, separation.sources, strict=True)
        ),
        sends=tuple(origin for _, origin in separation.inputs),
    )
    sent = tuple(_make_port(spec) for spec, _ in separation.inputs)
    return {"inputs": sent, "outputs": outputs, "tasks": nodes, "client": client}


def _describe_outputs(traced: TracedModel, tasks: Sequence[CutTask]) -> tuple[OutputPort, ...]:
    """Return the model's outputs; ``tasks`` are the tasks that compute them."""
    made = {
        (root, output.name): (index, port, spec)
        for index, task in enumerate(tasks)
        for port, (root, output, spec) in enumerate(
            zip(task.outputs, task.graph.outputs, _list_outputs(task.graph), strict=True)
        )
    }
    found = []
    for output in traced.graph.outputs:
        task, port, spec = made[output.node, output.name]
        found.append(OutputPort(task=task, port=port, **dict(_make_port(spec))))
    return tuple(found)


def _list_outputs(graph: CheckedGraph) -> list[TensorSpec]:
    return [graph.values[output.node].make_spec(output.name) for output in graph.outputs]


def prepare(model: str, sizes: Sizes | None = None) -> SourceModel:
    """Trace a model and run the passes: the graph that is cut, and the reference for it."""
    source = _trace(model, sizes)
    check_text(source.text)
    return replace(source, traced=source.traced.read_weights())


def _trace(model: str, sizes: Sizes | None) -> SourceModel:
    source = trace_model(model, sizes)
    return replace(source, traced=materialise_shared_reductions(source.traced))


def _make_port(spec: TensorSpec) -> Port:
    return Port(name=spec.name, dtype=spec.dtype, shape=spec.shape, rows=spec.rows)


def make_blob(key: str, data: bytes) -> Blob:
    """Return an object whose bytes are in memory."""
    return Blob(key, len(data), compute_digest(data), lambda: iter((data,)))


def change_tasks(
    compiled: CompiledModel,
    change: Callable[[int, Task], dict[str, Any]],
    blobs: tuple[Blob, ...] = (),
) -> CompiledModel:
    """Return the model with other fields in its manifest's tasks, and so with another id.

    ``change`` takes a task with its place and returns the fields; ``blobs`` are further objects.
    """
    tasks = tuple(
        task.model_copy(update=change(index, task))
        for index, task in enumerate(compiled.manifest.tasks)
    )
    changed = change_manifest(compiled, {"tasks": tasks})
    return replace(changed, blobs=(*compiled.blobs, *blobs))


def change_manifest(compiled: CompiledModel, fields: dict[str, Any]) -> CompiledModel:
    """Return the model with other fields in its manifest, and so with another id."""
    manifest = compiled.manifest.model_copy(update=fields)
    check_manifest(manifest)
    return replace(
        compiled,
        manifest=manifest,
        manifest_bytes=manifest.to_bytes(),
        model_id=manifest.model_id,
    )


def _describe_task(model: TracedModel, task: CutTask, blobs: dict[str, Blob]) -> Task:
    program = _describe_program(model, task, blobs)
    inputs = tuple(
        TaskInput(
            **dict(_make_port(spec)),
            source=InputSource(input=origin)
            if isinstance(origin, str)
            else TaskSource(task=origin[0], port=origin[1]),
        )
        for spec, origin in zip(task.graph.inputs, task.sources, strict=True)
    )
    return Task(
        **program,
        inputs=inputs,
        price_nano_usdc=compute_price_nano_usdc(program["flops"], program["vram_bytes"]),
        gate=find_gate(task.graph),
    )


def _describe_client_task(
    model: TracedModel,
    task: CutTask,
    sources: Sequence[InputSource | TaskSource | NetworkSource],
    blobs: dict[str, Blob],
) -> ClientTask:
    inputs = tuple(
        ClientInput(**dict(_make_port(spec)), source=source)
        for spec, source in zip(task.graph.inputs, sources, strict=True)
    )
    return ClientTask(**_describe_program(model, task, blobs), inputs=inputs)


def _describe_program(model: TracedModel, task: CutTask, blobs: dict[str, Blob]) -> dict[str, Any]:
    """Return a task's fields except its inputs; add its objects to ``blobs``."""
    data = task.graph.to_bytes()
    task_id = compute_digest(data)
    blobs[task_id] = make_blob(get_task_key(task_id), data)
    weights = _describe_weights(model, task.graph)
    if weights is not None:
        blobs[weights.digest] = weights
    return {
        "task_id": task_id,
        "label": task.label,
        "outputs": tuple(map(_make_port, _list_outputs(task.graph))),
        "graph_bytes": len(data),
        "weights_digest": "" if weights is None else weights.digest,
        "weights_bytes": 0 if weights is None else weights.length,
        "state_bytes": compute_state_bytes(task.graph),
        "vram_bytes": compute_vram_bytes(task.graph),
        "flops": compute_flops(task.graph),
    }


def _describe_weights(model: TracedModel, graph: Graph) -> Blob | None:
    sources = [model.weights[weight.name] for weight in graph.weights]
    if not sources:
        return None
    if model.is_complete:
        name, length = compute_digest_of(read_safetensors(sources))
    else:
        header = encode_safetensors_header([source.spec for source in sources])
        name, length = compute_digest(header), _measure_weights_file(graph)
    return Blob(get_weights_key(name), length, name, partial(read_safetensors, sources))


def _measure_weights_file(graph: Graph) -> int:
    """Return the bytes of a task's file of weights, 0 without any."""
    specs = [weight.spec for weight in graph.weights]
    return len(encode_safetensors_header(specs)) + sum(s.nbytes for s in specs) if specs else 0


def _describe_text(text: SourceText, blobs: dict[str, Blob]) -> TextInfo:
    if isinstance(text.tokenizer, bytes):
        name = compute_digest(text.tokenizer)
        blob = make_blob(get_blob_key(name), text.tokenizer)
    else:
        source = FileSlice(text.tokenizer, 0, text.tokenizer.stat().st_size)
        digest = hashlib.sha256()
        for chunk in source.read():
            digest.update(chunk)
        name = digest.hexdigest()
        blob = Blob(get_blob_key(name), source.end, name, source.read)
    blobs[name] = blob
    return TextInfo(
        tokenizer_digest=name,
        tokenizer_bytes=blob.length,
        eos_ids=text.eos_ids,
        vocab=text.vocab,
        context=text.context,
        is_recurrent=text.is_recurrent,
        steps_back=text.steps_back,
        chat=text.chat,
        diffusion=text.diffusion,
        images=text.images,
    )
