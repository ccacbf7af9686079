"""The whole market on real processes, in the order of the tests: each leaves the network usable."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from splitup.chain.earnings import fetch_days
from splitup.chain.market import distribute
from splitup.chain.models import RecordedModels, encode_edges, encode_tasks
from splitup.chain.rpc import Rpc
from splitup.cli.verbs import app
from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.client.market.receipts import Receipt
from splitup.client.outcome import Result, compute_percentile, compute_transitions
from splitup.config import NetworkConfig
from splitup.core import limits
from splitup.core.codec import compute_digest
from splitup.core.errors import ChainRejected, ExecutionFailed, InvalidInput, InvalidModel
from splitup.crypto.keys import Identity, generate_identity
from splitup.decode.speculation.lookahead import LookaheadOptions
from splitup.decode.step import make_arrays, make_causal_step
from splitup.demo import run as demo
from splitup.devnet.funding import GIFT_WEI
from splitup.devnet.processes import find_program
from splitup.graph.manifest import Manifest, get_manifest_key
from splitup.graph.manifest_rules import load_manifest
from splitup.messages.storage import UploadObject
from tests.builders import HANG_S
from tests.e2e.conftest import CHUNK, DRAFT, EXAMPLE, MODEL, Network, wait_for

KILLED_CLIENT = Path(__file__).with_name("killed_client.py")
PROMPT = "library for"


def make_inputs(steps: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return steps of one token each, with a leading step axis."""
    tokens = np.random.default_rng(7).integers(3, 2048, steps)
    rows = [make_arrays(make_causal_step([int(t)], place), CHUNK) for place, t in enumerate(tokens)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def compute_reference(directory: Path, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Run the uncut model in a process of its own."""
    steps, outputs = directory / "steps.npz", directory / "outputs.npz"
    count = len(inputs["tokens"])
    np.savez(steps, **{f"{i}/{name}": inputs[name][i] for i in range(count) for name in inputs})
    subprocess.run(
        [sys.executable, "-m", "splitup_deploy.uncut_model", EXAMPLE, steps, outputs, str(CHUNK)],
        check=True,
        capture_output=True,
    )
    with np.load(outputs, allow_pickle=False) as arrays:
        return np.stack([arrays[f"{step}/logits"] for step in range(count)])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, Any]:
    """What the uncut model gives for as many steps as any test runs."""
    return compute_reference(tmp_path_factory.mktemp("uncut"), make_inputs(12))


async def execute(network: Network, steps: int, **options: Any) -> Result:
    async with SplitUp.connect(network.config) as net:
        return await net.execute(MODEL, make_inputs(steps), **options)


def run_cli(network: Network, *arguments: str) -> dict[str, Any]:
    """Run the command line in this process; return its JSON object."""
    done = CliRunner().invoke(app, [*arguments, "--config", str(network.directory), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_execution_equals_the_uncut_model_and_is_verified_and_paid(
    network: Network, expected: np.ndarray[Any, Any]
) -> None:
    inputs = make_inputs(12)
    async with SplitUp.connect(network.config) as net:
        before = await net.chain.call("market", "balanceOf", net.address)
        result = await net.execute(MODEL, inputs)
        receipt = await result.receipt
        evidence = await net.evidence(receipt)
        row = await net.chain.call("market", "executionOf", result.execution_id)
        locked = row["maxPrice"]
        after = await net.chain.call("market", "balanceOf", net.address)
        await check_distribution(net, result, receipt)
    assert result.outputs["logits"].tobytes() == expected.tobytes()
    tasks = len(result.manifest.tasks)
    assert len({(event.task, event.step) for event in result.trace}) == tasks * 12
    transitions = [t.nanoseconds for t in compute_transitions(result.manifest, result.trace)]
    assert min(transitions) > 0
    assert compute_percentile(transitions, 50) < HANG_S * 1e9
    # every task is verified here, so that everybody's work is paid twice over: done and checked
    assert receipt.status == "settled" and receipt.steps == 12
    assert not receipt.slashes
    assert [entry.task for entry in evidence.verdicts] == list(range(tasks))
    assert {entry.outcome for entry in evidence.verdicts} == {"honest"}
    assert receipt.paid_micro_usdc == 2 * sum(t.pay_micro_usdc(12) for t in result.manifest.tasks)
    least = receipt.paid_micro_usdc // 100
    assert least <= receipt.fee_micro_usdc <= max(least, row["reservation"])
    # what was missing of the price was deposited, and not more
    assert after == max(before, locked) - locked + receipt.refunded_micro_usdc


async def check_distribution(net: SplitUp, result: Result, receipt: Receipt) -> None:
    """Anybody credits what the settlement decided, and the executors' stake is free again."""
    executor = result.nodes[0]
    entry = await net.chain.call("nodes", "nodeOf", executor)
    exposed = dict(result.plan.exposures())[executor]
    assert entry["locked"] >= exposed > 0
    earned = await net.chain.call("market", "balanceOf", executor)
    assert (await distribute(net.chain, executor)).executions >= 1
    assert (await net.chain.call("nodes", "nodeOf", executor))["locked"] == 0
    amount = next(p.amount_micro_usdc for p in receipt.payments if p.account == executor)
    assert await net.chain.call("market", "balanceOf", executor) >= earned + amount
    days = await fetch_days(net.chain, executor, days=2, now_s=time.time())  # it may be midnight
    assert sum(day.executions for day in days) >= 1
    assert sum(day.paid for day in days) >= amount


@pytest.mark.long  # in small: market/test_signed_request.py
async def test_a_frozen_balance_starts_executions_without_waiting_for_a_block(
    network: Network,
) -> None:
    inputs = make_inputs(2)
    async with SplitUp.connect(network.config) as rich:
        expected = (await rich.execute(MODEL, inputs)).outputs["logits"]
        net = SplitUp(rich.config, Identity.from_private_key((0xF0).to_bytes(32)))
        async with Rpc(rich.config.rpc_url) as rpc:
            await rpc.request("anvil_setBalance", net.address, hex(10**18))
        await rich.chain.send("usdc", "mint", net.address, 50_000_000)
    async with net:
        await net.deposit(42)
        assert await net.withdraw(2) == 2_000_000
        with pytest.raises(InvalidInput, match="the deposit is 40 USDC"):
            await net.withdraw(41)
        until = await net.freeze(1_500)
        with pytest.raises(ChainRejected, match="is frozen for signed requests until"):
            await net.withdraw()
        assert await net.chain.call("market", "frozenUntil", net.address) == until
        with pytest.raises(InvalidInput, match="freeze it for longer"):
            await net.execute(MODEL, inputs, deadline_s=1_700)
        results = await asyncio.gather(*(net.execute(MODEL, inputs) for _ in range(2)))
        for result in results:
            np.testing.assert_array_equal(result.outputs["logits"], expected)
            receipt = await result.receipt
            assert receipt.status == "settled"
        events = await net.chain.fetch_events("market")
        for result in results:  # one transaction asks and plans
            mine = [e for e in events if e.args.get("executionId") == result.execution_id]
            assert [e.name for e in mine[:2]] == ["RequestNodeSelections", "PlanAccepted"]
            assert mine[0].transaction == mine[1].transaction


def test_command_line_runs_and_tells_the_receipt(
    network: Network, expected: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    inputs = make_inputs(3)
    for name, array in inputs.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = [f"--input={name}={tmp_path / name}.npy" for name in inputs]
    report = run_cli(network, "run", MODEL, *files, "--output", str(tmp_path / "out"))
    logits = np.load(tmp_path / "out" / "logits.npy")
    assert report["outputs"]["logits"]["shape"] == list(logits.shape) == [3, 1, 2048]
    assert logits.tobytes() == expected[:3].tobytes()
    assert run_cli(network, "receipt", report["execution_id"])["status"] == "settled"
    checked = run_cli(network, "check", report["execution_id"])
    assert (checked["difference"], checked["reported"]) == ("", {})
    assert len(checked["signers"]) >= 3


@pytest.mark.long  # in small: the front door compares its text with that of the SDK
def test_synchronous_generation_repeats_itself(network: Network) -> None:
    with SplitUp.connect_sync(network.config) as net:
        options = {"max_tokens": 6, "temperature": 0.8, "seed": 5}
        first = [token.id for token in net.generate(MODEL, PROMPT, **options)]
        again = [token.id for token in net.generate(MODEL, PROMPT, **options)]
        guessed = [
            token.id
            for token in net.generate(
                MODEL, PROMPT, decoder="lookahead", lookahead=LookaheadOptions(2, 3, 2), **options
            )
        ]
    assert first == again == guessed
    assert 1 <= len(first) <= 6


@pytest.mark.long  # in small: tests/decode/test_speculative.py, client/text/test_drafting.py
@pytest.mark.parametrize(
    ("draft", "prompt", "options"),
    [
        (None, "Package: python3-", {"max_tokens": 60}),  # a text that repeats itself
        pytest.param(  # in small: client/text/test_drafting.py, and decode/test_speculative.py
            DRAFT,
            PROMPT,
            {"max_tokens": 24, "temperature": 0.8, "seed": 5},
            marks=pytest.mark.long,
        ),
    ],
)
async def test_drafts_on_this_machine_give_the_same_text_in_fewer_steps(
    network: Network, tmp_path: Path, draft: str | None, prompt: str, options: dict[str, Any]
) -> None:
    """A draft model is a registered one; the tree steps are verified and paid like any others."""
    if draft is not None:
        model = EXAMPLE.with_name(draft)
        await asyncio.to_thread(network.register_model, model, draft, "--target-vram", "100MB")
    config = NetworkConfig.load(network.config, cache=tmp_path / "cache")
    sessions: list[Session] = []
    async with SplitUp.connect(config) as net:
        wanted = [token.id async for token in net.generate(MODEL, prompt, **options)]
        speculative = {"decoder": "speculative", "on_session": sessions.append}
        text = net.generate(MODEL, prompt, draft=draft, **options, **speculative)
        assert [token.id async for token in text] == wanted
        receipt = await net.receipt(sessions[0].execution_id)
        assert receipt.status == "settled" and not receipt.slashes
        assert receipt.steps == sessions[0].steps < len(wanted)
        # rows cost nothing of their own, and every step, tree or not, was recomputed and paid
        manifest, evidence = sessions[0].manifest, await net.evidence(receipt)
        assert [entry.task for entry in evidence.verdicts] == list(range(len(manifest.tasks)))
        assert {entry.outcome for entry in evidence.verdicts} == {"honest"}
        assert receipt.paid_micro_usdc == 2 * sum(
            task.pay_micro_usdc(receipt.steps) for task in manifest.tasks
        )


async def test_drafts_cost_no_more_and_what_cannot_draft_is_refused(network: Network) -> None:
    async with SplitUp.connect(network.config) as net:
        assert await net.quote_generation(MODEL, PROMPT, max_tokens=24) == (
            await net.quote_generation(MODEL, PROMPT, max_tokens=24, decoder="speculative")
        )
        with pytest.raises(InvalidInput, match="there is no model 'nobody'"):
            await anext(net.generate(MODEL, PROMPT, decoder="speculative", draft="nobody"))
        with pytest.raises(InvalidInput, match="'speculative' takes one"):
            await anext(net.generate(MODEL, PROMPT, draft=DRAFT))
        with pytest.raises(InvalidInput, match="at most 16 stop strings"):
            await anext(net.generate(MODEL, "x", stop=("",), on_session=pytest.fail))


async def test_the_demo_compares_its_text_with_the_whole_models(
    network: Network, tmp_path: Path
) -> None:
    """What ``make demo`` does on its network, and benchmarks on theirs."""
    model = replace(demo.EXAMPLE, max_tokens=4)
    async with SplitUp.connect(network.config) as net:
        made = await demo.generate(net, model)
        receipt = await net.receipt(made.session.execution_id)
        found = await demo.compare(tmp_path, EXAMPLE, made, model)
        verified = await demo.fetch_verified(net, made.session, receipt)
    assert found.equal and found.compared_bytes == made.logits.nbytes > 0
    assert made.tokens == 4 and found.reference_s > 0
    assert {entry.verdict for entry in verified} <= {"honest"}


def test_ctrl_c_ends_a_generation_and_pays_what_was_done(network: Network) -> None:
    command = [find_program("splitup"), "generate", MODEL, "--prompt", PROMPT]
    options = ["--max-tokens", "250", "--temperature", "0.8", "--seed", "7"]
    with subprocess.Popen(
        [*command, *options, "--config", network.directory],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(len(PROMPT) + 1)  # the first token is here
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate(timeout=HANG_S)
    said = talk.decode()
    assert process.returncode == 130, said
    assert "interrupted" in said and "Traceback" not in said
    money = re.search(r"cost: .*\(([0-9.]+) USDC to the nodes, .* ([0-9.]+) USDC came back", said)
    assert money is not None, said
    assert 0 < float(money[1]) < float(money[2])  # few of the 250 steps were run


@pytest.mark.long  # in small: who ends nothing pays, tests/protocol/settlement/test_unended.py
async def test_a_killed_client_pays_for_the_steps_that_it_ordered(network: Network) -> None:
    command = [sys.executable, KILLED_CLIENT, network.directory, MODEL, str(CHUNK)]
    client = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, text=True, timeout=HANG_S
    )
    assert client.returncode == -signal.SIGKILL
    execution_id, steps = client.stdout.split()
    assert limits.INTERIM_STEPS < int(steps) < 2 * limits.INTERIM_STEPS
    async with SplitUp.connect(network.config) as net:
        receipt = await net.receipt(execution_id)
    assert (receipt.status, receipt.steps) == ("settled", int(steps))
    assert receipt.paid_micro_usdc > 0 and not receipt.slashes, "nobody can recompute them"


async def test_executions_run_side_by_side(network: Network) -> None:
    async with SplitUp.connect(network.config) as net:
        runs = [net.execute(MODEL, make_inputs(steps)) for steps in (2, 5, 9)]
        results = await asyncio.gather(*runs)
    short, _, long = (result.outputs["logits"] for result in results)
    assert short.tobytes() == long[:2].tobytes()


@pytest.mark.long  # in small: protocol/planning/test_plan_agreement.py, chain/test_models.py
async def test_s01_a_copy_registered_at_another_price_is_not_computed(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has the tasks of a model that nodes serve, and a price of 0 on chain."""

    async def accept(self: RecordedModels, manifest: Manifest) -> None:
        """Do as a client that does not compare."""

    async def hurry(*_: Any) -> None:
        """Do as a client that does not wait for nodes."""

    async with SplitUp.connect(network.config) as net:
        manifest = (await net.fetch_model(MODEL)).manifest
        first, *rest = manifest.tasks
        tasks = (first.model_copy(update={"label": f"{first.label} copy"}), *rest)
        copy = load_manifest(manifest.model_copy(update={"tasks": tasks}).to_bytes())
        data = copy.to_bytes()
        item = UploadObject(
            key=get_manifest_key(copy.model_id), length_bytes=len(data), sha256=compute_digest(data)
        )
        answer = await net._gateway.upload_grants([item])
        await net._gateway.upload_object(answer.grants[0], lambda: iter([data]), lambda done: None)
        rows = [task | {"priceNanoUsdc": 0} for task in encode_tasks(copy)]
        chain = net._chain
        assert chain is not None
        await chain.send("models", "register", copy.model_id, "copy", rows, encode_edges(copy))
        with pytest.raises(InvalidModel, match="other tasks, edges or prices"):
            await net.execute(copy.model_id, make_inputs(1))
        monkeypatch.setattr(RecordedModels, "check", accept)
        monkeypatch.setattr("splitup.client.execution.opening.wait_until_held", hurry)
        await net.deposit(1)
        head = await chain.fetch_head()
        with pytest.raises(ExecutionFailed, match="was not planned") as caught:
            await net.execute(copy.model_id, make_inputs(1), deadline_s=12)
        events = await chain.fetch_events("market", from_block=head.number)
        execution_id = caught.value.execution_id
        names = {event.name for event in events if event.args.get("executionId") == execution_id}
        assert "Refunded" in names and "PlanAccepted" not in names


@pytest.mark.long  # in small: it mints test money; test_app.py of cli
async def test_whoever_brings_a_node_is_given_what_it_stakes(network: Network) -> None:
    account = generate_identity().address
    command = [find_program("splitup"), "fund", account, "--usdc", "1800", "--dir"]
    for _ in range(2):  # the second time it has ether
        await asyncio.to_thread(subprocess.run, [*command, network.directory], check=True)
    async with SplitUp.connect(network.config) as net:
        assert await net.chain.call("usdc", "balanceOf", account) == 2 * 1_800_000_000
        assert await net.chain.fetch_ether_wei(account) == GIFT_WEI


async def test_bad_input_is_one_sentence_and_costs_nothing(network: Network) -> None:
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("no-such-model", {}, {}, "there is no model 'no-such-model'"),
        ("0x" + "ab" * 32, {}, {}, "there is no model"),
        (MODEL, {"tokens": np.zeros((2, 1), np.int64)}, {}, "has dtype int64"),
        (MODEL, {"tokens": np.zeros((2, 3), np.int32)}, {}, "has shape"),
        (MODEL, {"tokens": np.zeros((3, 1), np.int32)}, {}, "the same number of steps"),
        (MODEL, {"extra": np.zeros(1, np.int32)}, {}, "no input 'extra'"),
        (MODEL, {"layout": None}, {}, "'layout' is missing"),
        (MODEL, {}, {"max_price_usdc": 0.000001}, "raise it to that"),
        (MODEL, {}, {"max_price_usdc": "much"}, "give an amount"),
    ]
    async with SplitUp.connect(network.config) as net:
        head = await net.chain.fetch_head()
        for model, change, options, message in cases:
            inputs = {**make_inputs(2), **change}
            inputs = {name: array for name, array in inputs.items() if array is not None}
            with pytest.raises(InvalidInput, match=message) as caught:
                await net.execute(model, inputs, **options)
            assert "\n" not in str(caught.value)
        events = await net.chain.fetch_events("market", from_block=head.number + 1)
        assert not {"Deposited", "RequestNodeSelections"} & {event.name for event in events}


async def test_too_little_usdc_says_how_much_is_missing(network: Network) -> None:
    async with SplitUp.connect(network.config) as net:
        wallet = await net.chain.call("usdc", "balanceOf", net.address)
        with pytest.raises(InvalidInput, match=r"send it .* more"):
            await net.deposit(wallet // 1_000_000 + 1)
        assert await net.chain.call("usdc", "balanceOf", net.address) == wallet


@pytest.mark.long  # in small: protocol/settlement/test_unended.py, client/market/test_receipts.py
async def test_money_comes_back_when_the_deadline_passes_but_for_what_was_computed(
    network: Network,
) -> None:
    step = {name: array[0] for name, array in make_inputs(1).items()}

    async def wait(net: SplitUp, steps: int, why: str) -> ExecutionFailed:
        with pytest.raises(ExecutionFailed, match=why) as caught:
            async with net.session(MODEL, steps=64, deadline_s=20) as session:
                for _ in range(steps):
                    await session.step(step)
                await asyncio.to_thread(wait_for, lambda: session.failure is not None)
        return caught.value

    async with SplitUp.connect(network.config) as net:
        unused, used = await asyncio.gather(
            wait(net, 0, r"deadline passed .* came back"),
            wait(net, 1, "the steps computed, and paid, are 1"),
        )
        locked = await net.chain.call("market", "executionOf", unused.execution_id)
        assert unused.refunded_micro_usdc == locked["maxPrice"] - locked["reservation"] > 0
        assert (await net.receipt(unused.execution_id)).status == "refunded"
        receipt = await net.receipt(used.execution_id)
    assert (receipt.status, receipt.steps) == ("settled", 1)
    assert 0 < receipt.paid_micro_usdc < receipt.refunded_micro_usdc
