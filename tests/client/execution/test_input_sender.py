from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from splitup.client.execution.input_sender import InputSender
from splitup.messages.base import CLIENT
from splitup.messages.frames import Frame, decode_frames
from splitup.protocol.execution.takeovers import ExecutorMap
from tests.builders import HANG_S
from tests.node.execution.kept.test_claims import make_node
from tests.node.network import Store, make_certificate, make_manifest
from tests.protocol.committees import make_identity


class FakeLink:
    """Keeps the frames that are sent."""

    queued_bytes = 0

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send(self, sealed: bytes) -> None:
        self.frames += decode_frames(sealed)[1]


async def test_s62_who_takes_over_gets_the_last_input_although_it_is_stored() -> None:
    """It runs nothing that we have not signed for, and what is stored bears no name."""
    identity, old, new = make_identity(1), make_node(2), make_node(3)
    manifest, _ = make_manifest(4, tasks=2)
    certificate = make_certificate(
        manifest, [old, old], identity.signing_key_hex, steps=4, fallbacks=[new]
    )
    links: dict[str, Any] = {old.node: FakeLink(), new.node: FakeLink()}

    def start(work: Coroutine[Any, Any, None]) -> None:
        work.close()

    sender = InputSender(
        identity,
        certificate.plan.request,
        manifest,
        Store().open(certificate, manifest, ExecutorMap(certificate.plan)),
        links,
        certificate.plan.executors(),
        direct_bytes=0,
        start=start,
        on_failure=lambda reason: None,
        on_stored=lambda: None,
    )
    sender.open()
    for step in range(2):
        sender.submit(step, [bytes([step]) * 16])
    async with asyncio.timeout(HANG_S):
        await sender.store()
    sender.resend_unstored(0, new.node)
    (frame,) = links[new.node].frames
    assert (frame.task, frame.port, frame.step) == (CLIENT, 0, 1)
    await sender.close()
