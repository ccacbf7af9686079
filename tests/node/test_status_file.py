"""What ``splitup-node status`` says of a running daemon."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from splitup_node.status_file import NodeStatus, read_status, write_status

from splitup.config import NODE_STATUS_FILE
from splitup.storage.journal import Journal

VALUES: dict[str, Any] = {
    "pid": 7,
    "endpoint": "http://n:1",
    "relay": "",
    "reach_problem": "",
    "device": {"reason": "a CPU", "sandbox": ""},
    "vram_used_bytes": 10**9,
    "vram_bytes": 2 * 10**9,
    "sessions": 2,
    "state_bytes": 5 * 10**6,
    "state_limit_bytes": 10**9,
    "queue_ms": 3,
    "verified": 9,
    "not_loaded": [],
    "verifications": [
        {"execution_id": "0x" + "ab" * 32, "task": 1, "at_s": 100, "error": ""},
        {"execution_id": "0x" + "cd" * 32, "task": 2, "at_s": 160, "error": "no log"},
    ],
    "trades": [
        {
            "given": "d" * 64,
            "label": "neck",
            "operators": 6,
            "wanted": "e" * 64,
            "wanted_operators": 1,
            "at_s": 110,
        }
    ],
    "resident": [{"label": "head", "task_id": "f" * 64}, {"label": "tail", "task_id": "e" * 64}],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "http://n:1, direct"),
        ({"relay": "http://m:2", "reach_problem": "no route"}, "relayed by http://m:2"),
        (
            {"reach_problem": "no route"},
            "not reachable: the connection to the relay of http://n:1 is lost",
        ),
        (
            {"endpoint": "", "reach_problem": "no route"},
            "none: no relay has accepted the node yet",
        ),
    ],
)
def test_endpoint_is_said_to_be_direct_relayed_or_gone(changes: dict[str, str], words: str) -> None:
    rows = NodeStatus({**VALUES, **changes}, True).list_rows(0.0)
    assert rows[0] == ("endpoint", words)
    assert (("", "not direct: no route") == rows[1]) == ("reach_problem" in changes)


def test_rows_show_sessions_memory_and_the_latest_verifications() -> None:
    rows = NodeStatus(VALUES, True).list_rows(170.0)
    assert rows[3:] == [
        ("memory", "1 GB of 2 GB"),
        ("sessions", "2 with 5 MB of 1 GB"),
        ("queue", "3 ms"),
        ("verified", "9"),
        ("", "task 2 of 0xcdcdcdcdcd, 10 s ago: failed: no log"),
        ("", "task 1 of 0xababababab, 70 s ago: done"),
        ("tasks", "head (ffffffffffff)"),
        ("", "tail (eeeeeeeeeeee)"),
        ("traded", "neck (dddddddddddd, 6 operators) for tail (eeeeeeeeeeee, 1), 60 s ago"),
    ]


@pytest.mark.parametrize(("lacks", "words"), [("", "complete"), ("no Landlock", "no Landlock")])
def test_s10_what_the_sandbox_lacks_is_said(lacks: str, words: str) -> None:
    device = {"reason": "a CPU", "sandbox": lacks}
    assert ("sandbox", words) in NodeStatus({**VALUES, "device": device}, True).list_rows(0.0)


def test_a_task_that_does_not_load_is_shown_with_the_reason() -> None:
    problem = {"model_id": "0x11", "task": 4, "task_id": "c" * 64, "reason": "no float64 here"}
    problems = [{**problem, "is_refused": True}, {**problem, "is_refused": False}]
    rows = NodeStatus({**VALUES, "not_loaded": problems}, True).list_rows(0.0)
    assert ("not loaded", "task 4 (cccccccccccc), tried again later: no float64 here") in rows
    assert ("", "task 4 (cccccccccccc), waiting: no float64 here") in rows


def test_a_daemon_that_cannot_write_its_status_is_not_said_to_have_stopped(tmp_path: Path) -> None:
    write_status(tmp_path, {"running": True, "pid": 7})
    file = tmp_path / NODE_STATUS_FILE
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"updated_at_ms": values["updated_at_ms"] - 60_000}))
    assert not read_status(tmp_path).is_running, "nobody has the journal open: it was killed"
    with contextlib.closing(Journal.open(tmp_path)):
        found = read_status(tmp_path)
        running = f"running as process {os.getpid()}"  # 7 is gone
        assert found.is_running and found.describe(tmp_path) == running
        assert "60 s old" in found.problem and "free" in found.problem
        assert NodeStatus.from_dict(found.to_dict()).problem == found.problem
        write_status(tmp_path, {"running": False, "pid": 7})  # then the disk was full
        assert read_status(tmp_path).describe(tmp_path) == running
        file.unlink()
        found = read_status(tmp_path)
        assert found.describe(tmp_path) == running and "nothing more is known" in found.problem
        assert found.list_rows(0.0) == []
    assert not read_status(tmp_path).is_running
