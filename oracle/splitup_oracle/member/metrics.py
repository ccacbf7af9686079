"""What Prometheus reads of a committee member: the figures of its status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from splitup.net.metrics import Reading


def list_readings(status: Mapping[str, Any]) -> Iterator[Reading]:
    """Yield the figures of a member's status (``Member.get_status``)."""
    for name, text, value in (
        ("configuration", "Number of the committee's configuration.", status["configuration"]),
        ("epoch", "Term of the leader of the snapshot protocol.", status["epoch"]),
        ("snapshot_sequence", "Number of the latest snapshot on chain.", status["sequence"]),
        ("block", "Latest block that the member has seen.", status["block"]),
        ("nodes_registered", "Nodes in the registry.", status["nodes_registered"]),
        ("nodes_live", "Nodes that this member observes alive.", status["nodes_live"]),
        ("executions_open", "Executions that are not settled.", status["executions_open"]),
        ("peers_down", "Other members that do not answer.", len(status["peers_down"])),
        ("has_group_key", "1 when the committee has its key.", bool(status["group_key"])),
        ("chain_requests_total", "Requests to the chain's endpoint.", status["chain_requests"]),
    ):
        yield Reading(f"splitup_member_{name}", text, value)
