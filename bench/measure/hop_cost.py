"""What a hop costs in Python: calls and files of each leg of a step's way.

    python -m bench.measure.hop_cost [STEPS]    # 400

Two nodes' engines and a client's session in one process, over real links and workers; four trivial
tasks on the nodes in turn. Prints one row for each leg: calls of this project's functions and the
files that they are in (median and most over the steps; a generator that goes on counts as a call),
the same up to the moment when the last message of the leg is handed to a socket, and all calls with
those of libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from splitup_node.execution.finishing import Finisher
from splitup_node.execution.step_loop import StepLoop
from splitup_node.worker.supervisor import _Connection

import splitup.client.execution.session as session_module
from bench.report import ROOT
from splitup.client.execution.input_sender import InputSender
from splitup.client.execution.session import Session
from splitup.core import event_loop
from splitup.crypto.keys import generate_identity
from splitup.net.http import SignedClient
from splitup.net.links import Link
from tests.builders import HANG_S
from tests.node.network import Store, TestNode, make_certificate, make_manifest

FLOATS: Final = 2_048  # of a tensor: 8 KiB
TASKS: Final = 4  # on the two nodes in turn
LEGS: Final[dict[str, tuple[type, str]]] = {
    "client out": (Session, "submit"),
    "client, after the send": (InputSender, "_settle"),
    "node in": (StepLoop, "on_frame"),
    "node out": (_Connection, "data_received"),
    "node, off the path": (Finisher, "record"),
    "node, its rates": (StepLoop, "_count"),
    "client in": (Session, "_on_frame"),
}
_PATHS: Final = tuple(str(ROOT / name) + "/" for name in ("splitup", "node/splitup_node"))


@dataclass(frozen=True, slots=True)
class Walk:
    """The calls of one leg of one step."""

    calls: tuple[tuple[str, str], ...]  # of this project: file and function
    sent: int  # how many of them had begun when the last message was handed to a link
    all_calls: int  # with those of libraries

    @property
    def files(self) -> int:
        return len({file for file, _ in self.calls})


Walks = dict[str, list[Walk]]  # by leg
Observe = Callable[[str, Callable[[], Any]], Any]  # (leg, what runs it)


@contextlib.contextmanager
def observing(observe: Observe) -> Iterator[None]:
    """Give each leg that runs in this process to ``observe``, which has to run it."""
    inside = False

    def wrap(leg: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any) -> Any:
            nonlocal inside
            run = functools.partial(function, *arguments)
            if inside:  # a leg that another one calls is a part of that
                return run()
            inside = True
            try:
                return observe(leg, run)
            finally:
                inside = False

        return wrapped

    with contextlib.ExitStack() as stack:
        for leg, (owner, name) in LEGS.items():
            wrapped = wrap(leg, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, wrapped))
        yield


def trace_calls(run: Callable[[], Any]) -> tuple[Any, Walk]:
    """Run one leg and return its result and its calls."""
    calls: list[tuple[str, str]] = []
    sent = total = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal sent, total
        if event == "call":
            total += 1
            if frame.f_code.co_filename.startswith(_PATHS):
                calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        elif event == "return" and frame.f_code is Link.send.__code__:
            sent = len(calls)

    sys.setprofile(profile)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, Walk(tuple(calls), sent, total)


@contextlib.asynccontextmanager
async def open_session(directory: Path, steps: int) -> AsyncIterator[Session]:
    """Run two nodes and a session over them; what they store stays in memory."""
    manifest, graphs = make_manifest(FLOATS, tasks=TASKS)
    store, client = Store(), generate_identity()
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for name in ("a", "b"):
            (directory / name).mkdir()
            nodes.append(TestNode(directory / name, store))
            stack.push_async_callback(nodes[-1].close)
            await nodes[-1].start(graphs)
        runs = [nodes[task % 2].entry for task in range(TASKS)]
        certificate = make_certificate(manifest, runs, client.signing_key_hex, steps=steps)
        for node in nodes:
            node.engine.start(certificate, manifest)
        opened = store.open(certificate, manifest, None)  # type: ignore[arg-type]
        stack.enter_context(patch.object(session_module, "open_logs", lambda *_, **__: opened))
        http = await stack.enter_async_context(SignedClient(client))
        session = Session(
            certificate,
            manifest,
            client,
            http,
            None,  # type: ignore[arg-type]  # the gateway, which only the store would ask
            deadline=asyncio.get_running_loop().time() + HANG_S,
            allow_loopback=True,
        )
        stack.push_async_callback(session.close)
        session.open()
        async with asyncio.timeout(HANG_S):
            for link in session._links.values():
                await link.connected.wait()
        yield session
        await session.finish()


async def measure(steps: int) -> Walks:
    """Run steps one after the other, and observe them."""
    found: Walks = defaultdict(list)

    def observe(leg: str, run: Callable[[], Any]) -> Any:
        result, walk = trace_calls(run)
        found[leg].append(walk)
        return result

    x = np.random.default_rng(1).random(FLOATS, np.float32)
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name, observing(observe):
        async with open_session(Path(name), steps) as session:
            for _ in range(steps):
                await session.step({"x": x})
    return found


def describe(found: Walks) -> str:
    """Return the table."""
    rows = [
        "| leg | calls, median (most) | files | until sent | all calls |",
        "|---|---|---|---|---|",
    ]
    for leg in LEGS:
        walks = found[leg]
        calls, files = [len(walk.calls) for walk in walks], [walk.files for walk in walks]
        sent = statistics.median(walk.sent for walk in walks)
        everything = statistics.median(walk.all_calls for walk in walks)
        rows.append(
            f"| {leg} | {statistics.median(calls):g} ({max(calls)}) "
            f"| {statistics.median(files):g} ({max(files)}) | {sent:g} | {everything:g} |"
        )
    return "\n".join(rows)


def main() -> None:
    print(describe(event_loop.run(measure(int(sys.argv[1]) if sys.argv[1:] else 400))))


if __name__ == "__main__":
    main()
