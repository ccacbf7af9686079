"""What a client's messages cost a node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from splitup_node.execution.inbox import Inbox
from splitup_node.execution.kept.executions import AnswerPause

from splitup.core import tuning
from tests.builders import HANG_S
from tests.protocol.simulator import CLIENT_IDENTITY


async def test_s83_probes_in_quick_succession_get_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer about 1,024 tasks takes tens of milliseconds, and a probe has 200 bytes."""
    answers: list[bytes] = []
    looks: list[Any] = []
    again = asyncio.Event()

    def send(_: Any, sealed: bytes, *, keep: bool) -> None:
        answers.append(sealed)
        if len(answers) == 2:
            again.set()

    clients = SimpleNamespace(send=send)
    queue = SimpleNamespace(get_progress=lambda _: {})
    table = SimpleNamespace(clients=clients, queue=queue)
    nothing: Any = None
    inbox = Inbox(CLIENT_IDENTITY, table, nothing, nothing, nothing, nothing, looks.append)  # type: ignore[arg-type]
    execution: Any = SimpleNamespace(
        id="0x" + "ee" * 32,
        node="0x" + "11" * 20,
        parts={},
        life=SimpleNamespace(is_over=False),
        answer_pause=AnswerPause(),
    )
    monkeypatch.setattr(tuning, "PROBE_PAUSES", 1000.0)  # longer than this test's loop takes
    for _ in range(100):
        inbox._answer_probe(execution)
    assert len(answers) == len(looks) == 1
    assert execution.answer_pause.is_asked
    async with asyncio.timeout(HANG_S):
        await again.wait()
    assert len(answers) == len(looks) == 2, "who asked again gets an answer, too"
