"""A session of a model with tasks of the client, against a node that remembers what it gets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from splitup_deploy.cutting.build import CompiledModel, build, parse_size
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.uncut_model import load_reference

from splitup.client.private.private_session import PrivateSession
from splitup.client.private.private_tasks import ClientPrograms
from splitup.core.errors import ExecutionFailed, InvalidInput
from splitup.core.tensors import StepsDigest, array_to_bytes
from splitup.decode.step import make_arrays, make_causal_step
from splitup.messages import api
from splitup.messages.base import CLIENT
from splitup.messages.frames import Frame, FrameKind, decode_frames
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Trace
from splitup.net.http import SignedClient
from splitup.net.http_server import make_app, serve_app
from splitup.net.links import Link, LinkAcceptor
from splitup.net.signed_frames import make_message_frame, seal_frame
from tests.builders import anybody, make_tensor_frame
from tests.client.execution.test_session import NoGrants
from tests.client.parties import Parties, make_parties
from tests.deploy.cutting.test_private import write_client_files
from tests.deploy.execution import CutModel
from tests.deploy.llamas import EXAMPLE

SIZES = Sizes(chunk=8)


@pytest.fixture(scope="module")
def compiled() -> CompiledModel:
    return build(str(EXAMPLE), parse_size("2.5MB"), sizes=SIZES, private=1)


@pytest.fixture(scope="module")
def cut(compiled: CompiledModel) -> CutModel:
    return CutModel(compiled)


@pytest.fixture(scope="module")
def programs(
    compiled: CompiledModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClientPrograms]:
    files = write_client_files(compiled, tmp_path_factory.mktemp("client"))
    with closing(asyncio.run(ClientPrograms.load(compiled.manifest, files))) as programs:
        yield programs


class WholeNode:
    """Runs all tasks of the nodes, step by step, and keeps every byte that came to it."""

    def __init__(self, model: CutModel, parties: Parties) -> None:
        self.model, self.parties = model, parties
        self.states = self.model.new_states()
        self.seen: list[bytes] = []
        self.payloads: list[bytes] = []
        self.waiting: dict[int, dict[str, bytes]] = {}
        self.acceptor = LinkAcceptor(parties.nodes[0].address, self.on_frame, may_open=anybody)
        self.ends: list[int] = []
        self.sent: dict[tuple[int, int], StepsDigest] = {}

    def on_frame(self, link: Link, data: bytes) -> None:
        self.seen.append(data)
        for frame in decode_frames(data)[1]:
            self.take(link, frame)

    def take(self, link: Link, frame: Frame) -> None:
        if frame.kind is FrameKind.END:
            self.ends.append(frame.step)
            node = self.parties.nodes[0]
            trace = Trace(execution_id=frame.execution_id, node=node.address, spans=())
            answer = make_message_frame(FrameKind.TRACE, frame.execution_id, 0, 0, trace)
            link.send(seal_frame(node, answer))
        if frame.kind is not FrameKind.TENSOR:
            return
        assert frame.task == CLIENT
        self.payloads.append(bytes(frame.payload))
        inputs = self.waiting.setdefault(frame.step, {})
        inputs[self.model.inputs[frame.port].name] = self.payloads[-1]
        if len(inputs) == len(self.model.inputs):
            results = self.model.step(self.states, inputs)
            for port in self.model.manifest.outputs:
                before = self.sent.setdefault((port.task, port.port), StepsDigest())
                answer = make_tensor_frame(
                    frame.execution_id,
                    port.task,
                    port.port,
                    frame.step,
                    results[port.name],
                    before=before.value,
                )
                before.add_tensor(results[port.name])
                link.send(seal_frame(self.parties.nodes[0], answer))


@asynccontextmanager
async def open_session(
    cut: CutModel, programs: ClientPrograms, *, steps: int = 4
) -> AsyncIterator[tuple[PrivateSession, WholeNode]]:
    app = make_app()

    async def take_plan(request: web.Request) -> web.Response:
        return web.json_response({})

    async def handle(request: web.Request) -> web.StreamResponse:
        return await node.acceptor.handle(request)

    app.router.add_get(api.DATA.path, handle)
    app.router.add_post(api.PLAN_CERTIFICATE.path, take_plan)
    server = await serve_app(app, "127.0.0.1", 0)
    parties = make_parties(1, steps=steps, endpoint=server.url)
    tasks = parties.plan.tasks * len(cut.manifest.tasks)
    parties = dataclasses.replace(
        parties,
        manifest=cut.manifest,
        plan=parties.plan.model_copy(update={"tasks": tasks}),
    )
    node = WholeNode(cut, parties)
    certificate = PlanCertificate(plan=parties.plan, seed_signature="0x", signatures=())
    async with SignedClient(parties.client) as http:
        session = PrivateSession(
            certificate,
            cut.manifest,
            parties.client,
            http,
            NoGrants("http://127.0.0.1:1", None, http=http),
            deadline=asyncio.get_running_loop().time() + 60,
            allow_loopback=True,
            programs=programs,
        )
        session.open()
        try:
            yield session, node
        finally:
            await session.close()
            await node.acceptor.close()
            await server.close()


def make_step(tokens: list[int], start: int) -> dict[str, np.ndarray[Any, Any]]:
    return make_arrays(make_causal_step(tokens, start), 8)


async def test_nodes_see_neither_tokens_nor_logits(cut: CutModel, programs: ClientPrograms) -> None:
    tokens = [1234, 77, 1999, 58, 641, 1002, 333]
    steps = [make_step(tokens[:5], 0), make_step(tokens[5:6], 5), make_step(tokens[6:], 6)]
    async with open_session(cut, programs) as (session, node):
        futures = [session.submit(step) for step in steps]  # all at once: a pipeline
        given = [(await future)["logits"] for future in futures]
        await session.finish()
        seen = b"".join(node.seen)
        assert node.ends == [3] == [session.steps]
    whole = load_reference(str(EXAMPLE), SIZES)
    state = whole.new_state()
    for step, logits in zip(steps, given, strict=True):
        inputs = [array_to_bytes(spec, step[spec.name]) for spec in whole.inputs]
        (wanted,) = whole.run(state, inputs)
        assert logits.tobytes() == wanted
        assert wanted not in seen and wanted[:64] not in seen
    for token in tokens:  # keys and digests of a frame are random: any four bytes may be there
        assert all(np.int32(token).tobytes() not in payload for payload in node.payloads)


async def test_bad_inputs_and_too_many_steps_are_refused_at_once(
    cut: CutModel, programs: ClientPrograms
) -> None:
    async with open_session(cut, programs, steps=1) as (session, _):
        step = make_step([5], 0)
        with pytest.raises(InvalidInput, match="input 'tokens' is missing"):
            session.submit({"layout": step["layout"], "outputs": step["outputs"]})
        with pytest.raises(InvalidInput, match="no input 'block-0-mlp-output'"):
            session.submit({**step, "block-0-mlp-output": np.zeros((1, 256), np.float32)})
        assert (await session.step(step))["logits"].shape == (1, 2048)
        with pytest.raises(InvalidInput, match="paid for 1 steps"):
            session.submit(make_step([6], 1))


async def test_closing_fails_what_is_awaited(cut: CutModel, programs: ClientPrograms) -> None:
    async with open_session(cut, programs) as (session, _):
        future = session.submit(make_step([5], 0))
    with pytest.raises(ExecutionFailed, match="closed"):
        await future


async def test_what_fails_here_fails_the_execution(cut: CutModel, programs: ClientPrograms) -> None:
    """The last test: it ends the process that all of them use."""
    async with open_session(cut, programs) as (session, _):
        await session.step(make_step([5, 6], 0))
        session._run._programs.close()
        step, behind = session.submit(make_step([7], 2)), session.submit(make_step([8], 3))
        for future in (step, behind):
            with pytest.raises(ExecutionFailed, match=r"runs on the client failed.*ended"):
                await future
        with pytest.raises(ExecutionFailed, match="ended"):
            session.submit(make_step([8], 3))
