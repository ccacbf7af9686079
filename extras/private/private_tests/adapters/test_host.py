"""A real host over HTTP, with its confined processes, and its clients: honest and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from private_tests.adapters.weights import make_random
from splitup_private.adapters import client as client_module
from splitup_private.adapters import host as host_module
from splitup_private.adapters import routes
from splitup_private.adapters.ckks import ClientKeys, compute_input_bytes, compute_key_bytes
from splitup_private.adapters.client import AdapterOptions, EncryptedAdapter
from splitup_private.adapters.host import AdapterHost, HostOptions
from splitup_private.adapters.layout import get_layout
from splitup_private.adapters.messages import ANSWER_HEAD, AdapterList
from splitup_private.adapters.weights import Adapter

from splitup.core.errors import (
    BadSignature,
    InvalidInput,
    PeerFault,
    Refused,
    Throttled,
    Unavailable,
)
from splitup.crypto.keys import generate_identity
from splitup.net.admission import Admission
from splitup.net.http import SignedClient
from splitup.net.http_server import Server, serve_app
from splitup.sandbox.child import Child
from tests.builders import HANG_S

WIDTH = 64
ADAPTER = make_random(WIDTH, 4, name="poems")
LAYOUT = get_layout(ADAPTER.info)
RNG = np.random.default_rng(2)


@contextlib.asynccontextmanager
async def run_host(
    *adapters: Adapter, options: HostOptions | None = None, kind: type[AdapterHost] = AdapterHost
) -> AsyncIterator[tuple[AdapterHost, Server]]:
    host = kind(adapters or (ADAPTER,), options)
    server = await serve_app(host.make_app(), "127.0.0.1", 0)
    try:
        yield host, server
    finally:
        await server.close()
        host.close()


async def check_answer(adapter: EncryptedAdapter) -> None:
    hidden = RNG.normal(size=WIDTH)
    np.testing.assert_allclose(await adapter.apply(hidden), ADAPTER.compute(hidden), atol=1e-5)


async def post(http: SignedClient, url: str, data: bytes) -> bytes:
    return await http.post_bytes(url, data, timeout_s=30.0, max_bytes=10**6)


@pytest.mark.long  # in small: a second host, below
async def test_an_adapter_by_name_and_by_digest_checked_by_another_host() -> None:
    renamed = replace(ADAPTER, info=ADAPTER.info.model_copy(update={"name": "verses"}))
    async with (
        run_host() as (host, server),
        run_host(renamed) as (_, second),
        SignedClient() as http,
    ):
        options = AdapterOptions(server.url + "/", "poems", second.url, max_uses=2)
        adapter = await EncryptedAdapter.open(http, options, WIDTH)
        [first] = host._sessions
        for _ in range(3):
            await check_answer(adapter)
        [later] = host._sessions  # other keys after two uses, and the first session has ended
        assert later != first
        report = adapter.reports[0]
        assert 0 < report.compute_ms < report.waited_ms
        assert report.encrypt_ms > 0 and report.decrypt_ms > 0
        assert 100_000 < report.sent_bytes < report.received_bytes < 140_000
        assert f"adapter poems ({ADAPTER.info.adapter})" in adapter.describe()
        assert "3 hidden states" in adapter.describe()
        await adapter.close()
        assert not host._sessions
        pinned = AdapterOptions(server.url, ADAPTER.info.adapter, max_age_s=1e-9)
        adapter = await EncryptedAdapter.open(http, pinned, WIDTH)
        [first] = host._sessions
        await check_answer(adapter)
        assert first not in host._sessions  # these keys were too old
        await adapter.close()


async def test_the_question_that_chooses_an_adapter_stays_here() -> None:
    wide = make_random(WIDTH * 2, 4, name="wide")
    labelled = [
        replace(one, info=one.info.model_copy(update={"keywords": ("poem", one.info.name)}))
        for one in (wide, ADAPTER)
    ]
    seen: list[str] = []

    @web.middleware
    async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
        seen.append(f"{request.raw_path} {request.headers} {await request.read()!r}")
        return await handler(request)

    host = AdapterHost(labelled)
    app = host.make_app()
    app.middlewares.append(record)
    server = await serve_app(app, "127.0.0.1", 0)
    try:
        async with SignedClient() as http:
            options = AdapterOptions(server.url)
            chosen = await options.choose(http, "a poem of tangerines", WIDTH)
            assert chosen is not None and chosen.expert == ADAPTER.info.adapter
            assert await options.choose(http, "tangerines", WIDTH) is None
            assert await chosen.choose(http, None, WIDTH) is chosen, "who names one has chosen"
            with pytest.raises(InvalidInput, match="it has none; name one"):
                await options.choose(http, None, WIDTH)
    finally:
        await server.close()
        host.close()
    assert len(seen) == 2 and not any("tangerine" in one or "poem" in one for one in seen)


async def test_what_cannot_be_applied_is_refused_before_anything_is_sent() -> None:
    async with run_host() as (host, server), SignedClient() as http:

        async def open_adapter(expert: str, width: int, **options: object) -> None:
            await EncryptedAdapter.open(http, AdapterOptions(server.url, expert, **options), width)

        with pytest.raises(InvalidInput, match="has no adapter 'prose'; it has: poems"):
            await open_adapter("prose", WIDTH)
        with pytest.raises(InvalidInput, match="has no adapter"):
            await open_adapter("0" * 64, WIDTH)
        with pytest.raises(InvalidInput, match="64 elements, and the model has 32"):
            await open_adapter("poems", 32)
        with pytest.raises(InvalidInput, match="one use and some time"):
            await open_adapter("poems", WIDTH, max_uses=0)
        assert not host._sessions
        adapter = await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
        for hidden in (np.full(WIDTH, np.nan), np.full(WIDTH, 1e30), np.ones(WIDTH + 1)):
            with pytest.raises(InvalidInput, match="64 finite numbers of length below"):
                await adapter.apply(hidden)
        assert not adapter.reports
    with pytest.raises(InvalidInput, match="two adapters have one name"):
        AdapterHost([ADAPTER, make_random(WIDTH, 4, seed=1, name="poems")])


async def test_unsafe_or_unexpected_parameters_are_refused_by_the_client() -> None:
    for update, words in (
        ({"degree": 4096}, "less than 128 bits of security"),
        ({"degree": 16384}, "are not those for hidden states"),
        ({"prime_bits": (60, 60, 60, 60)}, "less than 128 bits"),
    ):
        unsafe = ADAPTER.info.parameters.model_copy(update=update)
        info = ADAPTER.info.model_copy(update={"parameters": unsafe})
        async with run_host(replace(ADAPTER, info=info)) as (host, server), SignedClient() as http:
            with pytest.raises(PeerFault, match=words):
                await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
            assert not host._sessions


async def test_a_host_that_is_down_gives_an_error_and_no_value() -> None:
    async with SignedClient() as http:
        async with run_host() as (_, server):
            adapter = await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
            await check_answer(adapter)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await adapter.apply(np.ones(WIDTH))
        assert adapter._keyed is None
        with pytest.raises(Unavailable, match="cannot be reached"):
            await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)


class Liar(AdapterHost):
    """Answers as ``answer`` makes it of an honest answer."""

    answer: Callable[[bytes], bytes]

    async def _apply(self, request: object) -> object:
        response = await super()._apply(request)
        response.body = self.answer(bytes(response.body))
        return response


async def test_a_host_that_answers_something_else_gives_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[tuple[Callable[[bytes], bytes], str]] = [
        (lambda data: b"", "answered 0 bytes instead of a ciphertext"),
        (lambda data: data[: ANSWER_HEAD.size], "instead of a ciphertext"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + bytes(1), "truncated, or not SEAL's"),
        (lambda data: data + bytes(10**6), "bytes"),
        (lambda data: data[:-8_000] + os.urandom(8_000), "larger than the adapter can make|valid"),
    ]
    async with run_host(kind=Liar) as (host, server), SignedClient() as http:
        assert isinstance(host, Liar)
        adapter = await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
        keyed = adapter._keyed

        async def give_up_keys() -> None:  # and leave them to the next answer
            adapter._keyed = None

        monkeypatch.setattr(adapter, "_give_up_keys", give_up_keys)
        for host.answer, words in answers:
            adapter._keyed = keyed
            with pytest.raises(PeerFault, match=words):
                await adapter.apply(np.ones(WIDTH))
            assert adapter._keyed is None and not adapter.reports


@pytest.mark.long  # in small: a wrong answer by its own check
async def test_a_second_host_finds_a_wrong_answer() -> None:
    """The first host applies another adapter than the one that it names."""
    other = make_random(WIDTH, 4, seed=9)
    liar = replace(other, info=ADAPTER.info)
    async with run_host(liar) as (_, server), run_host() as (_, second), SignedClient() as http:
        options = AdapterOptions(server.url, "poems")
        unchecked = await EncryptedAdapter.open(http, options, WIDTH)
        found = await unchecked.apply(hidden := RNG.normal(size=WIDTH))
        assert np.abs(found - ADAPTER.compute(hidden)).max() > 1e-3  # nobody notices
        checked = await EncryptedAdapter.open(http, replace(options, check_url=second.url), WIDTH)
        with pytest.raises(PeerFault, match="answer one ciphertext differently"):
            await checked.apply(hidden)


async def test_hosts_that_cannot_be_compared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    info = ADAPTER.info.model_copy(update={"gain_bits": ADAPTER.info.gain_bits + 1})
    async with run_host() as (_, server), SignedClient() as http:
        async with run_host(replace(ADAPTER, info=info)) as (_, second):
            with pytest.raises(PeerFault, match=r"describe adapter .* differently"):
                options = AdapterOptions(server.url, "poems", second.url)
                await EncryptedAdapter.open(http, options, WIDTH)
        async with run_host() as (other, second):
            other._listed = other._listed.model_copy(update={"library": "tenseal 0.3.99"})
            with pytest.raises(PeerFault, match="their answers cannot be compared"):
                options = AdapterOptions(server.url, "poems", second.url)
                await EncryptedAdapter.open(http, options, WIDTH)


async def test_a_crash_ends_one_session_and_the_client_makes_other_keys() -> None:
    async with run_host() as (host, server), SignedClient() as http:
        options = AdapterOptions(server.url, "poems")
        adapters = [await EncryptedAdapter.open(http, options, WIDTH) for _ in range(2)]
        names = list(host._sessions)
        os.kill(host._sessions[names[0]].child.pid, signal.SIGKILL)
        keys = adapters[0]._keyed
        for adapter in adapters:
            await check_answer(adapter)
        assert adapters[0]._keyed is not keys  # never the old key at a new session
        assert names[0] not in host._sessions and names[1] in host._sessions


async def test_sessions_are_bounded_and_end_when_idle() -> None:
    options = HostOptions(sessions=2, idle_s=1e6)
    async with run_host(options=options) as (host, server), SignedClient() as http:
        given = AdapterOptions(server.url, "poems")
        opened = [await EncryptedAdapter.open(http, given, WIDTH) for _ in range(2)]
        with pytest.raises(Unavailable, match="too many sessions"):
            await EncryptedAdapter.open(http, given, WIDTH)
        await check_answer(opened[0])
        for session in host._sessions.values():
            session.used_s -= 2e6
        await check_answer(opened[1])  # its session had ended: 410, so it made another one
        assert len(host._sessions) == 1


@pytest.mark.long  # in small: tests/net has the places
async def test_s31_a_newcomer_gets_a_session_of_the_network_that_has_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = "2001:db8::/64"
    monkeypatch.setattr(Admission, "get_group", lambda *_: group)
    options = HostOptions(sessions=3, idle_s=1e6)
    async with run_host(options=options) as (host, server), SignedClient() as http:
        given = AdapterOptions(server.url, "poems")
        for _ in range(3):
            await EncryptedAdapter.open(http, given, WIDTH)
        first, second, newest = host._sessions
        group = "192.0.2.1"
        adapter = await EncryptedAdapter.open(http, given, WIDTH)
        assert list(host._sessions)[:2] == [first, second] and newest not in host._sessions
        await check_answer(adapter)
        group = "2001:db8::/64"
        with pytest.raises(Unavailable, match="too many sessions"):
            await EncryptedAdapter.open(http, given, WIDTH)
        assert len(host._places) == len(host._groups) == 3


async def test_s31_a_newcomer_gets_a_place_where_every_network_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = "192.0.2.0"
    monkeypatch.setattr(Admission, "get_group", lambda *_: group)
    options = HostOptions(sessions=3, idle_s=1e6)
    async with run_host(options=options) as (host, server), SignedClient() as http:
        given = AdapterOptions(server.url, "poems")
        with monkeypatch.context() as patch:  # processes that are never asked
            patch.setattr(host_module, "_start_child", AsyncMock(return_value=Mock()))
            for number in range(3):
                group = f"192.0.2.{number}"
                await EncryptedAdapter.open(http, given, WIDTH)
        unused, busy, asked = host._sessions
        host._sessions[unused].used_s = host._sessions[asked].used_s + 1
        host._sessions[busy].running, host._sessions[busy].used_s = 1, 0.0
        with pytest.raises(Unavailable, match="too many sessions"):  # it has one already
            await EncryptedAdapter.open(http, given, WIDTH)
        group = "198.51.100.1"
        await check_answer(await EncryptedAdapter.open(http, given, WIDTH))
        assert list(host._sessions)[:2] == [unused, busy] and asked not in host._sessions


async def test_s31_a_session_that_starts_may_lose_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    start_child = host_module._start_child

    async def start_late(adapter: Adapter, keys: bytes) -> Child:
        begun.set()
        await go_on.wait()
        return await start_child(adapter, keys)

    monkeypatch.setattr(host_module, "_start_child", start_late)
    async with run_host(options=HostOptions(sessions=2)) as (host, server), SignedClient() as http:
        host._take_place("127.0.0.1", "older")
        opening = asyncio.create_task(
            EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
        )
        async with asyncio.timeout(HANG_S):
            await begun.wait()
            host._take_place("192.0.2.1", "another")
            go_on.set()
            with pytest.raises(Unavailable, match="another address needed this session's place"):
                await opening
        assert not host._sessions and set(host._groups) == {"older", "another"}


async def test_s55_what_cannot_be_keys_starts_no_process_and_takes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To start one takes half a second of a processor and 160 MB, and a stranger sends a byte."""
    async with run_host(options=HostOptions(sessions=1)) as (_, server), SignedClient() as http:
        adapter = await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
        begun: list[int] = []

        async def start_child(adapter: Adapter, keys: bytes) -> Child:
            begun.append(len(keys))
            raise PeerFault("no keys")

        monkeypatch.setattr(host_module, "_start_child", start_child)
        monkeypatch.setattr(Admission, "get_group", lambda *_: "192.0.2.1")
        start = routes.ADAPTER_KEYS.url(server.url, adapter=ADAPTER.info.adapter)
        whole = ClientKeys(ADAPTER.info.parameters).make_rotation_keys(LAYOUT.steps)
        shorter = whole[:8] + (1_000_000).to_bytes(8, "little") + whole[16:1_000_000]
        for data, problem in ((b"x", "truncated"), (whole[:-1], "truncated"), (shorter, "too few")):
            with pytest.raises(Refused, match=problem):
                await post(http, start, data)
        assert not begun
        await check_answer(adapter)
        with pytest.raises(Refused, match="no keys"):
            await post(http, start, whole)
        assert begun == [len(whole)]


async def test_s31_hostile_requests_get_a_sentence_and_leave_the_host_running() -> None:
    """And a session computes few answers at once, of which none is larger than it may be."""
    async with run_host() as (host, server), SignedClient() as http:
        adapter = await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
        [(name, session)] = host._sessions.items()
        query = routes.ADAPTER_QUERY.url(server.url, session=name)
        session.running = 4
        with pytest.raises(Throttled, match="computes 4 answers at once"):
            await post(http, query, b"x")
        session.running = 0
        start = routes.ADAPTER_KEYS.url(server.url, adapter=ADAPTER.info.adapter)
        parameters = ADAPTER.info.parameters
        for data in (b"", b"x", os.urandom(100_000)):
            with pytest.raises(Refused, match="truncated, or not SEAL's"):
                await post(http, query, data)
            with pytest.raises(Refused, match="truncated, or not SEAL's"):
                await post(http, start, data)
        with pytest.raises(Refused, match="has to be at most"):
            await post(http, query, bytes(compute_input_bytes(parameters) + 1))
        with pytest.raises(Refused, match="has to be at most"):
            await post(http, start, bytes(compute_key_bytes(parameters, LAYOUT) + 1))
        with pytest.raises(Refused, match="holds no such adapter"):
            await post(http, routes.ADAPTER_KEYS.url(server.url, adapter="0" * 64), b"x")
        with pytest.raises(Refused, match="no such session") as caught:
            await post(http, routes.ADAPTER_QUERY.url(server.url, session="0" * 64), b"x")
        assert caught.value.status == 410
        foreign = ClientKeys(parameters)  # a ciphertext of another key: an answer that is noise
        answer = await post(http, query, foreign.encrypt(LAYOUT.pack(np.ones(WIDTH) / 8)))
        assert np.abs(foreign.decrypt(answer[ANSWER_HEAD.size :])).max() > 1
        # zeros that zstd packs 10,000 times smaller, in a frame without a size: blocks of 128 KiB
        # of one repeated byte, four bytes each
        blocks = 32_000
        frame = b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(
            ((131_072 << 3) | 2 | (index == blocks - 1)).to_bytes(3, "little") + b"\0"
            for index in range(blocks)
        )
        good = foreign.encrypt(np.zeros(LAYOUT.slots))
        bomb = good[:8] + (16 + len(frame)).to_bytes(8, "little") + frame
        with pytest.raises(Refused, match=r"the ciphertext: |expand"):
            await post(http, query, bomb)
        assert len(host._sessions) == 1 and session.running == 0
        await check_answer(adapter)


async def test_everything_that_a_host_receives_is_keys_or_fresh_ciphertexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decrypted values never go back: what is sent does not depend on what was answered."""
    sent: list[tuple[str, bytes]] = []

    class Recording(SignedClient):
        async def _request(self, method: str, url: str, *, data: bytes, **options: object) -> bytes:
            sent.append((url, data.getvalue() if isinstance(data, io.BytesIO) else data or b""))
            return await super()._request(method, url, data=data, **options)

    encrypted: list[bytes] = []

    class Keys(ClientKeys):
        def encrypt(self, slots: object) -> bytes:
            encrypted.append(super().encrypt(slots))
            return encrypted[-1]

        def make_rotation_keys(self, steps: object) -> bytes:
            encrypted.append(super().make_rotation_keys(steps))
            return encrypted[-1]

    monkeypatch.setattr(client_module, "ClientKeys", Keys)
    async with run_host() as (_, server), Recording() as http:
        adapter = await EncryptedAdapter.open(http, AdapterOptions(server.url, "poems"), WIDTH)
        hidden = RNG.normal(size=WIDTH)
        answers = [await adapter.apply(hidden) for _ in range(3)]
        await adapter.close()
    bodies = [data for _, data in sent if data and data != b"{}"]
    assert bodies == encrypted and len(set(bodies)) == 4
    for value in (hidden, *answers, *(np.float32(answer) for answer in answers)):
        assert not any(value.tobytes()[:16] in data for _, data in sent)


@pytest.mark.long  # in small: sessions are bounded, above
async def test_clients_at_the_same_time_get_their_own_answers() -> None:
    async with run_host() as (_, server), SignedClient() as http:
        options = AdapterOptions(server.url, "poems")
        adapters = [await EncryptedAdapter.open(http, options, WIDTH) for _ in range(2)]
        await asyncio.gather(*(check_answer(adapter) for adapter in adapters * 3))


async def test_what_a_host_offers_is_signed_by_who_was_asked_for() -> None:
    signer, other = generate_identity(), generate_identity()
    host = AdapterHost((ADAPTER,), identity=signer)
    server = await serve_app(host.make_app(), "127.0.0.1", 0)
    async with run_host() as (_, unsigned), SignedClient() as http:
        right = AdapterOptions(server.url, "poems", signer=signer.signing_key_hex)
        adapter = await EncryptedAdapter.open(http, right, WIDTH)
        await check_answer(adapter)
        await adapter.close()
        wrong = replace(right, signer=other.signing_key_hex)
        for options in (wrong, replace(right, url=unsigned.url)):
            with pytest.raises(BadSignature):
                await EncryptedAdapter.open(http, options, WIDTH)
        listed = AdapterList.from_value(await http.get_json(routes.ADAPTERS.url(server.url)))
        changed = listed.model_copy(update={"library": "another"})
        with pytest.raises(BadSignature):
            changed.check_signature(signer.signing_key_hex)
    await server.close()
    host.close()
