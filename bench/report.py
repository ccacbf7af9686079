"""The bars and figures of one mode, the machine, and their text for a terminal."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitup.client.outcome import Transition, compute_percentile

ROOT = Path(__file__).resolve().parents[1]
_NS_PER_MS = 1_000_000

Beside = dict[str, Any]  # floors measured in the same run, and peers' published figures


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure with its bound, and related figures beside it."""

    name: str
    measured: float | None  # None: it could not be measured, ``note`` says why
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    beside: Beside = field(default_factory=dict)
    note: str = ""

    @property
    def is_met(self) -> bool:
        """Return whether the figure is within the bound; False without a figure."""
        if self.measured is None:
            return False
        above = self.at_least is None or self.measured >= self.at_least
        return above and (self.at_most is None or self.measured <= self.at_most)

    @property
    def bound(self) -> str:
        """Return the bound as text."""
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        value = {
            "bar": self.name,
            "measured": self.measured,
            "bound": self.bound,
            "unit": self.unit,
            "met": self.is_met,
            "beside": self.beside,
        }
        return value | ({"note": self.note} if self.note else {})


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a mode: its bars, and further figures."""

    bars: Sequence[Bar]
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"bars": [bar.to_dict() for bar in self.bars], "figures": self.figures}


def describe_machine() -> dict[str, Any]:
    """Return the machine's processor, cores and memory, and the versions of Python and code."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "commit": _ask_git("rev-parse", "--short", "HEAD"),
        "changed": bool(_ask_git("status", "--porcelain", "--untracked-files=no")),
    }


def _ask_git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def describe_bars(bars: Iterable[dict[str, Any]]) -> str:
    """Return bars in their JSON form as lines for a terminal."""
    lines = []
    for bar in bars:
        mark = "met   " if bar["met"] else "MISSED"
        measured = "not measured" if bar["measured"] is None else f"{bar['measured']:g}"
        lines.append(f"{mark}  {bar['bar']}: {measured} {bar['unit']} (bar {bar['bound']})")
        lines += [f"          {name}: {value}" for name, value in bar["beside"].items()]
        if bar.get("note"):
            lines.append(f"          {bar['note']}")
    return "\n".join(lines)


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


# ---- figures -----------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def summarise_ms(transitions: Sequence[Transition]) -> dict[str, float]:
    """Return p50, p99 and the number of transitions, in milliseconds."""
    ns = [transition.nanoseconds for transition in transitions]
    return {
        "p50": round(compute_percentile(ns, 50) / _NS_PER_MS, 3),
        "p99": round(compute_percentile(ns, 99) / _NS_PER_MS, 3),
        "count": len(ns),
    }


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios within rounds; other load affects both sides of a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def compute_median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, from order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    low = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[low], ordered[count - 1 - low]


def read_rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory: it has ended")


def read_tree_pss(pid: int) -> int:
    """Return the memory of a process and its children; a page of n processes counts as 1/n."""
    kilobytes = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            kilobytes = int(line.split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return 1024 * kilobytes + sum(read_tree_pss(int(child)) for child in children)


def read_cpu_s(pid: int) -> float:
    """Return the CPU seconds a process has used, and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def read_tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of everything it started."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return read_cpu_s(pid) + sum(read_tree_cpu_s(int(child)) for child in children.split())
