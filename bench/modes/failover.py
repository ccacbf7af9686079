"""Kill, stop or cut off a node in the middle of a text: how long is the pause?"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tomllib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from bench.report import Bar, Report, describe_bars, say
from bench.testbed.network import run_example
from splitup.client.connection import SplitUp
from splitup.client.execution.session import Session
from splitup.devnet.network import Devnet
from splitup.devnet.ports import find_free_ports
from splitup.devnet.processes import DevnetProcess
from tests.chain.proxy import Proxy
from tests.texts import Disturb, Text, generate_text, read_account

TOKENS: Final = 1_000
CONTEXT: Final = 1_024
DEADLINE_S: Final = 240
NODES: Final = 8  # two are killed
PROXIED: Final = 4  # of them, whose connections can fall silent; the others are killed or stopped
NODE_VRAM_BYTES: Final = 100_000_000  # every node holds every task
UNDISTURBED: Final = 20  # texts that need no other node
AT_ONCE: Final = 4  # of them
UNDISTURBED_TOKENS: Final = 100

WORKER: Final = b"splitup_node.worker.process"

Undo = Callable[[], None]
Way = Callable[[Session], Undo | None]  # disturbs a node; None when the text uses none to disturb


async def run(quick: bool) -> Report:
    """Generate undisturbed, then with a node disturbed in each of the ways."""
    nodes = Nodes()
    async with (
        AsyncExitStack() as stack,
        run_example(NODES, NODE_VRAM_BYTES, context=CONTEXT, prepare=nodes.prepare) as (_, net),
    ):
        stack.push_async_callback(nodes.close)
        tokens = TOKENS // 5 if quick else TOKENS
        expected = await generate(net, lambda session, count: None, tokens)
        bars = []
        for name, (at_most, disturb) in nodes.ways.items():
            bars.append(await measure(net, name, at_most, disturb, expected))
            say(describe_bars([bars[-1].to_dict()]))
        replaced = 0
        for _ in range(1 if quick else UNDISTURBED // AT_ONCE):
            texts = (
                generate(net, lambda session, count: None, UNDISTURBED_TOKENS)
                for _ in range(AT_ONCE)
            )
            replaced += sum(done.session.takeovers for done in await asyncio.gather(*texts))
    bars.append(Bar("takeovers in undisturbed texts", replaced, "", at_most=0))
    return Report(bars, {"tokens": tokens, "undisturbed_gap_s": round(expected.gap_s, 2)})


class Nodes:
    """The nodes of a network, and the ways to disturb one of them."""

    def __init__(self) -> None:
        self._devnet: Devnet
        self._proxies: dict[str, Proxy] = {}  # by the node's name
        self._killed: set[str] = set()
        self.ways: dict[str, tuple[float, Way]] = {
            "a worker is stopped": (1.0, self._stop_worker),
            "a node is stopped": (1.0, self._stop_node),
            "nothing reaches a node any more": (1.0, self._cut),
            "the connections to a node from others fall silent": (1.0, self._freeze),
            "a node is killed": (0.3, self._kill),
            "another node is killed": (0.3, self._kill),
        }

    async def prepare(self, devnet: Devnet) -> None:
        """Let some nodes listen elsewhere, and proxies where they are expected."""
        self._devnet = devnet
        watch = asyncio.create_task(devnet.watch(restart=True))
        for number in range(PROXIED):
            child = self._find(f"node-{number + 1}")
            file = devnet.directory / child.name / "node.toml"
            port = int(tomllib.loads(file.read_text())["listen"].rpartition(":")[2])
            [free] = find_free_ports(1)
            file.write_text(file.read_text().replace(f'"127.0.0.1:{port}"', f'"127.0.0.1:{free}"'))
            child.request_stop()
            await asyncio.to_thread(child.process.wait)
            self._proxies[child.name] = await Proxy.open(port, free)
        while any(not child.is_running() for child in devnet.children):  # noqa: ASYNC110 – processes
            await asyncio.sleep(0.05)
        watch.cancel()

    async def close(self) -> None:
        for proxy in self._proxies.values():
            await proxy.close()

    def _find(self, name: str) -> DevnetProcess:
        return next(child for child in self._devnet.children if child.name == name)

    def _choose(self, session: Session, *, proxied: bool) -> DevnetProcess | None:
        """Return a node in the middle of the text's path; None when it uses none of this kind."""
        names = {
            read_account(self._devnet.directory / c.name): c.name for c in self._devnet.children
        }
        found = [names[node] for node in dict.fromkeys(session.executors)]
        found = [name for name in found if (name in self._proxies) == proxied]
        found = [name for name in found if name not in self._killed]
        return self._find(found[len(found) // 2]) if found else None

    def _stop(self, pid: int) -> Undo:
        os.kill(pid, signal.SIGSTOP)

        def undo() -> None:
            with contextlib.suppress(ProcessLookupError):  # a worker is killed and replaced
                os.kill(pid, signal.SIGCONT)

        return undo

    def _stop_worker(self, session: Session) -> Undo | None:
        child = self._choose(session, proxied=False)
        return None if child is None else self._stop(find_worker(child.pid))

    def _stop_node(self, session: Session) -> Undo | None:
        child = self._choose(session, proxied=False)
        return None if child is None else self._stop(child.pid)

    def _cut(self, session: Session) -> Undo | None:
        child = self._choose(session, proxied=True)
        if child is None:
            return None
        self._proxies[child.name].cut()
        return self._proxies[child.name].mend

    def _freeze(self, session: Session) -> Undo | None:
        child = self._choose(session, proxied=True)
        if child is None:
            return None
        self._proxies[child.name].freeze(but=list_own_ports())
        return self._proxies[child.name].mend

    def _kill(self, session: Session) -> Undo | None:
        child = self._choose(session, proxied=False)
        if child is None:
            return None
        self._killed.add(child.name)
        os.kill(child.pid, signal.SIGKILL)
        return lambda: None


async def measure(net: SplitUp, name: str, at_most: float, disturb: Way, expected: Text) -> Bar:
    """Generate a text with a node disturbed in its middle; without a figure if tokens differ."""
    undos: list[Undo] = []

    def disturb_middle(session: Session, count: int) -> None:
        if count == len(expected.tokens) // 2 and (undo := disturb(session)) is not None:
            undos.append(undo)

    done = await generate(net, disturb_middle, len(expected.tokens), undos)
    is_equal = done.tokens == expected.tokens
    return Bar(
        f"pause when {name}",
        round(done.gap_s, 2) if is_equal and undos else None,
        "s",
        at_most=at_most,
        beside={
            "tokens equal to an undisturbed text": is_equal,
            "takeovers": done.session.takeovers,
            "longest pause undisturbed, s": round(expected.gap_s, 2),
        },
        note="" if undos else "no such node was on the text's path",
    )


async def generate(net: SplitUp, disturb: Disturb, tokens: int, undos: Sequence[Undo] = ()) -> Text:
    """Generate, undo, and wait until it is settled, so that the next text finds the nodes free."""
    done = await generate_text(net, disturb, deadline_s=DEADLINE_S, max_tokens=tokens)
    for undo in undos:
        undo()
    await net.receipt(done.session.execution_id)
    return done


def find_worker(node: int) -> int:
    """Return the process id of a node's worker."""
    children = Path(f"/proc/{node}/task/{node}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return next(pid for pid, command in commands.items() if WORKER in command)


def list_own_ports() -> set[int]:
    """Return the ports of this process's TCP connections."""
    links = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed again
            links.add(os.readlink(file))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in links}
