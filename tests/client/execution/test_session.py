from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from splitup.client.execution.session import Session
from splitup.core import tuning
from splitup.core.errors import ExecutionFailed, InvalidInput
from splitup.core.tensors import StepsDigest
from splitup.messages import api
from splitup.messages.completions import End, SignedEnd
from splitup.messages.frames import Frame, FrameKind, decode_frames, read_delivery
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Span, TaskFailure, Trace
from splitup.messages.storage import Grants
from splitup.net.http import SignedClient
from splitup.net.http_server import make_app, serve_app
from splitup.net.links import Link, LinkAcceptor
from splitup.net.signed_frames import (
    make_message_frame,
    seal_frame,
    verify_seal,
)
from splitup.protocol.execution.ends import check_end
from splitup.storage.gateway_client import GatewayClient
from tests.builders import HANG_S, anybody, make_tensor_frame
from tests.client.parties import Parties, make_parties

Answer = Callable[["FakeNode", Link, Frame], None]


class FakeNode:
    """Accepts the client's link for a model of one task and answers frames as the test says."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.parties: Parties
        self.acceptor: LinkAcceptor
        self.ended_with: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def on_frame(self, link: Link, data: bytes) -> None:
        [frame] = decode_frames(data)[1]
        if frame.kind is FrameKind.END:
            signed = SignedEnd.parse(bytes(frame.payload))
            check_end(signed, self.parties.plan)
            self.ended_with.set_result(signed.end)
            node = self.parties.nodes[0]
            trace = Trace(execution_id=frame.execution_id, node=node.address, spans=())
            self.send(link, make_message_frame(FrameKind.TRACE, frame.execution_id, 0, 0, trace))
        else:
            self.answer(self, link, frame)

    def send(self, link: Link, frame: Frame) -> None:
        link.send(seal_frame(self.parties.nodes[0], frame))

    def double(self, link: Link, frame: Frame) -> None:
        """Answer x with 2 x."""
        (value,) = struct.unpack("<f", frame.payload)
        data, before = struct.pack("<f", 2 * value), StepsDigest()
        for earlier in range(frame.step):  # the tests send 1, 2, 3, ...
            before.add_tensor(struct.pack("<f", 2 * (earlier + 1)))
        answer = make_tensor_frame(frame.execution_id, 0, 0, frame.step, data, before=before.value)
        self.send(link, answer)


class NoGrants(GatewayClient):
    async def execution_grants(self, certificate: PlanCertificate) -> Grants:
        return Grants(grants=())


@asynccontextmanager
async def open_session(
    answer: Answer, *, steps: int = 4
) -> AsyncIterator[tuple[Session, FakeNode]]:
    node = FakeNode(answer)
    app = make_app()

    async def handle(request: web.Request) -> web.StreamResponse:
        return await node.acceptor.handle(request)

    async def take_plan(request: web.Request) -> web.Response:
        return web.json_response({})

    app.router.add_get(api.DATA.path, handle)
    app.router.add_post(api.PLAN_CERTIFICATE.path, take_plan)
    server = await serve_app(app, "127.0.0.1", 0)
    node.parties = make_parties(1, steps=steps, endpoint=server.url)
    node.acceptor = LinkAcceptor(node.parties.nodes[0].address, node.on_frame, may_open=anybody)
    certificate = PlanCertificate(plan=node.parties.plan, seed_signature="0x", signatures=())
    async with SignedClient(node.parties.client) as http:
        session = Session(
            certificate,
            node.parties.manifest,
            node.parties.client,
            http,
            NoGrants("http://127.0.0.1:1", None, http=http),
            deadline=asyncio.get_running_loop().time() + HANG_S,
            allow_loopback=True,
        )
        session.open()
        try:
            yield session, node
        finally:
            await session.close()
            await node.acceptor.close()
            await server.close()


def x(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.array([value], np.float32)}


async def test_s39_a_node_that_reports_times_for_ever_takes_no_memory() -> None:
    def answer(node: FakeNode, link: Link, frame: Frame) -> None:
        times = dict.fromkeys(("received_ns", "started_ns", "ended_ns", "sent_ns"), "1")
        address, execution_id = node.parties.nodes[0].address, frame.execution_id
        for spans in ((Span(task=0, step=0, **times),), ()) * 50:
            trace = Trace(execution_id=execution_id, node=address, spans=spans)
            node.send(link, make_message_frame(FrameKind.TRACE, execution_id, 0, 1, trace))
        node.double(link, frame)

    async with open_session(answer, steps=4) as (session, _):
        await session.step(x(1))
        assert len(await session.finish()) == 4, "one for each step"


async def test_steps_in_flight_come_back_each_to_its_own_future() -> None:
    held: list[tuple[Link, Frame]] = []

    def answer(node: FakeNode, link: Link, frame: Frame) -> None:
        held.append((link, frame))
        if len(held) == 3:
            for late in reversed(held):
                node.double(*late)

    async with open_session(answer) as (session, node):
        futures = [session.submit(x(value)) for value in (1, 2, 3)]
        outputs = [(await future)["y"].tolist() for future in futures]
        assert outputs == [[2.0], [4.0], [6.0]]
        await session.finish()
        end = await node.ended_with
    sent, received = StepsDigest(), StepsDigest()
    for value in (1, 2, 3):
        sent.add_tensor(struct.pack("<f", value))
        received.add_tensor(struct.pack("<f", 2 * value))
    assert (end.steps, end.inputs) == (3, (sent.hexdigest(),)), "what every reader's has to be"
    (delivery,) = map(read_delivery, end.outputs)
    assert delivery is not None and (delivery.step, delivery.total) == (2, received.value)
    verify_seal(delivery.seal, node.parties.nodes[0].signing_key_hex)


async def test_who_ends_before_all_is_sent_vouches_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_session(FakeNode.double) as (session, node):
        await session.step(x(1))
        with monkeypatch.context() as patch:
            patch.setattr(tuning, "LINK_QUEUE_BYTES", 0)  # it has to wait for its reader
            session.submit(x(2))
        session.end()  # nothing of the second step has left
        end = await node.ended_with
    assert (end.steps, end.inputs) == (2, ())


async def test_a_failed_task_fails_every_step_with_its_reason() -> None:
    def answer(node: FakeNode, link: Link, frame: Frame) -> None:
        address = node.parties.nodes[0].address
        failure = TaskFailure(task=0, step=frame.step, node=address, reason="no memory left")
        node.send(link, make_message_frame(FrameKind.ERROR, frame.execution_id, 0, 0, failure))

    async with open_session(answer) as (session, node):
        with pytest.raises(
            ExecutionFailed, match=r"task 0 \(task 0\) on node .*no memory"
        ) as caught:
            await session.step(x(1))
        assert (caught.value.task, caught.value.node) == ("task 0", node.parties.nodes[0].address)
        with pytest.raises(ExecutionFailed):
            session.submit(x(2))
        with pytest.raises(ExecutionFailed):
            await session.finish()


async def test_an_incomplete_result_is_never_a_success() -> None:
    def answer(node: FakeNode, link: Link, frame: Frame) -> None:
        if frame.step == 0:
            node.double(link, frame)

    async with open_session(answer) as (session, _):
        first, second = session.submit(x(1)), session.submit(x(2))
        assert (await first)["y"].tolist() == [2.0]
        session._on_deadline()  # now, however long the first took
        with pytest.raises(ExecutionFailed, match="1 of 2 submitted steps undelivered"):
            await session.finish()
        assert second.exception() is not None


async def test_forged_output_ends_the_execution() -> None:
    def answer(node: FakeNode, link: Link, frame: Frame) -> None:
        forged = make_tensor_frame(frame.execution_id, 0, 0, frame.step, struct.pack("<f", 1))
        link.send(seal_frame(node.parties.client, forged))

    async with open_session(answer) as (session, node):
        with pytest.raises(ExecutionFailed, match="task 0") as caught:
            await session.step(x(1))
        assert caught.value.node == node.parties.nodes[0].address


async def test_wrong_inputs_and_too_many_steps_are_refused_at_once() -> None:
    async with open_session(FakeNode.double, steps=1) as (session, _):
        with pytest.raises(InvalidInput, match="dtype"):
            session.submit({"x": np.zeros(1, np.float64)})
        assert session.steps == 0
        await session.step(x(1))
        with pytest.raises(InvalidInput, match="paid for 1 steps"):
            session.submit(x(2))
        await session.finish()
        with pytest.raises(InvalidInput, match="has ended"):
            session.submit(x(3))
