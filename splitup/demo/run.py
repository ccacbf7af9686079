"""Runs the demo: everything that a network does for one execution, on real processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.client.outcome import Array, Receipt, TraceEvent, make_trace
from splitup.client.text.generation import generate_tokens
from splitup.config import NETWORK_FILE
from splitup.core.errors import ConfigurationError, InvalidInput, Unavailable
from splitup.decode.sampler import Sampler
from splitup.demo.report import Comparison, DemoReport, Verified
from splitup.devnet.network import Devnet, DevnetOptions
from splitup.devnet.processes import find_program, make_death_pact
from splitup.devnet.source_tree import find_source_tree
from splitup.devnet.state import DevnetState
from splitup.devnet.status import fetch_health, read_load_problems, read_loading
from splitup.net.http import SignedClient

MODEL: Final = "packages-4m"
PROMPT: Final = "network monitoring tool that"  # how a package's description may begin
NODES: Final = 6
TARGET_VRAM: Final = "1.3MB"  # twelve tasks
CHUNK: Final = 8  # rows of a step; with more, activations would need more memory than the weights
NODE_VRAM_BYTES: Final = 12_000_000  # room for ten tasks: a task has five holders on average
MAX_TOKENS: Final = 32
_MIN_HOLDERS: Final = 3  # an executor, a validator, and a third to break a tie
_SHORT_TOKENS: Final = 4
_MAX_EXECUTIONS: Final = 11  # with 12 tasks at 8 %, none is drawn in 11 with probability 10^-5
_LOAD_TIMEOUT_S: Final = 120.0
_DEPOSIT_USDC: Final = 50
_POLL_S: Final = 0.2

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``keep`` leaves the network's directory behind."""

    keep: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation with everything it returned."""

    session: Session
    text: str
    tokens: int
    steps: tuple[dict[str, Array], ...]  # every step's inputs, by name
    logits: Array  # of all rows that were wanted: [rows, vocab]
    trace: tuple[TraceEvent, ...]
    elapsed_s: float
    plan_s: float


def find_example() -> Path:
    """Return the example model of the source tree; raise ConfigurationError outside of one."""
    tree = find_source_tree()
    path = None if tree is None else tree / "examples" / MODEL
    if path is None or not (path / "config.json").exists():
        raise ConfigurationError(
            f"the demo needs the example model examples/{MODEL} of the source tree, which the "
            "installed package does not contain; clone the repository and run the demo there"
        )
    return path


def run_demo(options: DemoOptions, say: Say, update: Say) -> DemoReport:
    """Run the demo; whatever happens, everything that was started is stopped at the end.

    Raises the errors of the network, and KeyboardInterrupt on Ctrl-C.
    """
    directory = Path(tempfile.mkdtemp(prefix="splitup-demo-"))
    try:
        return asyncio.run(until_interrupted(_run(directory, say, update)))
    finally:
        if options.keep:
            say(f"the network stays in {directory}; resume it with: splitup up --dir {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def until_interrupted(work: Awaitable[T]) -> T:
    """Await ``work``; SIGINT and SIGTERM cancel it, wait for it, raise KeyboardInterrupt."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _run(directory: Path, say: Say, update: Say) -> DemoReport:
    started = time.monotonic()
    example = find_example()
    devnet = Devnet(DevnetOptions(directory, NODES, NODE_VRAM_BYTES), say, update)
    try:
        await devnet.start()
        return await _run_on(devnet, example, started, say, update)
    finally:
        say("stopping everything")
        await devnet.stop()


async def _run_on(
    devnet: Devnet, example: Path, started: float, say: Say, update: Say
) -> DemoReport:
    directory = devnet.directory
    say(f"registering {MODEL} with at most {TARGET_VRAM} per task")
    await register(directory, example)
    async with SplitUp.connect(directory / NETWORK_FILE) as net:
        await wait_for_holders(net, directory, update)
        await net.deposit(_DEPOSIT_USDC)
        setup_s = time.monotonic() - started
        say(f"generating up to {MAX_TOKENS} tokens on the network")
        main = await generate(net, PROMPT, max_tokens=MAX_TOKENS)
        say("running the whole model in one process, to compare the outputs")
        comparison, receipt = await asyncio.gather(
            compare(directory, example, main), net.receipt(main.session.execution_id)
        )
        receipts = [receipt]
        verified = await fetch_verified(net, main.session, receipt)
        while not verified and len(receipts) < _MAX_EXECUTIONS:
            say("no task was drawn for verification; running another short execution")
            short = await generate(net, PROMPT, max_tokens=_SHORT_TOKENS)
            receipts.append(await net.receipt(short.session.execution_id))
            verified = await fetch_verified(net, short.session, receipts[-1])
        return _make_report(main, comparison, receipts, verified, setup_s, started)


async def generate(net: SplitUp, prompt: str, *, max_tokens: int) -> Generation:
    """Generate greedily and keep every step's inputs, logits and times."""
    decoder, tokenizer = await net.make_decoder(
        MODEL, prompt, max_tokens=max_tokens, sampler=Sampler()
    )
    submitted = time.monotonic()
    async with net.session(MODEL, steps=decoder.max_steps) as session:
        planned = time.monotonic()
        inputs: list[dict[str, Array]] = []
        logits: list[Array] = []
        pieces: list[str] = []

        def keep(step_inputs: dict[str, Array], step_logits: Array) -> None:
            inputs.append(step_inputs)
            logits.append(step_logits)

        async for token in generate_tokens(session, decoder, tokenizer, on_step=keep):
            pieces.append(token.text)
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
    )


async def compare(directory: Path, example: Path, generation: Generation) -> Comparison:
    """Run the whole model over the same steps in a process of its own; compare all logits."""
    steps, outputs = directory / "steps.npz", directory / "reference.npz"
    arrays = {
        f"{number}/{name}": array
        for number, step in enumerate(generation.steps)
        for name, array in step.items()
    }
    np.savez(steps, **arrays)  # type: ignore[arg-type]
    report = await _run_program(
        [sys.executable, "-m", "splitup_deploy.uncut_model", example, steps, outputs, str(CHUNK)]
    )
    with np.load(outputs, allow_pickle=False) as reference:
        count = len(generation.steps)
        expected = np.concatenate([reference[f"{step}/logits"] for step in range(count)])
    equal = expected.shape == generation.logits.shape
    difference = np.abs(expected - generation.logits).max() if equal else np.inf
    return Comparison(
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


async def register(directory: Path, example: Path, target_vram: str = TARGET_VRAM) -> None:
    await _run_program(
        [
            *(find_program("splitup-deploy"), "register", "--json"),
            *("--model", example, "--name", MODEL, "--target-vram", target_vram),
            *("--chunk", str(CHUNK)),
            *("--config", directory),
        ]
    )


async def _run_program(command: Sequence[str | Path]) -> dict[str, Any]:
    """Run a program to its end and return the JSON object it prints; raise Unavailable."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=make_death_pact(),
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        said = (err or out).decode(errors="replace").strip()
        raise Unavailable(f"{Path(command[0]).name} failed: {said[-800:]}")
    value: dict[str, Any] = json.loads(out)
    return value


async def wait_for_holders(net: SplitUp, directory: Path, say: Say) -> None:
    """Wait until enough nodes hold every task, as the snapshot on chain says.

    Raises Unavailable, with a node's reason, as soon as too many nodes have refused a task.
    """
    state = DevnetState.load(directory)
    if state is None:
        raise InvalidInput(f"there is no network in {directory}")
    model = await net.fetch_model(MODEL)
    wanted = [task.task_id for task in model.manifest.tasks]
    ends, said = time.monotonic() + _LOAD_TIMEOUT_S, (-1, 0)
    async with SignedClient() as http:
        while True:
            holders = (await fetch_health(net.chain, http, state)).count_holders()
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


def _make_report(
    main: Generation,
    comparison: Comparison,
    receipts: list[Receipt],
    verified: tuple[Verified, ...],
    setup_s: float,
    started: float,
) -> DemoReport:
    return DemoReport(
        model=MODEL,
        manifest=main.session.manifest,
        plan=main.session.plan,
        steps=main.session.steps,
        prompt=PROMPT,
        output=main.text,
        tokens=main.tokens,
        trace=main.trace,
        submit_to_result_s=main.elapsed_s,
        plan_s=main.plan_s,
        comparison=comparison,
        executions=len(receipts),
        verified=verified,
        receipts=tuple(receipts),
        setup_s=setup_s,
        total_s=time.monotonic() - started,
    )
