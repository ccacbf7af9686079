"""What Prometheus reads of a node: the figures of its status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from splitup.net.metrics import Reading


def list_readings(status: Mapping[str, Any]) -> Iterator[Reading]:
    """Yield the figures of a node's status (``Node.get_status``)."""

    def read(name: str, text: str, value: float) -> Reading:
        return Reading(f"splitup_node_{name}", text, value)

    yield read("memory_limit_bytes", "Device memory that tasks may fill.", status["vram_bytes"])
    yield read("memory_used_bytes", "Device memory that tasks fill.", status["vram_used_bytes"])
    yield read("state_limit_bytes", "Memory for states of executions.", status["state_limit_bytes"])
    yield read("state_bytes", "Memory that states of executions fill.", status["state_bytes"])
    yield read("tasks_loaded", "Tasks in memory.", len(status["resident"]))
    yield read("executions", "Executions under way.", status["executions"])
    yield read("queue_seconds", "Estimated work that waits.", status["queue_ms"] / 1e3)
    yield read("runs_total", "Task runs for executions.", status["work"]["runs"])
    yield read(
        "compute_seconds_total",
        "Time that the device computed for executions.",
        status["work"]["compute_us"] / 1e6,
    )
    yield read("verifications_total", "Tasks of others recomputed.", status["verified"])
    yield read("worker_restarts_total", "Workers that were lost.", status["worker_restarts"])
    yield read("warnings", "Things that are wrong now.", len(status["warnings"]))
    direct = not status["reach_problem"]
    yield read("reachable_directly", "1 when peers connect without a relay.", direct)
