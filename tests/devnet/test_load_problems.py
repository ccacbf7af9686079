"""Why tasks do not load on a devnet's nodes, as ``splitup up`` and ``splitup demo`` tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitup.config import NODE_STATUS_FILE
from splitup.core.errors import Unavailable
from splitup.demo.run import _check_refusals
from splitup.devnet.network import Devnet, DevnetOptions

TASKS = ("a" * 64, "b" * 64)


def write_status(directory: Path, node: int, task_id: str, reason: str, refused: bool) -> None:
    folder = directory / f"node-{node}"
    folder.mkdir(exist_ok=True)
    problem = {"task_id": task_id, "task": 0, "reason": reason, "is_refused": refused}
    (folder / NODE_STATUS_FILE).write_text(json.dumps({"not_loaded": [problem]}))


def test_up_says_every_reason_once(tmp_path: Path) -> None:
    said: list[str] = []
    net = Devnet(DevnetOptions(tmp_path), said.append)
    (tmp_path / "node-7").mkdir()  # has written nothing yet
    write_status(tmp_path, 0, TASKS[0], "no float64", True)
    write_status(tmp_path, 1, TASKS[0], "no float64", True)
    write_status(tmp_path, 2, TASKS[1], "the store does not answer", False)  # tried again soon
    for _ in range(2):
        net.report_load_problems()
    assert said == [f"2 nodes do not load task {TASKS[0][:12]}: no float64"]


def test_the_demo_ends_when_too_few_nodes_are_left_for_a_task(tmp_path: Path) -> None:
    write_status(tmp_path, 0, TASKS[1], "no float64", True)
    _check_refusals(tmp_path, TASKS, 4)
    write_status(tmp_path, 1, TASKS[1], "no float64", True)
    with pytest.raises(Unavailable, match="2 of 4 nodes do not load task 1: no float64"):
        _check_refusals(tmp_path, TASKS, 4)
    _check_refusals(tmp_path, TASKS[:1], 4)  # a task of another model
