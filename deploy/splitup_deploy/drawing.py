"""A cut model's DAG as Mermaid text and as an SVG picture. Pure: a profile in, text out.

Tasks of one level stand side by side, levels from top to bottom. An edge to a later level than the
next runs down beside the tasks between. The critical path is drawn strong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from splitup_deploy.inspect import format_bytes, format_time, printable
from splitup_deploy.profile import Edge, Profile, list_model_inputs

_CARD_WIDTH: Final = 336
_CARD_HEIGHT: Final = 70
_GAP_X: Final = 28
_GAP_Y: Final = 52
_MARGIN: Final = 32
_HEADER: Final = 96
_LANE: Final = 18  # between two edges that run beside the tasks
_STYLE: Final = """
svg { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.page { fill: #ffffff; } .card { fill: #f6f8fa; stroke: #c5ccd3; }
.title { font-size: 20px; font-weight: 600; } .label { font-size: 13px; font-weight: 600; }
text { fill: #1f2933; } .small { font-size: 11.5px; fill: #52606d; }
.tag { font-size: 10.5px; fill: #52606d; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
.edge { fill: none; stroke: #9aa5b1; stroke-width: 1.4; } .tip { fill: #9aa5b1; }
.bar { fill: #dde3e9; } .fill { fill: #9aa5b1; }
.hot .card { fill: #fff4e8; stroke: #e07a1f; stroke-width: 1.6; }
.hot .fill { fill: #e07a1f; } .edge.hot { stroke: #e07a1f; stroke-width: 2.2; }
.tip.hot { fill: #e07a1f; }
@media (prefers-color-scheme: dark) {
.page { fill: #12161b; } text { fill: #e4e9ee; } .small, .tag { fill: #a3afbb; }
.tag { stroke: #12161b; }
.card { fill: #1c232b; stroke: #3a4651; } .bar { fill: #2c3640; } .fill { fill: #76838f; }
.hot .card { fill: #33230f; stroke: #f0953f; } .hot .fill { fill: #f0953f; }
.edge.hot { stroke: #f0953f; } .tip.hot { fill: #f0953f; }
}
""".strip()


def draw_mermaid(profile: Profile) -> str:
    """Return the DAG as a Mermaid flowchart, as GitHub and others render it."""
    manifest, hot = profile.manifest, set(profile.critical)
    lines = ["flowchart TD"]
    for port in manifest.inputs:
        lines.append(f'  {_mermaid_id("in", port.name, profile)}(["{_mermaid(port.name)}"])')
    for index, (task, time_ps) in enumerate(zip(manifest.tasks, profile.times_ps, strict=True)):
        text = f"{index} {_mermaid(task.label)}<br>{format_bytes(task.vram_bytes)}"
        lines.append(f'  t{index}["{text} · {format_time(time_ps)}"]')
    for port in manifest.outputs:
        lines.append(f'  {_mermaid_id("out", port.name, profile)}(["{_mermaid(port.name)}"])')
    for index, task in enumerate(manifest.tasks):
        for name in list_model_inputs(task):
            lines.append(f"  {_mermaid_id('in', name, profile)} -.-> t{index}")
    for edge in profile.edges:
        arrow = "==>" if _is_hot(profile, edge) else "-->"
        lines.append(f'  t{edge.source} {arrow}|"{format_bytes(edge.nbytes)}"| t{edge.target}')
    for port in manifest.outputs:
        target = _mermaid_id("out", port.name, profile)
        lines.append(f'  t{port.task} -->|"{format_bytes(port.nbytes)}"| {target}')
    lines.append("  classDef critical fill:#fff4e8,stroke:#e07a1f,stroke-width:2px,color:#1f2933")
    lines.append("  class " + ",".join(f"t{index}" for index in sorted(hot)) + " critical")
    return "\n".join(lines) + "\n"


def draw_svg(profile: Profile, name: str | None) -> str:
    """Return the DAG as a stand-alone SVG document that follows the reader's colour scheme."""
    layout = _arrange(profile)
    slowest = max(max(profile.times_ps), 1)
    hot = set(profile.critical)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width}" height="{layout.height}"'
        f' viewBox="0 0 {layout.width} {layout.height}" role="img">',
        f"<title>{_xml(_make_title(profile, name))}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{layout.width}" height="{layout.height}"/>',
        f'<text class="title" x="{_MARGIN}" y="44">{_xml(_make_title(profile, name))}</text>',
        f'<text class="small" x="{_MARGIN}" y="66">{_xml(_make_subtitle(profile))}</text>',
    ]
    ordered = sorted(profile.edges, key=lambda edge: _is_hot(profile, edge))
    drawn = [_draw_edge(profile, layout, edge) for edge in ordered]
    parts += [line for line, _ in drawn] + [label for _, label in drawn]  # labels above lines
    for index, (x, y) in enumerate(layout.places):
        parts.append(_draw_card(profile, index, x, y, slowest, index in hot))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Layout:
    width: int
    height: int
    places: tuple[tuple[int, int], ...]  # upper left corner of every task's card
    lanes: dict[tuple[int, int], int]  # x of every edge that runs beside the tasks


def _arrange(profile: Profile) -> _Layout:
    columns: list[list[int]] = [[] for _ in range(max(profile.levels) + 1)]
    for index, level in enumerate(profile.levels):
        columns[level].append(index)
    widest = max(len(column) for column in columns)
    inner = max(widest * (_CARD_WIDTH + _GAP_X) - _GAP_X, 620 - 2 * _MARGIN)
    places: dict[int, tuple[int, int]] = {}
    for level, column in enumerate(columns):
        span = len(column) * (_CARD_WIDTH + _GAP_X) - _GAP_X
        left = _MARGIN + (inner - span) // 2
        for position, index in enumerate(column):
            x = left + position * (_CARD_WIDTH + _GAP_X)
            places[index] = (x, _HEADER + level * (_CARD_HEIGHT + _GAP_Y))
    lanes: dict[tuple[int, int], int] = {}
    free: list[int] = []  # level from which a lane is free again
    for edge in profile.edges:
        start, end = profile.levels[edge.source], profile.levels[edge.target]
        if end - start > 1:
            lane = next((n for n, level in enumerate(free) if level <= start), len(free))
            free[lane : lane + 1] = [end]
            lanes[edge.source, edge.target] = _MARGIN + inner + _GAP_X + lane * _LANE
    labels = 60 if lanes else 0
    width = _MARGIN + inner + (_GAP_X + len(free) * _LANE if free else 0) + labels + _MARGIN
    height = _HEADER + len(columns) * (_CARD_HEIGHT + _GAP_Y) - _GAP_Y + _MARGIN
    return _Layout(width, height, tuple(places[i] for i in range(len(places))), lanes)


def _draw_edge(profile: Profile, layout: _Layout, edge: Edge) -> tuple[str, str]:
    """Return the line with its tip, and the label."""
    hot = " hot" if _is_hot(profile, edge) else ""
    x1, y1 = layout.places[edge.source]
    x2, y2 = layout.places[edge.target]
    x1, y1, x2 = x1 + _CARD_WIDTH // 2, y1 + _CARD_HEIGHT, x2 + _CARD_WIDTH // 2
    tip = y2 - 7
    lane = layout.lanes.get((edge.source, edge.target))
    if lane is None:
        bend = (tip - y1) // 2
        path = f"M{x1} {y1} C{x1} {y1 + bend} {x2} {tip - bend} {x2} {tip}"
        label = (x1 + x2) // 2 + 8, (y1 + tip) // 2 + 4
    else:
        top, bottom = y1 + _GAP_Y // 3, y2 - _GAP_Y // 3
        path = (
            f"M{x1 + 24} {y1} C{x1 + 24} {top} {x1 + 24} {top} {x1 + 40} {top} H{lane - 8}"
            f" Q{lane} {top} {lane} {top + 8} V{bottom - 8} Q{lane} {bottom} {lane - 8} {bottom}"
            f" H{x2 + 40} C{x2 + 24} {bottom} {x2 + 24} {bottom} {x2 + 24} {tip}"
        )
        x2 += 24
        label = lane + 5, (top + bottom) // 2
    arrow = f"M{x2 - 5} {tip - 1} h10 l-5 8 z"
    return (
        f'<path class="edge{hot}" d="{path}"/><path class="tip{hot}" d="{arrow}"/>',
        f'<text class="tag" x="{label[0]}" y="{label[1]}">{format_bytes(edge.nbytes)}</text>',
    )


def _draw_card(profile: Profile, index: int, x: int, y: int, slowest: int, hot: bool) -> str:
    task, time_ps = profile.manifest.tasks[index], profile.times_ps[index]
    bar = _CARD_WIDTH - 24
    facts = f"{format_bytes(task.vram_bytes)} of VRAM · {format_time(time_ps)}"
    if len(profile.targets_bytes) > 1:
        target = profile.classes_bytes[index]
        facts += f" · {format_bytes(target) if target else 'no'} card"
    reads = ", ".join(list_model_inputs(task))
    label = _shorten(f"{index}  {printable(task.label)}", 43)
    return (
        f'<g class="{"hot" if hot else "task"}">'
        f"<title>{_xml(printable(task.label))}&#10;{task.task_id}</title>"
        f'<rect class="card" x="{x}" y="{y}" width="{_CARD_WIDTH}" height="{_CARD_HEIGHT}" rx="8"/>'
        f'<text class="label" x="{x + 12}" y="{y + 23}">{_xml(label)}</text>'
        f'<text class="small" x="{x + 12}" y="{y + 42}">{_xml(facts)}</text>'
        f'<text class="tag" x="{x + _CARD_WIDTH - 12}" y="{y - 5}" text-anchor="end">'
        f"{_xml(_shorten(printable(reads), 24))}</text>"
        f'<rect class="bar" x="{x + 12}" y="{y + 54}" width="{bar}" height="5" rx="2.5"/>'
        f'<rect class="fill" x="{x + 12}" y="{y + 54}" width="{max(bar * time_ps // slowest, 3)}"'
        ' height="5" rx="2.5"/></g>'
    )


def _make_title(profile: Profile, name: str | None) -> str:
    count = len(profile.manifest.tasks)
    plural = "task" if count == 1 else "tasks"
    return f"{_shorten(printable(name or profile.manifest.kind), 48)} · {count} {plural}"


def _make_subtitle(profile: Profile) -> str:
    tasks = profile.manifest.tasks
    return (
        f"{format_bytes(sum(task.vram_bytes for task in tasks))} of VRAM in all, "
        f"largest {format_bytes(max(task.vram_bytes for task in tasks))} · critical path "
        f"{format_time(profile.latency_ps)} per step · bars: predicted time"
    )


def _is_hot(profile: Profile, edge: Edge) -> bool:
    return (edge.source, edge.target) in zip(profile.critical, profile.critical[1:], strict=False)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _xml(text: str) -> str:
    return escape(text, {'"': "&quot;"})


def _mermaid(text: str) -> str:
    """Quote for Mermaid, which takes entity codes in place of marks with a meaning."""
    keep = set(" .,-+_/:()·…")
    return "".join(c if c.isalnum() or c in keep else f"#{ord(c)};" for c in printable(text))


def _mermaid_id(kind: str, name: str, profile: Profile) -> str:
    ports = profile.manifest.inputs if kind == "in" else profile.manifest.outputs
    return f"{kind}{[port.name for port in ports].index(name)}"
