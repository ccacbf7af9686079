"""Draft and target workers over real gRPC: equal tokens, whatever happens to them on the way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from splitup_speculation import remote, rpc
from splitup_speculation import speculation_pb2 as pb
from splitup_speculation.remote import CallOptions, WorkerGroup
from splitup_speculation.rpc import Tls
from splitup_speculation.servers import (
    MAX_NODES,
    DraftWorker,
    OrderedModel,
    TargetWorker,
    WorkerModel,
)
from splitup_speculation.sessions import SessionLimits, WorkerSessions
from splitup_speculation.trees import (
    TreeSampling,
    compute_digest,
    find_path,
    read_tree,
    write_sampling,
)

from bench.testbed.models import DRAFT, load_draft
from splitup.client.telemetry import CallSpan
from splitup.client.text.drafting import LocalModel
from splitup.client.text.generation import TextModel
from splitup.client.text.grammar import Grammars
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import InvalidInput, Refused, Throttled, Unavailable
from splitup.core.places import Places
from splitup.decode.adjusted_sampler import AdjustedSampler, Adjustments
from splitup.decode.sampler import Sampler, TokenChooser
from splitup.decode.sequential import SequentialDecoder
from splitup.decode.speculation.rates import Pace
from splitup.demo.models import find_example
from tests.builders import HANG_S

CHUNK, TOKENS = 16, 32
PROMPT = (0, 500, 700, 12, 90, 1200, 33, 4, 8, 15, 16, 23, 42, 108, 77, 5, 61, 18, 300)  # 2 steps
PLAIN, LIMITS = Tls(), SessionLimits()
SAMPLERS = (Sampler(), Sampler(0.8, 3))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalModel]:
    manifest, programs = await load_draft(tmp_path_factory.mktemp("draft") / "cut", CHUNK)
    assert manifest.text is not None
    yield LocalModel(DRAFT, manifest, manifest.text, programs)
    programs.close()


@pytest.fixture(scope="module")
def model(local: LocalModel) -> Iterator[TextModel]:
    data = (find_example().with_name(DRAFT) / "tokenizer.json").read_bytes()
    tokenizer = ModelTokenizer(data, DRAFT)
    grammars = Grammars(data, DRAFT, local.info.vocab, local.info.eos_ids)
    yield TextModel(DRAFT, local._manifest, local.info, tokenizer, grammars, CHUNK)
    tokenizer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted(local: LocalModel, model: TextModel) -> list[list[int]]:
    """What the sequential decoder generates, for each of the samplers."""
    return [await write_text(local, model, sampler) for sampler in SAMPLERS]


async def write_text(local: LocalModel, model: TextModel, sampler: TokenChooser) -> list[int]:
    text, found, number = local.open_text(), [], 0
    request = model.make_request(PROMPT, max_tokens=TOKENS, sampler=sampler)
    decoder = SequentialDecoder(request)
    while not decoder.finished:
        step = decoder.next_step()
        assert step is not None
        found += decoder.receive_logits(number, await text.compute(step))
        number += 1
    await text.end()
    return found


class Workers:
    """Draft and target workers of one test, each at an address of its own."""

    def __init__(self, local: LocalModel, stack: contextlib.AsyncExitStack) -> None:
        self.served = WorkerModel(
            "0x00", local.info, CHUNK, lambda: OrderedModel(local.open_text())
        )
        self.stack = stack
        self.servers: dict[str, Any] = {}  # by address
        self.running: dict[str, Any] = {}

    async def start(self, kind: Any, tls: Tls = PLAIN, limits: Any = LIMITS) -> str:
        worker = kind(self.served, limits)
        self.stack.push_async_callback(worker.close)
        server, address = await rpc.start_server(
            worker.service, worker.handlers, "127.0.0.1", 0, tls
        )
        self.stack.push_async_callback(server.stop, None)
        self.servers[address], self.running[address] = server, worker
        return address

    def connect(self, kind: Any, *addresses: str, tls: Tls = PLAIN) -> WorkerGroup:
        group = WorkerGroup(kind.service, addresses, tls)
        self.stack.push_async_callback(group.close)
        return group


@pytest_asyncio.fixture(loop_scope="module")
async def workers(local: LocalModel) -> AsyncIterator[Workers]:
    async with contextlib.AsyncExitStack() as stack:
        yield Workers(local, stack)


async def generate(
    target: WorkerGroup, drafts: WorkerGroup | None, model: TextModel, sampler: Sampler, **more: Any
) -> list[int]:
    text = remote.generate(
        target, drafts, model, PROMPT, max_tokens=TOKENS, sampler=sampler, **more
    )
    async with asyncio.timeout(HANG_S):
        return [token.id async for token in text]


async def test_texts_are_the_sequential_ones(
    workers: Workers, model: TextModel, wanted: list[list[int]]
) -> None:
    target = workers.connect(TargetWorker, await workers.start(TargetWorker))
    drafts = workers.connect(DraftWorker, await workers.start(DraftWorker))
    spans: list[CallSpan] = []
    options = CallOptions(on_span=spans.append)
    for sampler, tokens in zip(SAMPLERS, wanted, strict=True):
        assert await generate(target, drafts, model, sampler, options=options) == tokens
        assert await generate(target, None, model, sampler) == tokens
    assert not [span.error for span in spans if span.error]
    verified = [span for span in spans if span.name == "TargetService/VerifyDrafts"]
    assert 4 <= len(verified) < len(SAMPLERS) * TOKENS, "drafts have saved calls"
    assert any(span.name == "DraftService/GenerateDrafts" for span in spans)
    assert all(0 < span.model_ns <= span.worker_ns <= span.wall_ns for span in verified)
    at_once = [generate(target, drafts, model, SAMPLERS[i % 2]) for i in range(4)]
    assert await asyncio.gather(*at_once) == [wanted[i % 2] for i in range(4)]


async def test_penalties_are_applied_by_both_workers(
    workers: Workers, local: LocalModel, model: TextModel, wanted: list[list[int]]
) -> None:
    target = workers.connect(TargetWorker, await workers.start(TargetWorker))
    drafts = workers.connect(DraftWorker, await workers.start(DraftWorker))
    penalties = Adjustments(frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.3)
    for sampler, plain in zip(SAMPLERS, wanted, strict=True):
        chooser = AdjustedSampler(sampler, penalties, model.info.vocab, prompt=PROMPT)
        expected = await write_text(local, model, chooser)
        found = await generate(target, drafts, model, sampler, adjustments=penalties)
        assert found == expected != plain
        sampling = write_sampling(TreeSampling(sampler, penalties, len(PROMPT)))
        asked = [*PROMPT, *expected[:20]]
        request = draft(
            prefix=pb.Prefix(session_id=f"{sampler.seed}"), tokens=asked, sampling=sampling
        )
        answer = await drafts.call("GenerateDrafts", request, CallOptions(), timeout_s=HANG_S)
        tree = read_tree(answer.drafts, vocabulary=model.info.vocab, most=4)
        assert find_path(tree, expected[20:]) == 2, "the same model drafts under the same penalties"
    with pytest.raises(InvalidInput, match="neither token biases nor logprobs"):
        await generate(target, None, model, SAMPLERS[0], adjustments=Adjustments(bias=((3, 1.0),)))


async def test_workers_that_die_are_replaced_or_done_without(
    workers: Workers,
    model: TextModel,
    wanted: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pace, "learn", lambda *_: None)  # drafts are asked for, however slow
    targets = [await workers.start(TargetWorker) for _ in range(2)]
    drafting = [await workers.start(DraftWorker) for _ in range(2)]
    target = workers.connect(TargetWorker, *targets)
    drafts = workers.connect(DraftWorker, *drafting)
    text = remote.generate(target, drafts, model, PROMPT, max_tokens=TOKENS, sampler=SAMPLERS[1])
    found: list[int] = []
    async for token in text:
        found.append(token.id)
        if len(found) == 3:
            await workers.servers[targets[0]].stop(None)
        if len(found) == 8:
            for address in drafting:
                await workers.servers[address].stop(None)
    assert found == wanted[1]
    assert target.address == targets[1]
    assert "no draft worker is left" in caplog.text
    await workers.servers[targets[1]].stop(None)
    with pytest.raises(Unavailable, match="no target worker"):
        await generate(target, None, model, SAMPLERS[0])
    with pytest.raises(Unavailable, match="no worker of TargetService answers"):
        await target.ping()


async def test_a_session_that_is_lost_is_made_again(
    workers: Workers, model: TextModel, wanted: list[list[int]]
) -> None:
    """Every step of one text evicts the other one's session, and every draft, too."""
    one = SessionLimits(most=1)
    target = workers.connect(TargetWorker, await workers.start(TargetWorker, limits=one))
    drafts = workers.connect(DraftWorker, await workers.start(DraftWorker, limits=one))
    spans: list[CallSpan] = []
    options = CallOptions(on_span=spans.append)
    texts = [
        remote.generate(
            target, drafts, model, PROMPT, max_tokens=12, sampler=sampler, options=options
        )
        for sampler in SAMPLERS
    ]
    found: list[list[int]] = [[], []]
    for _ in range(12):  # in turn
        for text, tokens in zip(texts, found, strict=True):
            async with asyncio.timeout(HANG_S):
                tokens.append((await anext(text)).id)
    for text in texts:
        await text.aclose()
    assert found == [tokens[:12] for tokens in wanted]
    assert any("out of step" in span.error or "in use" in span.error for span in spans)


def verify(tokens: Sequence[int] = (1, 2), **fields: Any) -> pb.VerifyDraftsRequest:
    fields.setdefault("prefix", pb.Prefix(session_id="s"))
    return pb.VerifyDraftsRequest(tokens=tokens, **fields)


def draft(**fields: Any) -> pb.GenerateDraftsRequest:
    values: dict[str, Any] = {"tokens": (1, 2), "max_nodes": 4, "max_depth": 2}
    return pb.GenerateDraftsRequest(
        **{"prefix": pb.Prefix(session_id="s"), **values, **fields}  # type: ignore[arg-type]
    )


def nest(depth: int) -> pb.TokenTree:
    node = pb.TokenNode(token_id=3)
    for _ in range(depth - 1):
        node = pb.TokenNode(token_id=3, children=[node])
    return pb.TokenTree(roots=[node])


def flat(tokens: Sequence[int], parents: Sequence[int], logs: Sequence[float] = ()) -> Any:
    return pb.TokenTree(tokens=tokens, parents=parents, log_probs=logs)


HOSTILE: list[tuple[Any, str]] = [
    (verify(()), "has no token"),
    (verify((1,) * (CHUNK + 1)), "there is room for 16"),
    (verify((9_999,)), "token 9999 is outside the vocabulary of 2048"),
    (verify(drafts=flat((9_999,), (-1,))), "outside the vocabulary"),
    (verify(drafts=flat((3,), (0,))), "no earlier one"),
    (verify(drafts=flat((3,), (-2,))), "no earlier one"),
    (verify(drafts=flat((3, 4), (-1,))), "give as many of each"),
    (verify(drafts=flat((3,), (-1,), (float("nan"),))), "log_prob nan"),
    (verify(drafts=flat((3,), (-1,), (1.0,))), "at most 0"),
    (verify(drafts=flat((3, 3), (-1, -1))), "followed by token 3 twice"),
    (verify(drafts=flat((3,) * CHUNK, range(-1, CHUNK - 1))), "there is room for 14"),
    (verify((1,), drafts=nest(CHUNK)), "more than 15 nodes"),
    (verify((1,), drafts=flat((3,) * 300, range(-1, 299))), "there is room for 15"),
    (verify(drafts=pb.TokenTree(tokens=[1], roots=[pb.TokenNode()])), "give one of them"),
    (verify(sampling=pb.Sampling(temperature=float("nan"))), "temperature is nan"),
    (verify(sampling=pb.Sampling(top_p=7.0)), "top_p is 7"),
    (verify(sampling=pb.Sampling(repetition_penalty=float("nan"))), "repetition_penalty is nan"),
    (verify(sampling=pb.Sampling(frequency_penalty=3)), "frequency_penalty is 3"),
    (verify(prefix=pb.Prefix(session_id="")), "1 to 64 characters"),
    (verify(prefix=pb.Prefix(session_id="s", expected_prefix_length=5_000)), "reaches position"),
    (verify(prefix=pb.Prefix(session_id="none", expected_prefix_length=1)), "no such session"),
    (verify(kept=(7,)), "which the session cannot continue"),
    (draft(tokens=()), "a text has 1 to"),
    (draft(tokens=(0,) * 5_000), "there is room for"),
    (draft(tokens=(9_999,)), "outside the vocabulary"),
    (draft(guessed=(9_999,)), "outside the vocabulary"),
    (draft(max_nodes=0), "1 to 256 nodes"),
    (draft(max_depth=99), "1 to 16 levels"),
    (draft(prefix=pb.Prefix(session_id="none", expected_prefix_length=1)), "no such session"),
]


async def test_hostile_requests_get_one_sentence(workers: Workers) -> None:
    groups = {
        "VerifyDrafts": workers.connect(TargetWorker, await workers.start(TargetWorker)),
        "GenerateDrafts": workers.connect(DraftWorker, await workers.start(DraftWorker)),
    }

    async def ask(request: Any) -> Any:
        method = type(request).__name__.removesuffix("Request")
        return await groups[method].call(method, request, CallOptions(), timeout_s=HANG_S)

    for request, message in HOSTILE:
        with pytest.raises((InvalidInput, Refused), match=message):
            await ask(request)
    with pytest.raises(Throttled, match="larger than max"):
        await ask(verify((1,) * (rpc.MAX_MESSAGE_BYTES + 1)))
    node = b"\x08\x03"  # token 3
    for _ in range(200):
        node = b"\x1a" + encode_length(len(node)) + node
    tree = b"\x22" + encode_length(len(node)) + node
    channel = rpc.open_channel(groups["VerifyDrafts"].address, PLAIN)
    send = channel.unary_unary("/splitup.speculation.v1.TargetService/VerifyDrafts")
    with pytest.raises(grpc.aio.AioRpcError, match="or its tree is nested too deep") as raised:
        await send(b"\x22" + encode_length(len(tree)) + tree, timeout=HANG_S)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await channel.close()

    answers = [await ask(verify(drafts=tree)) for tree in (nest(3), flat((3,) * 3, (-1, 0, 1)))]
    assert answers[0].accepted == answers[1].accepted
    begun = pb.Prefix(session_id="s", expected_prefix_length=2)
    with pytest.raises(Refused, match="out of step: the first 2 tokens of the session are others"):
        await ask(verify((5,), prefix=begun, kept=(0, 1)))
    begun.digest = compute_digest((1, 2))
    assert (await ask(verify((5,), prefix=begun, kept=(0, 1)))).accepted
    with pytest.raises(Refused, match="cannot continue"):
        await ask(verify((5,), prefix=begun, kept=(0, 1)))  # the rows are no longer the last ones
    assert (await ask(draft())).drafts.tokens
    same = pb.Prefix(session_id="s", expected_prefix_length=2, digest=compute_digest((1, 2)))
    for guess in range(100):  # behind one text: its tree does not keep them all
        await ask(draft(prefix=same, tokens=(), guessed=(guess,), max_depth=1))
    with workers.running[groups["GenerateDrafts"].address]._sessions.use("s", None) as session:
        assert len(session.root.children) < 80
    with pytest.raises(InvalidInput, match="one sampling"):
        await ask(draft(sampling=pb.Sampling(temperature=0.5)))
    with pytest.raises(Refused, match="are others"):
        await ask(draft(prefix=pb.Prefix(session_id="s", expected_prefix_length=2, digest=1)))


def encode_length(number: int) -> bytes:
    return bytes([number & 127 | 128, number >> 7]) if number > 127 else bytes([number])


class Content:
    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    async def end(self) -> None:
        self.has_ended.set()


async def test_sessions_end_by_number_time_and_failure() -> None:
    sessions: WorkerSessions[Content] = WorkerSessions(SessionLimits(most=2))
    for name in ("a", "b", "a"):
        with sessions.use(name, Content):
            pass
    with sessions.use("b", None) as oldest, sessions.use("a", None):
        with pytest.raises(Throttled, match="all 2 sessions"), sessions.use("c", Content):
            pass
    with sessions.use("a", None), sessions.use("c", Content):
        assert len(sessions) == 2
    async with asyncio.timeout(HANG_S):
        await oldest.has_ended.wait()
    with pytest.raises(asyncio.CancelledError), sessions.use("a", None):
        raise asyncio.CancelledError
    with pytest.raises(Refused, match="no such session"), sessions.use("a", None):
        pass
    await sessions.close()
    brief: WorkerSessions[Content] = WorkerSessions(SessionLimits(ttl_s=0.0))
    with brief.use("a", Content) as content:
        pass
    async with asyncio.timeout(HANG_S):
        await content.has_ended.wait()
    assert not len(brief)


async def test_s27_a_caller_loses_its_own_sessions_before_others_do() -> None:
    sessions: WorkerSessions[Content] = WorkerSessions(SessionLimits(most=4))
    for name, owner in (("honest", "b"), *((f"flood {n}", "a") for n in range(8))):
        with sessions.use(name, Content, owner):
            pass
    assert set(sessions._entries) == {"honest", "flood 5", "flood 6", "flood 7"}
    await sessions.close()


async def test_s27_calls_that_send_nothing_end_and_addresses_share_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "_MAX_CALLS", 2)
    monkeypatch.setattr(rpc, "_READ_S", 0.1)
    asked = asyncio.Event()

    async def ping(_: Any) -> pb.PingResponse:
        asked.set()
        return pb.PingResponse()

    server, address = await rpc.start_server("TargetService", {"Ping": ping}, "127.0.0.1", 0, PLAIN)
    channel = rpc.open_channel(address, PLAIN)
    path = "/splitup.speculation.v1.TargetService/Ping"
    silent = [channel.stream_unary(path)() for _ in range(2)]
    for call in silent:
        async with asyncio.timeout(HANG_S):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "did not arrive within" in str(await call.details())
    await rpc.call(channel, "TargetService", "Ping", pb.PingRequest(), timeout_s=HANG_S)
    assert asked.is_set()
    await channel.close()
    await server.stop(None)


async def test_s27_a_newcomer_gets_the_place_of_who_has_the_most_calls() -> None:
    places: Places[asyncio.Task[Any]] = Places(3)

    async def hold(peer: str) -> None:
        with rpc._hold_place(peer, places):
            await asyncio.Event().wait()

    peers = ("ipv6:%5B2001:db8::1%5D:1", "ipv6:%5B2001:db8::2%5D:2", "ipv6:%5B2001:db8::3%5D:3")
    flood = [asyncio.create_task(hold(peer)) for peer in peers]  # one network of /64
    await asyncio.sleep(0)
    with pytest.raises(Throttled, match="under way"):
        await hold("ipv6:%5B2001:db8::4%5D:4")
    other = asyncio.create_task(hold("ipv4:192.0.2.1:5"))
    await asyncio.wait([flood[2]], timeout=HANG_S)
    assert flood[2].cancelled() and not other.done()
    for task in (*flood, other):
        task.cancel()
    await asyncio.gather(*flood, other, return_exceptions=True)
    assert not len(places)


async def test_s28_guessed_tokens_that_a_session_keeps_are_few(workers: Workers) -> None:
    drafts = workers.connect(DraftWorker, await workers.start(DraftWorker))
    guessed = (3,) * (MAX_NODES + 1)
    with pytest.raises(InvalidInput, match=f"there is room for {MAX_NODES}"):
        await drafts.call("GenerateDrafts", draft(guessed=guessed), CallOptions(), timeout_s=HANG_S)


@pytest.mark.parametrize("nodes", [b"\x22\0" * 2**19, b"\x22\x80\x80\x40" + b"\x1a\0" * 2**19])
async def test_s28_nodes_of_a_tree_are_counted_before_they_are_made(nodes: bytes) -> None:
    """A node takes two bytes of a message, and 200 as an object."""
    tree = pb.TokenTree.FromString(nodes)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="more than 16 nodes"):
            read_tree(tree, vocabulary=10, most=16)
        assert tracemalloc.get_traced_memory()[1] < len(nodes) / 10
    finally:
        tracemalloc.stop()


async def test_beyond_this_machine_there_is_tls_or_nothing(
    workers: Workers, tmp_path: Path, model: TextModel, wanted: list[list[int]]
) -> None:
    with pytest.raises(InvalidInput, match="--tls-cert and --tls-key"):
        rpc.check_host("0.0.0.0", Tls())
    with pytest.raises(InvalidInput, match="give --tls-ca"):
        workers.connect(TargetWorker, "192.0.2.1:5000")
    with pytest.raises(InvalidInput, match="no address"):
        workers.connect(TargetWorker, "localhost")
    with pytest.raises(InvalidInput, match="both files"):
        Tls(tmp_path / "cert")
    tls = write_certificate(tmp_path)
    with pytest.raises(InvalidInput, match="spends this account's money"):
        rpc.check_host("0.0.0.0", dataclasses.replace(tls, ca=None), is_paying=True)
    address = await workers.start(TargetWorker, tls)
    target = workers.connect(TargetWorker, address, tls=tls)
    assert await generate(target, None, model, SAMPLERS[0]) == wanted[0]
    nobody = workers.connect(TargetWorker, address, tls=Tls(ca=tls.ca))  # shows no certificate
    with pytest.raises(Unavailable, match="no worker"):
        await nobody.ping()


def write_certificate(folder: Path) -> Tls:
    """Write a certificate of 127.0.0.1 that signs itself."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "worker")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return Tls(cert, private, cert)
