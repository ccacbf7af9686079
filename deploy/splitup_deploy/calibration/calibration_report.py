"""What a calibration found, as JSON, as a tolerance file, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from splitup.graph.compare import PPB, Metrics
from splitup_deploy.calibration.separation import Calibration
from splitup_deploy.calibration.variant_runs import Variant


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task: its calibrations by dtype, and the largest difference between two variants."""

    index: int
    label: str
    task_id: str
    calibrations: tuple[Calibration, ...]
    worst: Metrics | None  # by relative L2; None when all variants gave equal bytes


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """What ``calibrate_model`` found."""

    variants: tuple[Variant, ...]
    tasks: tuple[TaskReport, ...]
    steps: int

    def make_file(self) -> dict[str, Any]:
        """Return what ``register --tolerance`` reads; tasks without a tolerance are left out."""
        found = {
            task.task_id: [
                c.tolerance.model_dump() for c in task.calibrations if c.tolerance is not None
            ]
            for task in self.tasks
        }
        return {
            "classes": sorted({v.determinism for v in self.variants if not v.problem}),
            "tasks": {task_id: rows for task_id, rows in found.items() if rows},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON report."""
        return {
            "steps": self.steps,
            "variants": [
                {"name": v.name, "determinism_class": v.determinism, "problem": v.problem}
                for v in self.variants
            ],
            "tasks": [
                {
                    "index": task.index,
                    "label": task.label,
                    "task_id": task.task_id,
                    "worst_honest": None if task.worst is None else task.worst.to_dict(),
                    "calibrations": [
                        {
                            **{name: getattr(c, name) for name in Calibration.__slots__},
                            "tolerance": None if c.tolerance is None else c.tolerance.model_dump(),
                        }
                        for c in task.calibrations
                    ],
                }
                for task in self.tasks
            ],
        }


def render_report(report: CalibrationReport) -> Table:
    """Return the table for a terminal: differences by relative L2, and the tolerances."""
    table = Table(box=None)
    left = ("task", "smallest perturbation")
    for name in ("task", "dtype", "correct, at most", left[1], "at least", "tolerance"):
        table.add_column(name, justify="left" if name in left else "right")
    for task in report.tasks:
        for found in task.calibrations:
            nearest = min(
                found.perturbations,
                key=lambda name: found.perturbations[name]["relative_l2_ppb"],
                default="",
            )
            bounds = {} if found.tolerance is None else found.tolerance.list_bounds()
            table.add_row(
                f"{task.index} {task.label}",
                found.dtype,
                _format_ppb(found.honest["relative_l2_ppb"]),
                nearest,
                _format_ppb(found.perturbations[nearest]["relative_l2_ppb"]) if nearest else "",
                ", ".join(_format_bound(*item) for item in bounds.items()) or found.reason,
            )
    return table


def _format_ppb(value: int) -> str:
    return f"{value / PPB:.1e}"


def _format_bound(name: str, bound: int) -> str:
    if name == "max_ulp":
        return f"{bound} ULP"
    return f"{name.removesuffix('_ppb').replace('_', ' ')} {_format_ppb(bound)}"
