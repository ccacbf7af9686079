"""A cut model's task graph as text that Mermaid and Graphviz draw. Pure: a profile in, text out.

The critical path of the nodes is drawn strong, tasks that stay with the client are drawn dashed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from splitup.client.inputs import format_bytes
from splitup.core.printable import printable
from splitup.graph.manifest import ClientTask, InputSource, NetworkSource, Task, TaskSource
from splitup_deploy.showing.profile import Profile
from splitup_deploy.showing.report import format_time


@dataclass(frozen=True, slots=True)
class Arrow:
    """What one box sends another. Boxes are tasks, inputs and outputs, by their names."""

    source: str
    target: str
    nbytes: int | None  # None for what users give


def draw_mermaid(profile: Profile) -> str:
    """Return the task graph as a Mermaid flowchart, which GitHub and others render."""
    hot = [f"t{index}" for index in profile.critical]
    strong = set(pairwise(hot))
    lines = ["flowchart TD"]
    for box, text in _list_ports(profile):
        lines.append(f'  {box}(["{_quote_mermaid(text)}"])')
    for box, text, facts in _list_tasks(profile):
        lines.append(f'  {box}["{_quote_mermaid(text)}<br>{facts}"]')
    for arrow in list_arrows(profile):
        line = "==>" if (arrow.source, arrow.target) in strong else "-->"
        if arrow.nbytes is None:
            lines.append(f"  {arrow.source} -.-> {arrow.target}")
        else:
            label = format_bytes(arrow.nbytes)
            lines.append(f'  {arrow.source} {line}|"{label}"| {arrow.target}')
    lines.append("  classDef critical stroke:#e07a1f,stroke-width:2px")
    lines.append(f"  class {','.join(hot)} critical")
    client = profile.manifest.client
    if client is not None:
        lines.append("  classDef client stroke:#3b6fc4,stroke-dasharray:5 3")
        lines.append(f"  class {','.join(f'c{n}' for n in range(len(client.tasks)))} client")
    return "\n".join(lines) + "\n"


def draw_dot(profile: Profile) -> str:
    """Return the task graph in Graphviz' language: ``dot -Tsvg`` makes a picture of it."""
    hot = [f"t{index}" for index in profile.critical]
    strong = set(pairwise(hot))
    lines = ["digraph model {", "  node [shape=box, style=rounded]"]
    for box, text in _list_ports(profile):
        lines.append(f'  {box} [shape=oval, label="{_quote_dot(text)}"]')
    for box, text, facts in _list_tasks(profile):
        look = ", penwidth=2" if box in hot else ', style="rounded,dashed"' * box.startswith("c")
        lines.append(f'  {box} [label="{_quote_dot(text)}\\n{facts}"{look}]')
    for arrow in list_arrows(profile):
        label = "" if arrow.nbytes is None else format_bytes(arrow.nbytes)
        look = ", penwidth=2" if (arrow.source, arrow.target) in strong else ""
        lines.append(f'  {arrow.source} -> {arrow.target} [label="{label}"{look}]')
    return "\n".join(lines) + "\n}\n"


def list_arrows(profile: Profile) -> list[Arrow]:
    """Return who sends what to whom; t0, t1, … are nodes' tasks, c0, c1, … the client's own."""
    manifest, client = profile.manifest, profile.manifest.client
    inputs = {port.name: f"in{number}" for number, port in enumerate(manifest.user_inputs)}
    sizes: Counter[tuple[str, str]] = Counter()

    def find_origin(source: InputSource | TaskSource | NetworkSource, is_client: bool) -> str:
        if isinstance(source, NetworkSource):
            return next(f"t{p.task}" for p in manifest.outputs if p.name == source.output)
        if isinstance(source, InputSource) and client is not None and not is_client:
            place = [port.name for port in manifest.inputs].index(source.input)
            return find_origin(client.sends[place], True)
        if isinstance(source, InputSource):
            return inputs[source.input]
        return f"{'c' if is_client else 't'}{source.task}"

    tasks: list[tuple[str, Task | ClientTask]] = [
        *((f"t{index}", task) for index, task in enumerate(manifest.tasks)),
        *((f"c{index}", task) for index, task in enumerate(client.tasks if client else ())),
    ]
    for box, task in tasks:
        for port in task.inputs:
            sizes[find_origin(port.source, isinstance(task, ClientTask)), box] += port.nbytes
    arrows = [
        Arrow(source, target, None if source.startswith("in") else nbytes)
        for (source, target), nbytes in sizes.items()
    ]
    kind = "t" if client is None else "c"
    for number, output in enumerate(manifest.user_outputs):
        arrows.append(Arrow(f"{kind}{output.task}", f"out{number}", output.nbytes))
    return arrows


def _list_ports(profile: Profile) -> Iterator[tuple[str, str]]:
    for number, port in enumerate(profile.manifest.user_inputs):
        yield f"in{number}", port.name
    for number, output in enumerate(profile.manifest.user_outputs):
        yield f"out{number}", output.name


def _list_tasks(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Yield for every task its box, its title, and its memory and time."""
    client = profile.manifest.client
    for index, task in enumerate(profile.manifest.tasks):
        facts = f"{format_bytes(task.vram_bytes)} · {format_time(profile.times_ps[index])}"
        yield f"t{index}", f"{index} {task.label}", facts
    for index, own in enumerate(client.tasks if client else ()):
        facts = f"{format_bytes(own.vram_bytes)} · stays with the user"
        yield f"c{index}", f"client {own.label}", facts


def _quote_mermaid(text: str) -> str:
    """Quote for Mermaid, which takes entity codes in place of marks with a meaning."""
    keep = set(" .,-+_/:()·…")
    return "".join(c if c.isalnum() or c in keep else f"#{ord(c)};" for c in printable(text))


def _quote_dot(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')
