from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import pytest
import pytest_asyncio
from splitup_node.committee.committee_client import CommitteeClient
from splitup_node.settlement.reports import CompletionReport, Reporter

from splitup.chain.clock import ChainClock
from splitup.chain.market import Status
from splitup.core import limits, tuning
from splitup.core.errors import ChainUnavailable, Refused, Unavailable
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain
from splitup.messages import api
from splitup.messages.completions import (
    Completion,
    End,
    ExecutorCommitment,
    SignedEnd,
    SignedTakeover,
    Takeover,
    Takeovers,
)
from splitup.messages.verification import (
    Attestation,
    Held,
    ValidatorCommitment,
)
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from splitup.protocol.execution.ends import make_count
from splitup.protocol.settlement.attestations import sign_notice
from splitup.storage.journal import Journal
from tests.builders import HANG_S

NODE = "0x" + "aa" * 20
DAY_S = 86_400


class FakeChain:
    """The one view that a reporter uses; the members' root is on chain unless it is ``open``."""

    address = NODE

    def __init__(self) -> None:
        self.clock = ChainClock()
        self.status: dict[str, int] = {}
        self.open: set[str] = set()
        self.down = 0

    async def call(self, contract: str, function: str, execution_id: str) -> Any:
        assert (contract, function) == ("market", "executionOf")
        if self.down:
            self.down -= 1
            raise ChainUnavailable("the chain is down; start it")
        status = self.status.get(execution_id, Status.PLANNED)
        is_certified = status is Status.PLANNED and execution_id not in self.open
        return {"status": status, "certified": is_certified}


class FakeHttp:
    """Four members; ``deaf`` ones do not answer, those in ``due`` attest that it is time."""

    def __init__(self) -> None:
        self.deaf: set[str] = set()
        self.hung: set[str] = set()  # members that take a request and never answer
        self.due = {member.endpoint for member in COMMITTEE.members}
        self.over = False
        self.asked = asyncio.Event()
        self.asks: asyncio.Queue[str] = asyncio.Queue()  # members that were asked
        self.told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.commitments: asyncio.Queue[tuple[str, ExecutorCommitment]] = asyncio.Queue()
        self.shown: asyncio.Queue[str] = asyncio.Queue()  # members that were told of takeovers
        self.most_bytes: list[int] = []  # that answers may have
        self.undrawn: set[str] = set()  # members that know no draw
        self.held: tuple[Held, ...] = ()  # validators' commitments that all attest

    def sign(
        self, route: api.Route[Any], audience: str, body: Completion | ExecutorCommitment
    ) -> Any:
        return body if isinstance(body, ExecutorCommitment) else body.execution_id

    async def get_json(self, url: str, *, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        endpoint, _, asked = url.partition(api.DUE_NOTICE.path.format(execution_id=""))
        execution_id, _, query = asked.partition("?")
        named = dict(parse_qsl(query))
        self.asked.set()
        self.asks.put_nowait(endpoint)
        if endpoint in self.hung:
            await asyncio.Event().wait()
        if self.over:
            raise Refused("it is over", status=410)
        if endpoint in self.undrawn:
            raise Refused("there is no draw", status=404)
        place = next(i for i, m in enumerate(COMMITTEE.members) if m.endpoint == endpoint)
        attestation = Attestation(
            execution_id=execution_id,
            member=MEMBERS[place].address,
            steps=1,
            due=endpoint in self.due,
            held=self.held,
            silent=(),
            rulings=(),
        )
        tasks = [int(task) for task in named.get("tasks", "").split(",") if task]
        signed = sign_notice(MEMBERS[place], attestation, named.get("validator", ""), tasks)
        assert len(signed.canonical_bytes()) <= max_bytes
        self.most_bytes.append(max_bytes)
        return signed.model_dump(mode="json")

    async def post_token(self, route: api.Route[Any], member: str, token: Any) -> dict[str, Any]:
        if member in self.hung:
            await asyncio.Event().wait()
        if member in self.deaf:
            raise Unavailable(f"{member} did not answer")
        if route is api.EXECUTOR_COMMITMENT:
            self.commitments.put_nowait((member, token))
        elif route is api.VALIDATOR_COMMITMENT:
            pass
        elif route is api.TAKEOVERS:
            self.shown.put_nowait(member)
        else:
            assert route is api.COMPLETION
            self.told.put_nowait((member, token))
        return {}


MEMBERS = [Identity.from_private_key(bytes([n]) * 32) for n in range(1, 5)]
COMMITTEE = CommitteeView(
    configuration=1,
    members=tuple(
        MemberView(member.address, member.signing_key_hex, f"http://m{n}")
        for n, member in enumerate(MEMBERS, 1)
    ),
    quorum=3,
    group_key="0x",
    domain=Domain(31337, "0x" + "cc" * 20),
)


async def fetch_committee(execution_id: str) -> CommitteeView:
    return COMMITTEE


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REPORT_RETRY_S", 0.01)
    monkeypatch.setattr(tuning, "RPC_BACKOFF_MAX_S", 0.02)


@pytest.fixture
def chain() -> FakeChain:
    return FakeChain()


@pytest.fixture
def http() -> FakeHttp:
    return FakeHttp()


@contextlib.asynccontextmanager
async def run(directory: Path, chain: FakeChain, http: FakeHttp) -> AsyncIterator[Reporter]:
    """Run a reporter until the end of the block, as a node does between two restarts."""
    with Journal.open(directory) as journal:
        committee_client = CommitteeClient(http, fetch_committee)  # type: ignore[arg-type]
        reporter = Reporter(journal, chain, committee_client)  # type: ignore[arg-type]
        reporter.resume()
        task = asyncio.create_task(reporter.run())
        try:
            yield reporter
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture
async def reporter(tmp_path: Path, chain: FakeChain, http: FakeHttp) -> AsyncIterator[Reporter]:
    async with run(tmp_path, chain, http) as running:
        yield running


def make_completion(number: int) -> Completion:
    name = f"0x{number:064x}"
    end = SignedEnd(end=End(execution_id=name, steps=1, inputs=()), signature="0x" + "ab" * 64)
    return Completion(execution_id=name, node=NODE, tasks=(), salt=name, end=end)


async def submit(reporter: Reporter, *numbers: int, left_s: int = 60) -> None:
    for number in numbers:
        await reporter.submit([make_completion(number)], int(time.time()) + left_s)


async def finish(reporter: Reporter) -> None:
    """Wait until the journal says that the completion was revealed."""
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*reporter._background.tasks)


async def hear(http: FakeHttp, count: int) -> set[tuple[str, int]]:
    async with asyncio.timeout(HANG_S):
        told = [await http.told.get() for _ in range(count)]
    return {(url, int(token, 16)) for url, token in told}


async def test_members_get_the_commitment_and_the_reveal_once_their_root_is_on_chain(
    reporter: Reporter, chain: FakeChain, http: FakeHttp
) -> None:
    chain.open.add(make_completion(1).execution_id)
    await submit(reporter, 1)
    async with asyncio.timeout(HANG_S):
        commitments = [await http.commitments.get() for _ in range(4)]
    completion = make_completion(1)
    assert {member for member, _ in commitments} == {f"http://m{n}" for n in range(1, 5)}
    assert {(p.execution_id, p.node, p.end, p.root) for _, p in commitments} == {
        (completion.execution_id, NODE, completion.end, completion.root())
    }
    assert http.told.empty()
    chain.open.clear()
    assert len(await hear(http, 4)) == 4


async def test_a_commitment_waits_for_its_plan_and_delays_no_other(
    reporter: Reporter, chain: FakeChain, http: FakeHttp
) -> None:
    late = make_completion(1).execution_id
    chain.status[late] = Status.REQUESTED
    await submit(reporter, 1, 2)
    assert {n for _, n in await hear(http, 4)} == {2}
    chain.status[late] = Status.PLANNED
    assert {n for _, n in await hear(http, 4)} == {1}


async def test_f12_reports_wait_for_a_chain_that_is_down(
    reporter: Reporter, chain: FakeChain, http: FakeHttp
) -> None:
    chain.down = 10
    await submit(reporter, 1)
    assert len(await hear(http, 4)) == 4


@pytest.mark.parametrize("step_s", [-300, 300, 3_000])
async def test_f24_a_changed_system_clock_does_not_end_a_report(
    tmp_path: Path,
    chain: FakeChain,
    http: FakeHttp,
    monkeypatch: pytest.MonkeyPatch,
    step_s: int,
) -> None:
    """The members are asked until the deadline, which is the chain's and not this machine's."""
    http.deaf = {member.endpoint for member in COMMITTEE.members}
    real = time.time
    async with run(tmp_path, chain, http) as reporter:
        await submit(reporter, 1)
        monkeypatch.setattr(time, "time", lambda: real() + step_s)
        http.asked.clear()
        async with asyncio.timeout(HANG_S):
            await http.asked.wait()
        http.deaf.clear()
        assert len(await hear(http, 4)) == 4


async def test_nothing_is_revealed_before_a_quorum_says_so(
    reporter: Reporter, http: FakeHttp, chain: FakeChain
) -> None:
    """Neither f dishonest members nor a commitment on chain make a node reveal its digests."""
    http.due = {"http://m1", "http://m2"}
    await submit(reporter, 1)
    for _ in range(8):  # two rounds of asking four members
        http.asked.clear()
        async with asyncio.timeout(HANG_S):
            await http.asked.wait()
    assert http.told.empty()
    http.due.add("http://m3")
    assert len(await hear(http, 4)) == 4


async def test_s41_a_completion_is_revealed_as_long_as_members_may_wait_for_it(
    reporter: Reporter, http: FakeHttp
) -> None:
    """Else who is silent in a long verification would have honest executors count as silent."""
    wait_s = limits.VERIFICATION_GRACE_S * limits.RULING_GRACE_BPS // 10_000
    await submit(reporter, 1, left_s=-wait_s)
    number = make_completion(1).execution_id
    assert await hear(http, 4) == {(f"http://m{n}", int(number, 16)) for n in range(1, 5)}


async def test_a_closed_execution_is_not_revealed(
    reporter: Reporter, http: FakeHttp, chain: FakeChain
) -> None:
    http.over = True
    await submit(reporter, 1)
    async with asyncio.timeout(HANG_S):
        await http.asked.wait()
    await finish(reporter)
    assert http.told.empty()


async def test_an_execution_settled_without_this_node_is_given_up(
    reporter: Reporter, chain: FakeChain, http: FakeHttp
) -> None:
    chain.status[make_completion(1).execution_id] = Status.REFUNDED
    await submit(reporter, 1, 2)
    assert {n for _, n in await hear(http, 4)} == {2}


async def test_a_member_that_did_not_answer_gets_the_message_again(
    reporter: Reporter, http: FakeHttp
) -> None:
    http.deaf.add("http://m1")
    await submit(reporter, 1)
    assert {url for url, _ in await hear(http, 3)} == {"http://m2", "http://m3", "http://m4"}
    http.deaf.clear()
    assert await hear(http, 1) == {("http://m1", 1)}


async def test_f03_restart_reveals_what_was_committed_and_commits_what_was_not(
    tmp_path: Path, chain: FakeChain, http: FakeHttp
) -> None:
    for number in (1, 2):
        chain.status[make_completion(number).execution_id] = Status.REQUESTED
    async with run(tmp_path, chain, http) as reporter:
        await submit(reporter, 1, 2)
    assert http.told.empty()
    chain.status.clear()
    async with run(tmp_path, chain, http) as reporter:
        assert {n for _, n in await hear(http, 8)} == {1, 2}
        await finish(reporter)
    async with run(tmp_path, chain, http) as reporter:
        await submit(reporter, 3)
        assert {n for _, n in await hear(http, 4)} == {3}  # the others are done with


async def test_second_completion_of_an_execution_does_not_replace_the_first(
    tmp_path: Path, chain: FakeChain, http: FakeHttp
) -> None:
    async with run(tmp_path, chain, http) as reporter:
        await submit(reporter, 1)
        await hear(http, 4)
        other = make_completion(1).model_copy(update={"salt": "0x" + "ff" * 32})
        await reporter.submit([other], int(time.time()) + 60)
        await hear(http, 4)
    sent = {http.commitments.get_nowait()[1].root for _ in range(http.commitments.qsize())}
    assert sent == {make_completion(1).root()}


async def test_counts_of_steps_are_one_message_beside_those_for_the_clients_ends(
    reporter: Reporter, http: FakeHttp
) -> None:
    """At once, as no final end is there; the root of every number is in them."""
    ended = make_completion(1)
    execution_id = ended.execution_id
    counted = [ended.model_copy(update={"end": make_count(execution_id, n)}) for n in (23, 22, 21)]
    end = ended.end.end.model_copy(update={"steps": 16, "final": False})
    interim = ended.model_copy(update={"end": ended.end.model_copy(update={"end": end})})
    deadline_s = int(time.time()) + 60
    await reporter.submit([*counted, interim], deadline_s, "c0ffee")
    async with asyncio.timeout(HANG_S):
        sent = [(await http.commitments.get())[1] for _ in range(2 * len(COMMITTEE.members))]
    for one in sent:
        if one.end.is_count:
            roots = (one.root, *one.earlier)
            assert roots == tuple(completion.root() for completion in counted)
            assert one.order == "c0ffee" and one.end == counted[0].end
        else:
            assert (one.root, one.end) == (interim.root(), interim.end)
            assert not one.earlier and not one.order
    assert len({one.root for one in sent}) == 2


async def test_s53_what_a_failed_execution_earned_is_told_when_the_deadline_is_near(
    reporter: Reporter, http: FakeHttp, chain: FakeChain
) -> None:
    """And only as long as the members have agreed on nothing: whoever came after it may have."""
    now_s = int(time.time())
    chain.open = {make_completion(number).execution_id for number in (1, 2)}
    await reporter.submit([make_completion(3)], now_s, is_held=True)
    await reporter.submit([make_completion(1)], now_s + 60, is_held=True)
    await reporter.submit([make_completion(2)], now_s + int(tuning.STOP_MARGIN_S), is_held=True)
    async with asyncio.timeout(HANG_S):
        sent = {(await http.commitments.get())[1].root for _ in COMMITTEE.members}
    assert sent == {make_completion(2).root()} and http.commitments.empty()
    assert {number for _, number in await hear(http, 4)} == {3}  # it may have told that before


async def test_s63_who_takes_a_task_over_tells_the_members_and_stops_when_they_have_agreed(
    reporter: Reporter, chain: FakeChain, http: FakeHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it computes after that is not paid."""
    monkeypatch.setattr(tuning, "REPORT_RETRY_S", 0.02)
    number = make_completion(1).execution_id
    takeover = Takeover(execution_id=number, task=0, candidate=1, first_step=0)
    signed = SignedTakeover(takeover=takeover, signature="0x" + "11" * 64)
    message = Takeovers(execution_id=number, node=NODE, takeovers=(signed,))
    chain.open, stopped, deadline_s = {number}, asyncio.Event(), int(time.time()) + 60
    await reporter.tell_takeovers(message, deadline_s)
    work = reporter.watch_taken(number, deadline_s, lambda: False, stopped.set)
    watching = asyncio.create_task(work)
    async with asyncio.timeout(HANG_S):
        assert {await http.shown.get() for _ in range(4)} == {f"http://m{m}" for m in range(1, 5)}
        assert not stopped.is_set()
        chain.open.clear()
        await stopped.wait()
        await watching


async def test_reported_completions_are_deleted_from_the_journal_after_their_deadline(
    tmp_path: Path, chain: FakeChain, http: FakeHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GRANT_GRACE_S", 0)
    async with run(tmp_path, chain, http) as reporter:
        await submit(reporter, 1, left_s=60)
        await hear(http, 4)
        await finish(reporter)
    chain.clock.observe(1, 4_000_000_000)
    async with run(tmp_path, chain, http) as reporter:
        assert reporter._journal.items("completion") == []


async def test_takeovers_are_sent_to_all_members_before_the_commitment_and_again_after_a_restart(
    reporter: Reporter, chain: FakeChain, http: FakeHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted member has forgotten them, and answers that it has no draw."""
    monkeypatch.setattr(tuning, "ATTESTATION_POLL_MAX_S", 0.02)
    http.due.clear()
    http.undrawn = {"http://m2"}
    number = make_completion(1).execution_id
    chain.status[number] = Status.REQUESTED
    takeover = Takeover(execution_id=number, task=0, candidate=1, first_step=0)
    signed = SignedTakeover(takeover=takeover, signature="0x" + "11" * 64)
    completion = make_completion(1).model_copy(update={"takeovers": (signed,)})
    await reporter.submit([completion], int(time.time()) + 60)
    async with asyncio.timeout(HANG_S):
        assert {await http.shown.get() for _ in range(4)} == {f"http://m{m}" for m in range(1, 5)}
        chain.status[number] = Status.PLANNED
        while [await http.shown.get() for _ in range(3)] != ["http://m2"] * 3:
            pass
    assert http.told.empty()
    http.undrawn.clear()
    http.due = {member.endpoint for member in COMMITTEE.members}
    assert len(await hear(http, 4)) == 4


async def test_f08_a_member_that_hangs_delays_nobody(http: FakeHttp) -> None:
    committee_client = CommitteeClient(http, fetch_committee)  # type: ignore[arg-type]
    http.hung = {COMMITTEE.members[0].endpoint}
    completion, done = make_completion(1), set[str]()
    async with asyncio.timeout(HANG_S):
        assert await committee_client.send_once(api.COMPLETION, completion, done)
        assert await committee_client.wait_until_due(completion.execution_id, None, math.inf)
    assert done == {member.account for member in COMMITTEE.members[1:]}


async def test_all_who_wait_for_an_execution_ask_f_plus_1_members_together_until_one_has_news(
    http: FakeHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "REPORT_RETRY_S", 0.01)
    monkeypatch.setattr(tuning, "ATTESTATION_POLL_MAX_S", 0.01)
    committee_client = CommitteeClient(http, fetch_committee)  # type: ignore[arg-type]
    number, http.due = make_completion(1).execution_id, set()
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as group:
        waiting = [
            group.create_task(committee_client.wait_until_due(number, None, math.inf))
            for _ in range(3)
        ]
        turns = [{await http.asks.get(), await http.asks.get()} for _ in range(6)]
        assert turns == [{"http://m1", "http://m2"}, {"http://m3", "http://m4"}] * 3
        http.due = {"http://m1", "http://m2"}  # no quorum: one of them may lie
        for _ in range(http.asks.qsize() + 12):
            await http.asks.get()
        assert not any(task.done() for task in waiting)
        http.due.add("http://m4")
    assert [task.result() for task in waiting] == [1, 1, 1]
    assert not committee_client._hearings


async def test_a_validator_that_waits_beside_others_reveals_once_its_own_commitment_is_fixed(
    http: FakeHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "REPORT_RETRY_S", 0.01)
    monkeypatch.setattr(tuning, "ATTESTATION_POLL_MAX_S", 0.01)
    committee_client = CommitteeClient(http, fetch_committee)  # type: ignore[arg-type]
    number = make_completion(1).execution_id
    announced = ValidatorCommitment(
        execution_id=number, task=0, validator=NODE, root="0x" + "22" * 32
    )
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as group:
        wait = committee_client.wait_until_due
        validator = group.create_task(wait(number, announced, math.inf))
        assert await wait(number, None, math.inf) == 1
        for _ in range(http.asks.qsize() + 8):
            await http.asks.get()
        assert not validator.done()
        http.held = (Held(task=0, validator=NODE, root=announced.root),)
    assert validator.result() == 1


async def test_s116_a_member_answers_a_waiting_node_no_more_than_it_asked(
    http: FakeHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lied answered 8 MiB, every second, about each execution that a node waits for."""
    monkeypatch.setattr(tuning, "REPORT_RETRY_S", 0.01)
    committee_client = CommitteeClient(http, fetch_committee)  # type: ignore[arg-type]
    number = "0x" + "ff" * 32
    tasks = range(limits.MAX_TASKS - 3, limits.MAX_TASKS)
    roots = {task: "0x" + f"{task:064x}" for task in tasks}
    http.held = tuple(
        Held(task=task, validator=validator, root=root)
        for task, root in roots.items()
        for validator in (NODE, "0x" + "77" * 20)
    )
    async with asyncio.timeout(HANG_S):
        assert await committee_client.wait_until_due(number, None, math.inf) == 1
        assert max(http.most_bytes) <= 1_024
        await asyncio.gather(
            *(
                committee_client.wait_until_due(
                    number,
                    ValidatorCommitment(execution_id=number, task=t, validator=NODE, root=root),
                    math.inf,
                )
                for t, root in roots.items()
            )
        )
    assert 1_024 < max(http.most_bytes) <= 1_024 + 3 * 256


@pytest.mark.parametrize("is_watched", [False, True])
async def test_s113_an_execution_that_stays_open_takes_few_calls_of_the_endpoint(
    is_watched: bool, tmp_path: Path, chain: FakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may leave thousands open for a day each; there were four calls a second of each.

    What the deadline needs is sent in time all the same.
    """
    now_s, looks, told = 0.0, list[float](), list[tuple[float, int]]()
    sleep, call, execution_id = asyncio.sleep, chain.call, make_completion(1).execution_id

    async def pass_time(seconds: float) -> None:
        nonlocal now_s
        await sleep(0)  # what is to be sent now is sent
        now_s += seconds

    async def note_call(contract: str, function: str, execution_id: str) -> Any:
        looks.append(now_s)
        assert len(looks) < DAY_S / tuning.CLOCK_PERIOD_S + 300
        return await call(contract, function, execution_id)

    async def note_sent(route: Any, message: Any, give_up_s: float) -> bool:
        told.append((now_s, message.end.end.steps))
        return True

    monkeypatch.setattr(asyncio, "sleep", pass_time)
    monkeypatch.setattr(tuning, "REPORT_RETRY_S", 0.25)
    monkeypatch.setattr(chain, "call", note_call)
    chain.clock = SimpleNamespace(now_s=lambda: now_s)  # type: ignore[assignment]
    chain.open.add(execution_id)
    client = SimpleNamespace(spread=note_sent)
    with Journal.open(tmp_path) as journal:
        reporter = Reporter(journal, chain, client)  # type: ignore[arg-type]
        if is_watched:
            await reporter.watch_taken(execution_id, DAY_S, lambda: False, lambda: None)
        else:
            final = make_completion(1)
            interim = final.end.model_copy(
                update={"end": final.end.end.model_copy(update={"steps": 2, "final": False})}
            )
            earlier = (final.model_copy(update={"end": interim}),)
            give_up_s = DAY_S + limits.GRANT_GRACE_S
            await reporter._report(CompletionReport(final, earlier, "", give_up_s, False))
            await reporter._background.close()
    assert sum(at_s < 5 for at_s in looks) >= 15, "most executions are settled soon"
    if not is_watched:
        (_, final_steps), (late_s, interim_steps) = told
        assert (final_steps, interim_steps) == (1, 2)
        assert DAY_S - tuning.STOP_MARGIN_S <= late_s < DAY_S - tuning.AGREE_MARGIN_S
