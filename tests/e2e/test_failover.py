"""Nodes that die, stop or hang in the middle of a generation, on real processes.

The tokens are those of an undisturbed run. The longest pause is printed; on a machine that does
nothing else it stays below 1 s.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
from splitup_node.status_file import read_status

from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.decode.sampler import Sampler
from splitup.decode.sequential import SequentialDecoder
from tests.builders import HANG_S
from tests.e2e.conftest import DRAFT, EXAMPLE, MODEL, Network
from tests.texts import PROMPT, Disturb, Text, generate_text

TOKENS = 60  # half a second after each third of it something has happened


async def generate(
    network: Network,
    disturb: Disturb = lambda session, count: None,
    *,
    mend: Callable[[], None] = lambda: None,
    max_tokens: int = TOKENS,
) -> Text:
    """Generate, ``mend`` after the last token, and see that it was verified and paid."""
    async with SplitUp.connect(network.config) as net:
        done = await generate_text(net, disturb, deadline_s=240, max_tokens=max_tokens)
        mend()
        session = done.session
        receipt = await net.receipt(session.execution_id)
        assert receipt.status == "settled" and receipt.steps == session.steps
        assert not receipt.slashes
        paid = {payment.account for payment in receipt.payments}
        assert set(session.executors) <= paid
    return done


@pytest.fixture(scope="module")
def undisturbed(network: Network) -> list[int]:
    tokens = asyncio.run(generate(network)).tokens
    assert len(tokens) == TOKENS
    return tokens


@pytest.mark.long  # in small: a killed node below, and drafts in test_network.py
def test_f26_speculation_in_eight_texts_at_once_survives_a_killed_node(network: Network) -> None:
    """Every text is the sequential one, with trees on their way when the node dies."""
    network.register_model(EXAMPLE.with_name(DRAFT), DRAFT, "--target-vram", "100MB")
    killed: list[str] = []
    count, tokens = 8, 20

    async def speculate(net: SplitUp, seed: int, sampler: Sampler) -> list[int]:
        sessions: list[Session] = []
        found: list[int] = []
        async for token in net.generate(
            MODEL,
            PROMPT,
            max_tokens=tokens,
            temperature=sampler.temperature,
            seed=seed,
            decoder="speculative",
            draft=DRAFT,
            deadline_s=240,
            on_session=sessions.append,
        ):
            found.append(token.id)
            if not killed and len(found) >= tokens // 3:
                executors = sessions[0].executors
                killed.append(network.name_of(executors[len(executors) // 2]))
                network.kill(killed[0])
        return found

    async def run() -> None:
        async with SplitUp.connect(network.config) as net:
            samplers = [Sampler(0.8 * (seed % 2), seed) for seed in range(count)]
            wanted = [await generate_here(net, sampler, tokens) for sampler in samplers]
            texts = (speculate(net, seed, samplers[seed]) for seed in range(count))
            assert await asyncio.gather(*texts) == wanted

    try:
        asyncio.run(run())
    finally:
        network.start_again(*killed)
    assert killed


async def generate_here(net: SplitUp, sampler: Sampler, max_tokens: int) -> list[int]:
    """Return the sequential decoder's text, computed on this machine alone."""
    model, local = await net.fetch_text_model(MODEL), await net.open_local(MODEL)
    prompt = await model.tokenizer.run(partial(model.tokenizer.encode, PROMPT))
    decoder = SequentialDecoder(model.make_request(prompt, max_tokens=max_tokens, sampler=sampler))
    found: list[int] = []
    number = 0
    while (step := decoder.next_step()) is not None:
        found += decoder.receive_logits(number, await local.compute(step))
        number += 1
    await local.end()
    return found


@pytest.mark.long  # in small: tests/node/execution/test_takeover.py has two takeovers in sequence
def test_f26_two_nodes_killed_in_sequence(network: Network, undisturbed: list[int]) -> None:
    killed: list[str] = []

    def disturb(session: Session, count: int) -> None:
        if count in (len(undisturbed) // 3, 2 * len(undisturbed) // 3):
            # the second is a node that has taken over from the first, where there is one
            before = session.plan.executors()
            changed = [n for n, old in zip(session.executors, before, strict=True) if n != old]
            killed.append(network.name_of((changed or before)[0]))
            network.kill(killed[-1])

    try:
        done = asyncio.run(generate(network, disturb, mend=lambda: network.revive(*killed)))
    finally:
        network.start_again(*killed)
    print(f"two: gap {done.gap_s:.2f} s, {done.session.takeovers} takeovers")
    assert done.tokens == undisturbed and len(set(killed)) == 2


@pytest.mark.long  # in small: tests/node/execution/test_takeover.py
def test_f04_stopped_node_is_replaced_and_its_late_word_ignored(
    network: Network, undisturbed: list[int]
) -> None:
    stopped: list[int] = []

    def disturb(session: Session, count: int) -> None:
        if count == len(undisturbed) // 3:
            stopped.append(network.pid_of(network.name_of(session.executors[2])))
            os.kill(stopped[0], signal.SIGSTOP)
        if session.takeovers and count == 2 * len(undisturbed) // 3:
            os.kill(stopped[0], signal.SIGCONT)

    try:
        done = asyncio.run(generate(network, disturb))
    finally:
        os.kill(stopped[0], signal.SIGCONT)
    print(f"stopped: gap {done.gap_s:.2f} s, {done.session.takeovers} takeovers")
    assert done.tokens == undisturbed and done.gap_s <= HANG_S


def test_f12_f20_chain_and_store_that_hang_cost_no_token(
    network: Network, undisturbed: list[int]
) -> None:
    """Payments and logs wait for them; steps do not."""
    hung = [network.pid_of("chain"), network.find_store()]

    def disturb(session: Session, count: int) -> None:
        if count == len(undisturbed) // 3:
            for pid in hung:
                os.kill(pid, signal.SIGSTOP)
        if count == 2 * len(undisturbed) // 3:
            for pid in hung:
                os.kill(pid, signal.SIGCONT)

    try:
        done = asyncio.run(generate(network, disturb))
    finally:
        for pid in hung:
            os.kill(pid, signal.SIGCONT)
    assert done.tokens == undisturbed and not done.session.takeovers


@pytest.mark.long  # in small: tests/node/committee/test_reachability.py and tests/net/test_relay.py
def test_nodes_behind_a_relay_give_the_same_tokens(
    network: Network, undisturbed: list[int]
) -> None:
    """Two of five nodes are reached through a member only; frames, logs and pay are as ever."""
    names = ["node-2", "node-3"]
    files = {name: network.directory / name / "node.toml" for name in names}
    direct = {name: file.read_text() for name, file in files.items()}
    relay = json.loads(network.config.read_text())["members"][0]
    try:
        for name, file in files.items():
            file.write_text(f'relay = "{relay}"\n{direct[name]}')
        network.restart(*names)
        for _ in range(20):  # of seven tasks, or before the plan knows of the relay
            done = asyncio.run(generate(network))
            assert done.tokens == undisturbed
            plan = done.session.plan
            relayed = {entry.node for entry in plan.nodes if "/v1/relay/" in entry.endpoint}
            if relayed & set(done.session.executors):
                break
        assert relayed & set(done.session.executors)
        statuses = [read_status(network.directory / name) for name in names]
        assert [status.values["relay"] for status in statuses] == [relay] * 2
    finally:
        for name, file in files.items():
            file.write_text(direct[name])
        network.restart(*names)


@pytest.mark.parametrize(
    "position",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("first", "middle")), "last"],
)
def test_f26_killed_node_costs_a_pause_and_no_token(
    network: Network, undisturbed: list[int], position: str
) -> None:
    """Others are back to answer for what they did before; one stays down, also in later tests.

    It starts again in test_restart.py, where it loads all models once for two tests.
    """
    killed: list[str] = []

    def disturb(session: Session, count: int) -> None:
        if count == len(undisturbed) // 2:
            place = {"first": 0, "middle": len(session.executors) // 2, "last": -1}[position]
            killed.append(network.name_of(session.executors[place]))
            network.kill(killed[0])

    def mend() -> None:
        if position != "last":
            network.revive(*killed)

    try:
        done = asyncio.run(generate(network, disturb, mend=mend))
    finally:
        if position == "last":
            network.wait_until_gone(*killed)
        else:
            network.start_again(*killed)
    assert done.tokens == undisturbed
    assert done.session.takeovers >= 1
    print(f"{position}: gap {done.gap_s:.2f} s, {done.session.takeovers} takeovers")
    assert done.gap_s <= HANG_S
