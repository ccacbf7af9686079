"""A cut model's DAG as Mermaid text and as an SVG picture. Pure: a profile in, text out.

Tasks of one level stand side by side, levels from top to bottom. An edge to a later level than the
next runs down beside the tasks between. The critical path of the nodes is drawn strong, tasks that
stay with the client are drawn dashed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from splitup_deploy.showing.profile import Edge, Profile
from splitup_deploy.showing.report import format_bytes, format_time, printable
from splitup_deploy.showing.scene import Card, Scene, make_scene

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
.client .card { fill: #eef4ff; stroke: #3b6fc4; stroke-dasharray: 5 3; }
@media (prefers-color-scheme: dark) {
.page { fill: #12161b; } text { fill: #e4e9ee; } .small, .tag { fill: #a3afbb; }
.tag { stroke: #12161b; }
.card { fill: #1c232b; stroke: #3a4651; } .bar { fill: #2c3640; } .fill { fill: #76838f; }
.hot .card { fill: #33230f; stroke: #f0953f; } .hot .fill { fill: #f0953f; }
.edge.hot { stroke: #f0953f; } .tip.hot { fill: #f0953f; }
.client .card { fill: #16233a; stroke: #6f9de8; }
}
""".strip()


def draw_mermaid(profile: Profile) -> str:
    """Return the DAG as a Mermaid flowchart, as GitHub and others render it."""
    scene, lines = make_scene(profile), ["flowchart TD"]
    places = {port.name: f"in{number}" for number, port in enumerate(scene.inputs)}
    ids = [f"{'c' if card.is_client else 't'}{card.index}" for card in scene.cards]
    for port in scene.inputs:
        lines.append(f'  {places[port.name]}(["{_mermaid(port.name)}"])')
    for name, card in zip(ids, scene.cards, strict=True):
        text = f"{_mermaid(_name(card))}<br>{format_bytes(card.task.vram_bytes)}"
        lines.append(f'  {name}["{text} · {_tell_time(card)}"]')
    for number, (port, _) in enumerate(scene.outputs):
        lines.append(f'  out{number}(["{_mermaid(port.name)}"])')
    for name, card in zip(ids, scene.cards, strict=True):
        lines += [f"  {places[read]} -.-> {name}" for read in card.reads]
    for edge in scene.edges:
        arrow = "==>" if scene.is_hot(edge) else "-->"
        label = format_bytes(edge.nbytes)
        lines.append(f'  {ids[edge.source]} {arrow}|"{label}"| {ids[edge.target]}')
    for number, (port, place) in enumerate(scene.outputs):
        lines.append(f'  {ids[place]} -->|"{format_bytes(port.nbytes)}"| out{number}')
    hot = [name for name, card in zip(ids, scene.cards, strict=True) if card.is_hot]
    own = [name for name, card in zip(ids, scene.cards, strict=True) if card.is_client]
    lines.append("  classDef critical fill:#fff4e8,stroke:#e07a1f,stroke-width:2px,color:#1f2933")
    lines.append("  class " + ",".join(hot) + " critical")
    if own:
        lines.append(
            "  classDef client fill:#eef4ff,stroke:#3b6fc4,stroke-dasharray:5 3,color:#1f2933"
        )
        lines.append("  class " + ",".join(own) + " client")
    return "\n".join(lines) + "\n"


def draw_svg(profile: Profile, name: str | None) -> str:
    """Return the DAG as a stand-alone SVG document that follows the reader's colour scheme."""
    scene = make_scene(profile)
    layout = _arrange(scene)
    slowest = max(max(profile.times_ps), 1)
    title, subtitle = _xml(_make_title(profile, name)), _xml(_make_subtitle(profile))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width}" height="{layout.height}"'
        f' viewBox="0 0 {layout.width} {layout.height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{layout.width}" height="{layout.height}"/>',
        f'<text class="title" x="{_MARGIN}" y="44">{title}</text>',
        f'<text class="small" x="{_MARGIN}" y="66">{subtitle}</text>',
    ]
    drawn = [_draw_edge(scene, layout, edge) for edge in sorted(scene.edges, key=scene.is_hot)]
    parts += [line for line, _ in drawn] + [label for _, label in drawn]  # labels above lines
    for card, (x, y) in zip(scene.cards, layout.places, strict=True):
        parts.append(_draw_card(card, x, y, slowest, len(profile.targets_bytes) > 1))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Layout:
    width: int
    height: int
    places: tuple[tuple[int, int], ...]  # upper left corner of every task's card
    lanes: dict[tuple[int, int], int]  # x of every edge that runs beside the tasks


def _arrange(scene: Scene) -> _Layout:
    columns: list[list[int]] = [[] for _ in range(max(card.level for card in scene.cards) + 1)]
    for index, card in enumerate(scene.cards):
        columns[card.level].append(index)
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
    for edge in scene.edges:
        start, end = scene.cards[edge.source].level, scene.cards[edge.target].level
        if end - start > 1:
            lane = next((n for n, level in enumerate(free) if level <= start), len(free))
            free[lane : lane + 1] = [end]
            lanes[edge.source, edge.target] = _MARGIN + inner + _GAP_X + lane * _LANE
    labels = 60 if lanes else 0
    width = _MARGIN + inner + (_GAP_X + len(free) * _LANE if free else 0) + labels + _MARGIN
    height = _HEADER + len(columns) * (_CARD_HEIGHT + _GAP_Y) - _GAP_Y + _MARGIN
    return _Layout(width, height, tuple(places[i] for i in range(len(places))), lanes)


def _draw_edge(scene: Scene, layout: _Layout, edge: Edge) -> tuple[str, str]:
    """Return the line with its tip, and the label."""
    hot = " hot" if scene.is_hot(edge) else ""
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


def _draw_card(card: Card, x: int, y: int, slowest: int, is_fleet: bool) -> str:
    task, time_ps = card.task, card.time_ps
    bar = _CARD_WIDTH - 24
    facts = f"{format_bytes(task.vram_bytes)} of {'memory' if card.is_client else 'VRAM'}"
    facts += f" · {_tell_time(card)}"
    if is_fleet and not card.is_client:
        facts += f" · {format_bytes(card.target_bytes) if card.target_bytes else 'no'} card"
    reads = ", ".join(card.reads)
    label = _shorten(_name(card), 43)
    parts = [
        f'<g class="{"client" if card.is_client else "hot" if card.is_hot else "task"}">'
        f"<title>{_xml(printable(task.label))}&#10;{task.task_id}</title>"
        f'<rect class="card" x="{x}" y="{y}" width="{_CARD_WIDTH}" height="{_CARD_HEIGHT}" rx="8"/>'
        f'<text class="label" x="{x + 12}" y="{y + 23}">{_xml(label)}</text>'
        f'<text class="small" x="{x + 12}" y="{y + 42}">{_xml(facts)}</text>'
        f'<text class="tag" x="{x + _CARD_WIDTH - 12}" y="{y - 5}" text-anchor="end">'
        f"{_xml(_shorten(printable(reads), 24))}</text>"
    ]
    if time_ps is not None:
        parts.append(
            f'<rect class="bar" x="{x + 12}" y="{y + 54}" width="{bar}" height="5" rx="2.5"/>'
            f'<rect class="fill" x="{x + 12}" y="{y + 54}"'
            f' width="{max(bar * time_ps // slowest, 3)}" height="5" rx="2.5"/>'
        )
    return "".join((*parts, "</g>"))


def _name(card: Card) -> str:
    return f"{'client' if card.is_client else card.index} {printable(card.task.label)}"


def _tell_time(card: Card) -> str:
    return "stays with the user" if card.time_ps is None else format_time(card.time_ps)


def _make_title(profile: Profile, name: str | None) -> str:
    count = len(profile.manifest.tasks)
    plural = "task" if count == 1 else "tasks"
    client = profile.manifest.client
    own = "" if client is None else f" of nodes, {len(client.tasks)} of the client"
    return f"{_shorten(printable(name or profile.manifest.kind), 48)} · {count} {plural}{own}"


def _make_subtitle(profile: Profile) -> str:
    tasks = profile.manifest.tasks
    return (
        f"{format_bytes(sum(task.vram_bytes for task in tasks))} of VRAM in all, "
        f"largest {format_bytes(max(task.vram_bytes for task in tasks))} · critical path "
        f"{format_time(profile.latency_ps)} per step · bars: predicted time"
    )


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _xml(text: str) -> str:
    return escape(text, {'"': "&quot;"})


def _mermaid(text: str) -> str:
    """Quote for Mermaid, which takes entity codes in place of marks with a meaning."""
    keep = set(" .,-+_/:()·…")
    return "".join(c if c.isalnum() or c in keep else f"#{ord(c)};" for c in printable(text))
