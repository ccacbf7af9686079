"""The plot of bench/reports/economics.md: the gain of lying, by slash and by sampling rate."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from html import escape
from typing import Final

from bench.economics.market_simulation import Estimate
from bench.economics.scenarios import (
    COLLUSION,
    DEFAULT,
    PUBLISHED,
    SCENARIOS,
    Game,
    account,
    compute_threshold,
)

TEXT: Final = "#1e293b"
QUIET: Final = "#64748b"
GRID: Final = "#e2e8f0"
GOOD: Final = "#0f766e"  # cheating loses
BAD: Final = "#b91c1c"  # cheating pays
COLOURS: Final = {
    "lazy": "#1d4ed8",
    "low-precision": "#7c3aed",
    "ring-10": "#b45309",
    "ring-30": "#be185d",
}
SHOWN: Final = (
    *("lazy", "lazy-10", "copying", "ring-10", "ring-30"),
    *("low-precision", "low-10", "low-30", "copying-30"),
)


@dataclass(slots=True)
class Panel:
    """A rectangle of the picture with linear axes."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    parts: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x, self.y
        across = self.left + (x - x0) / (x1 - x0) * self.width
        return across, self.top + self.height - (y - y0) / (y1 - y0) * self.height

    def line(self, points: list[tuple[float, float]], colour: str, *, more: str = "") -> None:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (self.at(x, y) for x, y in points))
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {more}/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        a, b = self.at(x, y)
        self.parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = TEXT,
        anchor: str = "middle",
        shift: tuple[float, float] = (0, 0),
        more: str = "",
    ) -> None:
        a, b = self.at(x, y)
        a, b = a + shift[0], b + shift[1]
        self.parts.append(
            f'<text x="{a:.1f}" y="{b:.1f}" fill="{colour}" text-anchor="{anchor}" {more}>'
            f"{escape(words)}</text>"
        )

    def title(self, words: str) -> None:
        bold = 'font-size="15" font-weight="600"'
        self.text(self.x[0], self.y[1], words, anchor="start", shift=(0, -14), more=bold)

    def x_axis(self, ticks: list[tuple[float, str]], name: str) -> None:
        for tick, words in ticks:
            self.line([(tick, self.y[0]), (tick, self.y[1])], GRID)
            self.text(tick, self.y[0], words, colour=QUIET, shift=(0, 18))
        middle = (self.x[0] + self.x[1]) / 2
        self.text(middle, self.y[0], name, colour=QUIET, shift=(0, 38))

    def y_axis(self, ticks: list[tuple[float, str]]) -> None:
        for tick, words in ticks:
            self.line([(self.x[0], tick), (self.x[1], tick)], GRID)
            self.text(self.x[0], tick, words, colour=QUIET, anchor="end", shift=(-8, 5))


def draw_plot(games: dict[str, Game], gains: dict[tuple[str, int], Estimate]) -> str:
    """Return the SVG of four panels; ``gains`` by scenario and S in C."""
    ten, hundred = (-1.2, 0.8), (-14.0, 2.0)
    rows = float(len(SHOWN))
    panels = [
        _draw_gains(Panel(250, 60, 300, 290, ten, (rows, 0)), gains, 10),
        _draw_gains(Panel(600, 60, 330, 290, hundred, (rows, 0)), gains, 100),
        _draw_slashes(Panel(70, 470, 400, 300, (0, 40), (-2, 1)), games),
        _draw_thresholds(Panel(560, 470, 370, 300, (0, 0.8), (0, 0.2))),
    ]
    body = "\n".join(part for panel in panels for part in panel.parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 830" '
        'font-family="Inter, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13" '
        'role="img" aria-label="What cheating gains over honesty, and from which slash on">\n'
        f'<rect width="960" height="830" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _draw_gains(panel: Panel, gains: dict[tuple[str, int], Estimate], slash: int) -> Panel:
    titles = {scenario.name: scenario.title for scenario in SCENARIOS}
    panel.title(f"Gain over honesty at S = {slash} C")
    ticks = (-1.0, -0.5, 0.0, 0.5) if slash == 10 else (-12.0, -8.0, -4.0, 0.0)
    panel.x_axis([(t, _sign(t)) for t in ticks], "C per task that a cheater executed")
    panel.line([(0, 0), (0, panel.y[0])], TEXT)
    for row, name in enumerate(SHOWN):
        gain, y = gains[name, slash], row + 0.5
        low, high = gain.mean - gain.half_width, gain.mean + gain.half_width
        colour = BAD if low > 0 else GOOD
        panel.line([(0, y), (gain.mean, y)], colour, more='stroke-opacity="0.25" stroke-width="10"')
        panel.line([(low, y), (high, y)], colour, more='stroke-width="2"')
        panel.dot(gain.mean, y, colour)
        if slash == 10:
            panel.text(panel.x[0], y, titles[name], anchor="end", shift=(-12, 5))
    return panel


def _draw_slashes(panel: Panel, games: dict[str, Game]) -> Panel:
    panel.title("Gain per lie at p = 8 % (lines: theory)")
    panel.x_axis([(s, f"{s}") for s in (0, 10, 20, 30, 40)], "S, in C")
    panel.y_axis([(g, _sign(g)) for g in (-2, -1, 0, 1)])
    panel.line([(panel.x[0], 0), (panel.x[1], 0)], TEXT)
    for place, (name, colour) in enumerate(COLOURS.items()):
        scenario = games[name].scenario
        assert scenario.theory is not None
        gain_at = scenario.theory.expect_gain
        expected = [gain_at(replace(DEFAULT, slash_milli=1000 * slash)) for slash in range(41)]
        end = sum(gain >= panel.y[0] for gain in expected) - 1
        panel.line([(0.0, expected[0]), (end, expected[end])], colour, more='stroke-width="1.5"')
        for slash in range(2, end + 1, 4):
            gain = account(games[name], replace(DEFAULT, slash_milli=slash * 1000)).gain
            spread = [
                (float(slash), gain.mean - gain.half_width),
                (float(slash), gain.mean + gain.half_width),
            ]
            panel.line(spread, colour, more='stroke-width="2"')
            panel.dot(slash, gain.mean, colour)
        more = 'font-weight="600"'
        panel.text(
            40,
            1,
            scenario.title,
            colour=colour,
            anchor="end",
            shift=(-8, 20 + 18 * place),
            more=more,
        )
    return panel


def _draw_thresholds(panel: Panel) -> Panel:
    panel.title("p that the contract's condition asks for")
    panel.x_axis([(r / 10, f"{10 * r} %") for r in (0, 1, 3, 5, 7)], "r, share of colluding nodes")
    panel.y_axis([(p / 100, f"{p} %") for p in (0, 4, 8, 12, 16, 20)])
    panel.line([(0, 0.08), (0.8, 0.08)], GOOD, more='stroke-width="2" stroke-dasharray="6 4"')
    panel.text(0.8, 0.08, "p = 8 %", colour=GOOD, anchor="end", shift=(0, -8))
    for economics, colour, name in ((PUBLISHED, BAD, "S = 10 C"), (DEFAULT, TEXT, "S = 100 C")):
        points = [(r / 200, compute_threshold(economics, r / 200)) for r in range(0, 160)]
        inside = [point for point in points if point[1] <= panel.y[1]]
        panel.line(inside, colour, more='stroke-width="2"')
        place = inside[len(inside) * 3 // 5]
        panel.text(*place, name, colour=colour, anchor="end", shift=(-6, -10))
        panel.dot(COLLUSION, compute_threshold(economics), colour)
        panel.dot(0.3, compute_threshold(economics, 0.3), colour)
    return panel


def _sign(value: float) -> str:
    return f"{value:+g}".replace("-", "−") if value else "0"
