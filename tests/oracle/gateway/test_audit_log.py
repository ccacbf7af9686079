from __future__ import annotations

import json
from pathlib import Path

import pytest
from splitup_oracle.gateway.audit_log import AuditLog

from splitup.core.errors import Unavailable


def read(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_the_log_is_bounded_and_keeps_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, max_bytes=100, files=3)
    for number in range(30):
        log.append({"number": number, "fill": "x" * 20})
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(file.stat().st_size <= 100 for file in files)
    numbers = [number for file in reversed(files) for number in read(file)]
    assert numbers == list(range(30 - len(numbers), 30))
    again = AuditLog(path, max_bytes=100, files=3)
    again.append({"number": 30})
    again.close()
    assert read(path)[-1] == 30


def test_a12_the_log_is_its_owners_alone(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "data" / "audit.jsonl")
    log.close()
    assert (tmp_path / "data" / "audit.jsonl").stat().st_mode & 0o077 == 0


def test_f23_nothing_is_granted_that_cannot_be_written_down() -> None:
    log = AuditLog(Path("/dev/full"))
    with pytest.raises(Unavailable, match="audit log"):
        log.append({"number": 1})
    log.close()
