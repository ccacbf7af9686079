"""A model's task graph as text and as JSON. Pure: data in, text out."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from splitup.client.inputs import format_bytes, format_price, format_scaled, format_usdc
from splitup.client.private.privacy import describe_privacy
from splitup.core.printable import printable
from splitup.graph.manifest import ClientPart, ClientTask, Port, Task, TaskSource
from splitup_deploy.cutting.advice import count_crossing_bytes
from splitup_deploy.showing.profile import Profile

if TYPE_CHECKING:  # a dry run needs no chain
    from splitup.chain.registered_models import RegisteredModel
    from splitup_deploy.publishing.model_usage import ModelUsage

_TIME_UNITS: Final = ("ps", "ns", "µs", "ms", "s", "ks")
_FLOP_UNITS: Final = ("", "k", "M", "G", "T", "P")


def format_time(picoseconds: int) -> str:
    """Return a predicted time, three significant digits: 12_300_000_000 is "12.3 ms"."""
    return format_scaled(picoseconds, _TIME_UNITS)


def render_model(profile: Profile, name: str | None, *, is_complete: bool = True) -> RenderableType:
    """Return the task graph, top to bottom in execution order, and its totals.

    Without ``is_complete``, only shapes were known and the model has no id yet.
    """
    manifest = profile.manifest
    title = f"{printable(name or manifest.kind)} · {_count_tasks(len(manifest.tasks))}"
    identity = manifest.model_id if is_complete else "preview only: no weights here"
    head = Text.assemble((title, "bold"), f"\n{identity}", style="default")
    parts = [head, _render_graph(profile), _render_totals(profile)]
    if manifest.client is not None:
        parts.insert(2, _render_client(manifest.client))
    return Group(*parts)


def render_models(models: Sequence[RegisteredModel]) -> Text:
    """Return the lines of ``splitup-deploy list``; ids stand whole, to be copied."""
    text = Text()
    for model in models:
        text.append(printable(model.name), "bold")
        text.append(
            f"  {_count_tasks(model.task_count)}, "
            f"{format_price(model.price_per_step_nano_usdc)}\n"
            f"  {model.model_id}\n  by {model.developer}\n  {_describe_use(model)}\n"
        )
    text.rstrip()
    return text


def _describe_use(model: RegisteredModel) -> str:
    if model.is_retired:
        return "retired: takes no new executions"
    if model.is_current:
        return f"used by clients that name {printable(model.name)!r}"
    return "older version: used by its id only"


def render_usage(usage: Sequence[ModelUsage]) -> Text:
    """Return the lines of ``splitup-deploy usage``: one paragraph for each version."""
    text = Text()
    for use in usage:
        text.append(printable(use.name), "bold")
        text.append(
            f"  {use.model_id}\n"
            f"  executions  {use.executions} by {use.clients} "
            f"{'client' if use.clients == 1 else 'clients'}: {use.settled} settled, "
            f"{use.refunded} refunded, {use.open} open\n"
            f"  steps       {use.steps}\n"
            f"  paid        {format_usdc(use.paid_micro_usdc)} to nodes, "
            f"{format_usdc(use.fee_micro_usdc)} to the committee\n"
        )
    text.rstrip()
    return text


def describe_model(
    profile: Profile, name: str | None, *, is_complete: bool = True
) -> dict[str, Any]:
    """Return the JSON form of ``inspect`` and ``register --dry-run``.

    Digests and ids are null without ``is_complete``, when only shapes were known.
    """
    manifest = profile.manifest
    return {
        "model_id": manifest.model_id if is_complete else None,
        "name": name,
        "kind": manifest.kind,
        "price_per_step_nano_usdc": manifest.price_nano_usdc,
        "latency_ps": profile.latency_ps,
        "imbalance": round(profile.imbalance, 4),
        "critical_path": list(profile.critical),
        "classes": [
            {"vram_bytes": target, "tasks": count} for target, count in profile.class_counts.items()
        ],
        "inputs": [_describe_port(port) for port in manifest.inputs],
        "outputs": [_describe_port(port) for port in manifest.outputs],
        "edges": [list(edge) for edge in manifest.edges()],
        "client": None if manifest.client is None else _describe_client(manifest.client),
        "tasks": [
            {
                "index": index,
                "place": "node",
                "gate": task.gate,
                "task_id": task.task_id if is_complete else None,
                **_describe_task(task),
                "class_bytes": profile.classes_bytes[index],
                "time_ps": profile.times_ps[index],
                "price_nano_usdc": task.price_nano_usdc,
            }
            for index, task in enumerate(manifest.tasks)
        ],
    }


def _describe_client(client: ClientPart) -> dict[str, Any]:
    return {
        "inputs": [_describe_port(port) for port in client.inputs],
        "outputs": [_describe_port(port) for port in client.outputs],
        "tasks": [
            {"index": index, "place": "client", **_describe_task(task)}
            for index, task in enumerate(client.tasks)
        ],
        "privacy": None if client.privacy is None else client.privacy.model_dump(mode="json"),
    }


def _describe_task(task: Task | ClientTask) -> dict[str, Any]:
    sizes = {"label", "graph_bytes", "weights_bytes", "state_bytes", "vram_bytes", "flops"}
    return {
        **task.model_dump(include=sizes),
        "inputs": [_describe_port(port) for port in task.inputs],
        "outputs": [_describe_port(port) for port in task.outputs],
    }


def _render_client(client: ClientPart) -> Text:
    """Return the tasks that the client runs, and what that hides."""
    early = set(client.find_early())
    text = Text()
    for index, task in enumerate(client.tasks):
        when = "before" if index in early else "after"
        text.append(f"client   {task.label}", "bold")
        text.append(f" · {when} the nodes · {format_bytes(task.vram_bytes)}")
        text.append(f" · {format_scaled(task.flops, _FLOP_UNITS)}FLOP\n")
    for sentence in describe_privacy(client):
        text.append(textwrap.indent(textwrap.fill(sentence, 78), " " * 9) + "\n", "dim")
    return text


def _render_graph(profile: Profile) -> Text:
    hot = set(profile.critical)
    text = Text()
    rails = list(_draw_rails(profile))
    for index, (task, (corner, rail)) in enumerate(zip(profile.manifest.tasks, rails, strict=True)):
        text.append(corner, "dim")
        text.append("● " if index in hot else "○ ", "bold yellow" if index in hot else "dim")
        text.append(f"{index} {task.label}", "bold")
        text.append("".join(f" · {fact}" for fact in _list_facts(profile, index)) + "\n")
        text.append(f"{rail.ljust(6)}{_list_costs(task)}\n", "dim")
        text.append(f"{rail.ljust(6)}← {_list_inputs(task)}\n", "dim")
    text.rstrip()
    return text


def _list_facts(profile: Profile, index: int) -> list[str]:
    task, target = profile.manifest.tasks[index], profile.classes_bytes[index]
    facts = [f"{format_bytes(task.vram_bytes)} VRAM", format_time(profile.times_ps[index])]
    if len(profile.targets_bytes) > 1:
        facts.append(f"{format_bytes(target)} card" if target else "fits no card")
    return facts


def _list_costs(task: Task) -> str:
    kinds = (("weights", task.weights_bytes), ("state", task.state_bytes))
    parts = [f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds if nbytes]
    parts.append(f"{format_scaled(task.flops, _FLOP_UNITS)}FLOP")
    parts.append(format_price(task.price_nano_usdc))
    return ", ".join(parts)


def _draw_rails(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield for every task the beginning of its first line and of its other lines.

    Neighbours of one level, which run in parallel, hang from a branch of the line.
    """
    levels = profile.levels
    last = len(levels) - 1
    for index, level in enumerate(levels):
        joined = index > 0 and levels[index - 1] == level
        splits = index < last and levels[index + 1] == level
        corner = {0: "┌", last: "└"}.get(index, "├") if last else "─"
        rail = " " if index == last else "│"
        if not joined and not splits:
            yield f"{corner}─", rail
        elif not joined:
            yield f"{corner}─┬─", f"{rail} │"
        else:
            yield f"{rail} {'├' if splits else '└'}─", f"{rail} {'│' if splits else ' '}"


def _list_inputs(task: Task) -> str:
    sizes: Counter[str] = Counter()
    for port in task.inputs:
        if isinstance(port.source, TaskSource):
            sizes[f"task {port.source.task}"] += port.nbytes
        else:
            sizes[port.source.input] += port.nbytes
    return ", ".join(f"{origin} {format_bytes(nbytes)}" for origin, nbytes in sizes.items())


def _render_totals(profile: Profile) -> Text:
    manifest, tasks = profile.manifest, profile.manifest.tasks
    outputs = ", ".join(f"{port.name} {port.dtype} {list(port.shape)}" for port in manifest.outputs)
    return Text(
        f"output   {outputs}\n"
        f"in all   {format_bytes(sum(task.weights_bytes for task in tasks))} of weights, "
        f"{format_scaled(sum(task.flops for task in tasks), _FLOP_UNITS)}FLOP and "
        f"{format_bytes(count_crossing_bytes(manifest))} between tasks per step\n"
        f"largest  {format_bytes(max(task.vram_bytes for task in tasks))} of VRAM\n"
        f"time     {format_time(profile.latency_ps)} per step along the critical path (●) of "
        f"{_count_tasks(len(profile.critical))}\n"
        f"longest  {100 * profile.imbalance:.1f} % above the mean task\n"
        f"{_list_classes(profile)}"
        f"price    {format_price(manifest.price_nano_usdc)}"
    )


def _list_classes(profile: Profile) -> str:
    if len(profile.targets_bytes) < 2:
        return ""
    parts = [
        f"{format_bytes(target)}: {_count_tasks(count)}" if target else f"none: {count}"
        for target, count in profile.class_counts.items()
    ]
    return f"cards    {', '.join(parts)}\n"


def _describe_port(port: Port) -> dict[str, Any]:
    return {"name": port.name, "dtype": port.dtype, "shape": list(port.shape), "bytes": port.nbytes}


def _count_tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"
