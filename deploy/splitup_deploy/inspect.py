"""Showing a model's task graph to a person, and as JSON to a program. Pure: data in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from splitup.graph.manifest import Manifest, Port, Task, TaskSource
from splitup_deploy.register import RegisteredModel

_BYTE_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_FLOP_UNITS: Final = ("", "k", "M", "G", "T", "P")


def format_bytes(count: int) -> str:
    """Return a size in decimal units, three significant digits: 12_300_000 is "12.3 MB"."""
    return _format_scaled(count, _BYTE_UNITS)


def format_flops(count: int) -> str:
    """Return a number of operations: 1_500_000 is "1.5 M"."""
    return _format_scaled(count, _FLOP_UNITS).rstrip()


def format_usdc(micro_usdc: int) -> str:
    """Return an amount in USDC with up to six decimals: 1_200 is "0.0012"."""
    text = f"{micro_usdc // 10**6}.{micro_usdc % 10**6:06d}".rstrip("0")
    return text.removesuffix(".")


def render_model(manifest: Manifest, name: str | None) -> RenderableType:
    """Return the task graph, top to bottom in execution order, and its totals."""
    tasks = manifest.tasks
    title = f"{_printable(name or manifest.kind)} · {_count_tasks(len(tasks))}"
    head = Text.assemble((title, "bold"), f"\n{manifest.model_id}", style="default")
    return Group(head, _render_graph(manifest), _render_totals(manifest))


def render_models(models: Sequence[RegisteredModel]) -> Text:
    """Return the lines of ``splitup-deploy list``; ids stand whole, to be copied."""
    text = Text()
    for model in models:
        text.append(_printable(model.name), "bold")
        text.append(
            f"  {_count_tasks(model.task_count)}, "
            f"{format_usdc(model.price_per_step_micro_usdc)} USDC per step\n"
            f"  {model.model_id}\n  by {model.developer}\n"
        )
    text.rstrip()
    return text


def describe_model(manifest: Manifest, name: str | None) -> dict[str, Any]:
    """Return the JSON form of ``inspect`` and ``register --dry-run``."""
    return {
        "model_id": manifest.model_id,
        "name": name,
        "kind": manifest.kind,
        "price_per_step_micro_usdc": manifest.price_micro_usdc(1),
        "inputs": [_describe_port(port) for port in manifest.inputs],
        "outputs": [_describe_port(port) for port in manifest.outputs],
        "edges": [list(edge) for edge in manifest.edges()],
        "tasks": [
            {
                "index": index,
                "label": task.label,
                "task_id": task.task_id,
                "inputs": [_describe_port(port) for port in task.inputs],
                "outputs": [_describe_port(port) for port in task.outputs],
                "graph_bytes": task.graph_bytes,
                "weights_bytes": task.weights_bytes,
                "state_bytes": task.state_bytes,
                "vram_bytes": task.vram_bytes,
                "flops": task.flops,
                "price_micro_usdc": task.price_micro_usdc,
            }
            for index, task in enumerate(manifest.tasks)
        ],
    }


def _render_graph(manifest: Manifest) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("task, and what it reads")
    for heading in ("weights", "state", "VRAM", "FLOP", "USDC"):
        table.add_column(heading, justify="right", no_wrap=True)
    edges = manifest.edges()
    readers = {target for _, target in edges}
    sources = {source for source, _ in edges}
    last = len(manifest.tasks) - 1
    for index, task in enumerate(manifest.tasks):
        corner = {0: "┌", last: "└"}.get(index, "├") if last else "─"
        mark = "●" if index in readers or index in sources else "○"  # alone: no edge at all
        rail = " " if index == last else "│"
        table.add_row(
            Text.assemble(
                (f"{corner}─{mark} ", "dim"),
                f"{index} {task.label}\n",
                (f"{rail}     ← {_list_inputs(task)}", "dim"),
            ),
            format_bytes(task.weights_bytes) if task.weights_bytes else "–",
            format_bytes(task.state_bytes) if task.state_bytes else "–",
            format_bytes(task.vram_bytes),
            format_flops(task.flops),
            format_usdc(task.price_micro_usdc),
        )
    return table


def _list_inputs(task: Task) -> str:
    parts = []
    for port in task.inputs:
        if isinstance(port.source, TaskSource):
            origin = f"task {port.source.task}"
        else:
            origin = port.source.input
        parts.append(f"{origin} {format_bytes(port.nbytes)}")
    return ", ".join(parts)


def _render_totals(manifest: Manifest) -> Text:
    tasks = manifest.tasks
    crossing = {
        (port.source.task, port.source.port): port.nbytes
        for task in tasks
        for port in task.inputs
        if isinstance(port.source, TaskSource)
    }
    outputs = ", ".join(f"{port.name} {port.dtype} {list(port.shape)}" for port in manifest.outputs)
    return Text(
        f"output   {outputs}\n"
        f"in all   {format_bytes(sum(task.weights_bytes for task in tasks))} of weights, "
        f"{format_flops(sum(task.flops for task in tasks))}FLOP and "
        f"{format_bytes(sum(crossing.values()))} between tasks per step, "
        f"largest task {format_bytes(max(task.vram_bytes for task in tasks))} of VRAM\n"
        f"price    {format_usdc(manifest.price_micro_usdc(1))} USDC per step"
    )


def _describe_port(port: Port) -> dict[str, Any]:
    return {"name": port.name, "dtype": port.dtype, "shape": list(port.shape), "bytes": port.nbytes}


def _count_tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"


def _printable(text: str) -> str:
    """A name comes from a stranger: nothing in it may move the cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _format_scaled(count: int, units: Sequence[str]) -> str:
    value, unit = float(count), 0
    while value >= 999.5 and unit + 1 < len(units):
        value /= 1000
        unit += 1
    return f"{value:.3g} {units[unit]}"
