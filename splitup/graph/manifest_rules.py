"""Reading a manifest, which a stranger may have written, and the rules that it has to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from splitup.core import limits, tuning
from splitup.core.codec import compute_digest, decode_canonical
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.latest import Latest
from splitup.graph.manifest import (
    ClientPart,
    ClientTask,
    InputSource,
    Manifest,
    Port,
    Task,
    TaskSource,
)

# by digest, which never means other bytes
_refused: Final[Latest[str, str]] = Latest(tuning.MAX_REFUSED_MANIFESTS)


def load_manifest(data: bytes) -> Manifest:
    """Return the manifest in ``data``; raises InvalidModel unless every rule holds.

    Besides the form: every source is an earlier task's port or a model input of the same dtype and
    shape, names are unique, every task's result is used, sizes add up.
    """
    digest = compute_digest(data)
    check_refused("0x" + digest)
    try:
        manifest = _parse(data)
        check_manifest(manifest)
    except InvalidModel as error:
        _refused[digest] = str(error)
        raise
    return manifest


def check_refused(model_id: str) -> None:
    """Raise InvalidModel again if this process has refused the manifest of this model before."""
    if (reason := _refused.get(model_id[2:])) is not None:
        raise InvalidModel(reason)


def _parse(data: bytes) -> Manifest:
    try:
        value = decode_canonical(data, max_bytes=limits.MAX_MANIFEST_BYTES)
        manifest = Manifest.read(value)
    except InvalidInput as error:
        raise InvalidModel(f"the manifest is invalid: {error}") from None
    if value != manifest.model_dump(mode="json"):  # encoding it again would take twice the memory
        raise InvalidModel("the manifest is invalid: a value has two spellings")
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raise InvalidModel unless the DAG is sound."""
    for index, task in enumerate(manifest.tasks):
        _check_task(f"task {index} ({task.label})", task)
    _check_dag("", manifest)
    _check_diffusion(manifest)
    _check_images(manifest)
    if (client := manifest.client) is None:
        return
    for index, private in enumerate(client.tasks):
        _check_program(f"the client's task {index} ({private.label})", private)
    _check_dag("the client's ", client, {port.name: port for port in manifest.outputs})
    if len(client.sends) != len(manifest.inputs):
        raise InvalidModel("the manifest is invalid: the client sends other inputs than there are")
    inputs, early = {port.name: port for port in client.inputs}, client.find_early()
    for port, origin in zip(manifest.inputs, client.sends, strict=True):
        if isinstance(origin, InputSource):
            source = inputs.get(origin.input)
        else:
            source = _find(client.tasks, origin.task, origin.port, len(client.tasks))
            if origin.task not in early:
                source = None
        _check_same(f"what the client sends as '{port.name}'", port, source)


def _check_diffusion(manifest: Manifest) -> None:
    text = manifest.text
    if text is None or text.diffusion is None:
        return
    if text.is_recurrent:
        raise InvalidModel("the manifest is invalid: recurrent layers cannot see a block at once")
    if text.diffusion.mask_id >= text.vocab:
        raise InvalidModel("the manifest is invalid: the mask token is outside the vocabulary")
    chunk = max(
        (p.shape[0] for p in manifest.user_inputs if p.name == "tokens" and p.shape), default=0
    )
    if text.diffusion.block_size > chunk:
        raise InvalidModel(
            f"the manifest is invalid: a block of {text.diffusion.block_size} tokens does not fit "
            f"a step of {chunk}"
        )


def _check_images(manifest: Manifest) -> None:
    images = None if manifest.text is None else manifest.text.images
    if manifest.text is None or images is None:
        return
    if manifest.text.is_recurrent:
        raise InvalidModel("the manifest is invalid: recurrent layers cannot see an image at once")
    if max(images.token, images.begin, images.end) >= manifest.text.vocab:
        raise InvalidModel("the manifest is invalid: an image's token is outside the vocabulary")
    shapes = {port.name: port.shape for port in manifest.user_inputs}
    chunk = (*shapes.get("tokens", ()), 0)[0]
    if images.rows > chunk or shapes.get("images") != (chunk, images.width):
        raise InvalidModel(
            f"the manifest is invalid: a step takes no {images.rows} rows of {images.width} of an "
            "image"
        )


def _check_dag(
    whose: str, dag: Manifest | ClientPart, network: Mapping[str, Port] = MappingProxyType({})
) -> None:
    """Check that every source exists and fits, and that inputs, tasks, ``network`` are read."""
    _check_unique("the model", [port.name for port in dag.inputs])
    _check_unique("the model", [port.name for port in dag.outputs])
    inputs = {port.name: port for port in dag.inputs}
    tasks: Sequence[Task | ClientTask] = dag.tasks
    unread = {("input", name) for name in inputs} | {("output", name) for name in network}
    read = {(port.task, port.port) for port in dag.outputs}
    for origin in dag.sends if isinstance(dag, ClientPart) else ():
        if isinstance(origin, InputSource):
            unread.discard(("input", origin.input))
        else:
            read.add((origin.task, origin.port))
    for index, task in enumerate(tasks):
        name = f"{whose}task {index} ({task.label})"
        _check_unique(name, [port.name for port in task.inputs])
        _check_unique(name, [port.name for port in task.outputs])
        for port in task.inputs:
            if isinstance(port.source, InputSource):
                source = inputs.get(port.source.input)
                unread.discard(("input", port.source.input))
            elif isinstance(port.source, TaskSource):
                source = _find(tasks, port.source.task, port.source.port, index)
                read.add((port.source.task, port.source.port))
            else:
                source = network.get(port.source.output)
                unread.discard(("output", port.source.output))
            _check_same(f"input '{port.name}' of {name}", port, source)
    for output in dag.outputs:
        source = _find(tasks, output.task, output.port, len(tasks))
        _check_same(f"output '{output.name}'", output, source)
    _check_rows(dag, network)
    if unread:
        kind, name = min(unread)
        raise InvalidModel(f"the manifest is invalid: no {whose}task reads {kind} '{name}'")
    for index, task in enumerate(tasks):
        if not any((index, port) in read for port in range(len(task.outputs))):
            raise InvalidModel(
                f"the manifest is invalid: nothing reads {whose}task {index}'s outputs"
            )


def _check_unique(owner: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise InvalidModel(f"the manifest is invalid: {owner} has two ports of one name")


def _check_task(name: str, task: Task) -> None:
    _check_program(name, task)
    if (task.reference_digest == "") != (task.reference_bytes == 0):
        raise InvalidModel(f"the manifest is invalid: {name} has a reference without a digest")
    dtypes = [tolerance.dtype for tolerance in task.tolerances]
    if dtypes != sorted(set(dtypes)):
        raise InvalidModel(f"the manifest is invalid: {name} has two tolerances for one dtype")
    if not all(tolerance.list_bounds() for tolerance in task.tolerances):
        raise InvalidModel(f"the manifest is invalid: {name} has a tolerance that bounds nothing")
    if task.gate is not None:
        _check_gate(name, task, task.gate)


def _check_program(name: str, task: Task | ClientTask) -> None:
    if (task.weights_digest == "") != (task.weights_bytes == 0):
        raise InvalidModel(f"the manifest is invalid: {name} has weights without a digest")
    if task.state_bytes > task.vram_bytes:
        raise InvalidModel(f"the manifest is invalid: {name} has more state than memory")
    for what, ports in (("inputs", task.inputs), ("outputs", task.outputs)):
        nbytes = sum(port.nbytes for port in ports)  # a node has those of one step at once
        if nbytes > limits.MAX_TENSOR_BYTES:
            raise InvalidModel(
                f"the manifest is invalid: the {what} of {name} have {nbytes} bytes; "
                f"the limit is {limits.MAX_TENSOR_BYTES}"
            )


def _check_gate(name: str, task: Task, gate: int) -> None:
    if gate >= len(task.inputs) or task.state_bytes:
        raise InvalidModel(f"the manifest is invalid: {name} cannot have the gate {gate}")
    if task.inputs[gate].nbytes > limits.INLINE_TENSOR_BYTES:  # zeros are told by their digest
        raise InvalidModel(f"the manifest is invalid: the gate of {name} does not fit a frame")
    rows = task.inputs[gate].rows
    if any(port.rows not in ("", rows) for port in (*task.inputs, *task.outputs)):
        raise InvalidModel(f"the manifest is invalid: {name} has rows that its gate does not say")


def _check_rows(dag: Manifest | ClientPart, network: Mapping[str, Port]) -> None:
    """Check that a symbol has one maximum in the whole model, and that inputs bind all of them.

    A task's own graph has to bind what it uses; so here only the model's inputs are looked at.
    """
    maxima: dict[str, int] = {}
    ports: list[Port] = [*dag.inputs, *dag.outputs, *network.values()]
    for task in dag.tasks:
        ports += [*task.inputs, *task.outputs]
    for port in ports:
        if port.rows and (
            not port.shape or maxima.setdefault(port.rows, port.shape[0]) != port.shape[0]
        ):
            raise InvalidModel(
                f"the manifest is invalid: port '{port.name}' has other rows than its symbol "
                f"'{port.rows}'"
            )
    if unbound := set(maxima) - {port.rows for port in dag.inputs}:
        raise InvalidModel(f"the manifest is invalid: no input binds symbol '{min(unbound)}'")


def _find(tasks: Sequence[Task | ClientTask], task: int, port: int, before: int) -> Port | None:
    if task >= before or task >= len(tasks):
        return None
    outputs = tasks[task].outputs
    return outputs[port] if port < len(outputs) else None


def _check_same(what: str, port: Port, source: Port | None) -> None:
    if source is None:
        raise InvalidModel(f"the manifest is invalid: {what} has no earlier source")
    if (port.dtype, port.shape, port.rows) != (source.dtype, source.shape, source.rows):
        raise InvalidModel(
            f"the manifest is invalid: {what} is {port.spec}; its source gives {source.spec}"
        )
