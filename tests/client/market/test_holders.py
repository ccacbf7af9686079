"""Waiting for nodes that load a model: on a clock of the test's own, and at members of its own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from splitup.client.market.holders import (
    Patience,
    describe_holders,
    find_believable,
    is_held,
    wait_until_held,
)
from splitup.core import tuning
from splitup.core.errors import Unavailable
from splitup.messages.snapshots import ModelHolders
from splitup.net.http import SignedClient
from splitup.net.http_server import error_reply
from splitup.protocol.committee.certificates import CommitteeView
from tests.client.market.test_plan_requests import serve_committee
from tests.client.parties import always

MODEL = "0x" + "11" * 32


def see(held: int, **figures: Any) -> ModelHolders:
    known = {"tasks": 12, "reported": held, "loading": 0, "able": 1, "live": 6, **figures}
    return ModelHolders(model_id=MODEL, held=held, **known)


def test_a_client_waits_as_long_as_a_node_loads() -> None:
    patience = Patience("m", 0.0)
    texts = [patience.note(see(0, loading=1), 0.0)]
    for second in range(1, 300):
        texts.append(patience.note(see(second // 30, loading=int(second % 47 > 0)), float(second)))
    told = [text for text in texts if text]
    assert told == [f"loading {count} of 12 tasks of m" for count in range(10)]


def test_what_the_chain_has_learnt_alone_is_progress_but_no_news() -> None:
    patience = Patience("m", 0.0)
    assert patience.note(see(1, reported=5, loading=1), 0.0) == "loading 5 of 12 tasks of m"
    assert patience.note(see(4, reported=5, loading=1), 10.0) == ""
    assert patience.note(see(4, reported=5), 9.9 + tuning.HOLDERS_QUIET_S) == ""


def test_it_gives_up_when_no_node_goes_on_and_says_why() -> None:
    patience = Patience("m", 0.0)
    told = patience.note(see(7), 10.0)
    assert told == "loading 7 of 12 tasks of m: none of 6 live nodes is loading one"
    assert patience.note(see(7), 9.9 + tuning.HOLDERS_QUIET_S) == ""
    with pytest.raises(Unavailable, match=r"none of 6 live nodes has memory.*nothing was paid"):
        patience.note(see(7, able=0), 10.0 + tuning.HOLDERS_QUIET_S)
    patience = Patience("m", 0.0)
    patience.note(see(0, live=0, able=0), 0.0)
    with pytest.raises(Unavailable, match="no node is live"):
        patience.note(see(0, live=0, able=0), tuning.HOLDERS_QUIET_S)


def test_a_node_that_always_says_that_it_loads_is_not_believed_for_ever() -> None:
    patience = Patience("m", 0.0)
    patience.note(see(7, loading=1), 0.0)
    assert patience.note(see(7, loading=1), tuning.LOAD_QUIET_S - 1) == ""
    with pytest.raises(Unavailable):
        patience.note(see(7, loading=1), tuning.LOAD_QUIET_S)


def test_what_one_member_states_alone_does_not_count() -> None:
    liar = see(12, loading=10_000)
    found = find_believable([liar, see(7, loading=1), see(6, loading=1), see(7)], 1)
    assert found is not None and (found.held, found.loading) == (7, 1)
    assert not is_held(found) and is_held(liar) and not is_held(see(0, tasks=0))
    assert find_believable([], 1) is None


@asynccontextmanager
async def serve_members(answers: Sequence[list[ModelHolders]]) -> AsyncIterator[CommitteeView]:
    """Serve members that give their answers one after the other; one without any knows no route."""

    def answer(_: web.Request, own: list[ModelHolders]) -> web.Response:
        if not own:
            return error_reply(404, "no such route")
        found = own.pop(0) if len(own) > 1 else own[0]
        return web.Response(body=found.canonical_bytes(), content_type="application/json")

    async with serve_committee("/v1/models/{id}/holders", answers, answer) as committee:
        yield committee


async def test_the_client_asks_again_until_an_honest_member_sees_all_tasks_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "HOLDERS_POLL_S", 0.0)
    caplog.set_level(logging.WARNING, "splitup.client.holders")
    honest = [see(0, tasks=0, loading=1), see(7, loading=1), see(7, reported=12), see(12)]
    answers = [[see(12)], list(honest), list(honest), list(honest)]  # the first one lies
    async with serve_members(answers) as committee, SignedClient() as http:
        await wait_until_held(http, always(committee), "m", MODEL)
    assert [record.getMessage() for record in caplog.records] == [
        "the committee does not know model m yet",
        "loading 7 of 12 tasks of m",
        "all 12 tasks of m are loaded; waiting for the chain to list their nodes",
    ]


async def test_members_without_an_answer_are_no_obstacle() -> None:
    async with serve_members([[], [], [see(0)], [see(0)]]) as committee, SignedClient() as http:
        await wait_until_held(http, always(committee), "m", MODEL)


def test_what_is_loaded_is_never_more_than_all() -> None:
    liar = see(held=0, tasks=12, reported=999, loading=1)
    said = describe_holders(liar)
    assert said == "all 12 tasks are loaded; waiting for the chain to list their nodes"


def test_a_model_that_the_committee_does_not_know_yet_is_not_called_loaded() -> None:
    assert describe_holders(see(0, tasks=0)) == "the committee does not know it yet"
