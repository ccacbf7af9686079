"""The status of the running daemon: a small file, replaced after changes and every few seconds."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from splitup.client.inputs import format_bytes
from splitup.config import NODE_STATUS_FILE
from splitup.core.files import find_holder
from splitup.storage.download import write_file
from splitup_node.config import make_command

REWRITE_S: Final = 4.0  # the longest between two updates
_STALE_S: Final = 10.0  # after two missed updates it could not be written


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What the daemon wrote last; ``values`` is empty when it never ran.

    Of one that runs and could not write they are its ``pid`` alone.

    ``problem`` says why that is old although the daemon runs.
    """

    values: dict[str, Any]
    is_running: bool
    problem: str = ""

    def describe(self, config: Path) -> str:
        """Return one line for a person; ``config`` is the node's configuration file."""
        start = f"start it with: {make_command('run', config)}"
        if not self.values:
            return f"never ran; {start}"
        if not self.is_running:
            return f"stopped; {start}"
        return f"running as process {self.values['pid']}"

    def list_rows(self, now_s: float) -> list[tuple[str, str]]:
        """Return what the running daemon does, as (name, text) for a person."""
        values = self.values
        if "vram_bytes" not in values:
            return []
        used, total = values["vram_used_bytes"], values["vram_bytes"]
        state, limit = values["state_bytes"], values["state_limit_bytes"]
        rows = [
            *self._describe_endpoint(),
            ("device", str(values["device"]["reason"])),
            ("sandbox", values["device"]["sandbox"] or "complete"),
            ("memory", f"{format_bytes(used)} of {format_bytes(total)}"),
            (
                "sessions",
                f"{values['sessions']} with {format_bytes(state)} of {format_bytes(limit)}",
            ),
            ("queue", f"{values['queue_ms']} ms"),
            ("verified", str(values["verified"])),
        ]
        for check in reversed(values["verifications"]):
            what = f"task {check['task']} of {check['execution_id'][:12]}"
            end = f"failed: {check['error']}" if check["error"] else "done"
            rows.append(("", f"{what}, {max(0, int(now_s - check['at_s']))} s ago: {end}"))
        labels = [f"{task['label']} ({task['task_id'][:12]})" for task in values["resident"]]
        rows += zip(["tasks"] + [""] * len(labels), labels, strict=False)
        problems = [_describe_problem(problem) for problem in values["not_loaded"]]
        rows += zip(["not loaded"] + [""] * len(problems), problems, strict=False)
        trades = [self._describe_trade(trade, now_s) for trade in reversed(values["trades"])]
        return rows + list(zip(["traded"] + [""] * len(trades), trades, strict=False))

    def _describe_trade(self, trade: dict[str, Any], now_s: float) -> str:
        labels = {task["task_id"]: task["label"] for task in self.values["resident"]}
        wanted = labels.get(trade["wanted"], "one that is not loaded yet")
        return (
            f"{trade['label']} ({trade['given'][:12]}, {trade['operators']} operators) for "
            f"{wanted} ({trade['wanted'][:12]}, {trade['wanted_operators']}), "
            f"{max(0, int(now_s - trade['at_s']))} s ago"
        )

    def _describe_endpoint(self) -> list[tuple[str, str]]:
        values = self.values
        if not values["reach_problem"]:
            return [("endpoint", f"{values['endpoint']}, direct")]
        if values["relay"]:
            how = f"relayed by {values['relay']}"
        elif values["endpoint"]:
            how = f"not reachable: the connection to the relay of {values['endpoint']} is lost"
        else:
            how = "none: no relay has accepted the node yet"
        return [("endpoint", how), ("", f"not direct: {values['reach_problem']}")]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**self.values, "running": self.is_running, "problem": self.problem}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """Return the status that ``to_dict`` gave."""
        values = dict(value)
        return cls(values, bool(values.pop("running")), str(values.pop("problem", "")))


def _describe_problem(problem: dict[str, Any]) -> str:
    when = "tried again later" if problem["is_refused"] else "waiting"
    return f"task {problem['task']} ({problem['task_id'][:12]}), {when}: {problem['reason']}"


def write_status(data_dir: Path, values: dict[str, Any]) -> None:
    """Replace the status file in one step. Raises Unavailable when the disk is full or fails."""
    values = {**values, "updated_at_ms": int(time.time() * 1000)}
    write_file(data_dir / NODE_STATUS_FILE, json.dumps(values).encode(), sync=False)


def read_status(data_dir: Path) -> NodeStatus:
    """Return what the daemon wrote last; one that runs keeps its data directory locked."""
    values: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((data_dir / NODE_STATUS_FILE).read_text())
    if (holder := find_holder(data_dir)) is None:
        return NodeStatus(values, False)
    is_new, age_s = not values, time.time() - values.get("updated_at_ms", 0) / 1000
    values["pid"] = holder  # also when an earlier process has written the rest
    if age_s < _STALE_S:
        return NodeStatus(values, True)
    known = "nothing more is known" if is_new else f"what follows is {age_s:.0f} s old"
    free = shutil.disk_usage(data_dir).free
    problem = (
        f"{known}: the daemon has just started, hangs, or cannot write to the disk of {data_dir}, "
        f"which has {format_bytes(free)} free"
    )
    return NodeStatus(values, True, problem)
