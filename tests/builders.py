"""Small models, snapshots and requests for tests of the protocol's pure parts."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np

from splitup.config import find_cache_directory
from splitup.core import limits
from splitup.core.errors import Unavailable
from splitup.core.tensors import NO_STEPS, is_zero
from splitup.devnet.ports import find_free_ports
from splitup.graph.manifest import (
    InputSource,
    Manifest,
    OutputPort,
    Port,
    Task,
    TaskInput,
    TaskSource,
)
from splitup.graph.tolerances import Tolerance
from splitup.messages.frames import Frame, FrameKind, Seal, decode_frames
from splitup.messages.plans import Request, TaskTerms
from splitup.messages.snapshots import Snapshot, SnapshotEntry
from splitup.net.links import Link
from splitup.net.signed_frames import make_entry_frame
from splitup.protocol.execution.log_segments import LogEntry
from splitup.protocol.planning.selection import CandidatePool, Index, rank

PRICE_MICRO_USDC = 10
COMMON_CLASS = "tinygrad 0.14.0/CPU:X86/x86_64"
FOREIGN_CLASS = "tinygrad 0.14.0/CUDA:PTX/sm_90"

# What is waited for takes milliseconds, and with processes seconds. The bound is loose, so that a
# machine with other work passes, and still catches work that is quadratic or never ends.
HANG_S = 60.0

# Where all tests keep what they compile, as a devnet does, unless they are about compiling: most
# load the same few tasks, and to start a compiler takes a second of a processor.
KERNELS = find_cache_directory() / "kernels"


def anybody(key: str, execution_id: str) -> bool:
    """Let every key open data links (``LinkAcceptor``)."""
    return True


def decode_frame(data: bytes) -> tuple[Frame, Seal]:
    """Parse a frame that is no bundle."""
    seal, frames = decode_frames(data)
    assert seal.is_single
    return frames[0], seal


def find_free_port() -> int:
    """Return a port to bind later, which no outgoing connection is given in the meantime."""
    [port] = find_free_ports(1)
    return port


def address(number: int) -> str:
    return f"0x{number:040x}"


def task_id(index: int) -> str:
    return hashlib.sha256(f"task {index}".encode()).hexdigest()


def make_tolerant(manifest: Manifest) -> Manifest:
    """Give every task a tolerance, so that members of other classes compare its numbers."""
    tolerance = Tolerance(
        dtype="float32", relative_l2_ppb=1000, exponent_ppb=None, mantissa_ppb=None, max_ulp=None
    )
    tasks = (task.model_copy(update={"tolerances": (tolerance,)}) for task in manifest.tasks)
    return manifest.model_copy(update={"tasks": tuple(tasks)})


def make_chain_manifest(count: int) -> Manifest:
    """A model of n tasks in a row, each passing one float on."""
    return make_manifest([[]] + [[index] for index in range(count - 1)])


def make_diamond_manifest() -> Manifest:
    """A model of four tasks: 0 feeds 1 and 2, which feed 3."""
    return make_manifest([[], [0], [0], [1, 2]])


def make_manifest(sources: list[list[int]]) -> Manifest:
    """A model of tasks that pass one float on; ``sources`` are the tasks that each one reads."""
    tasks = tuple(
        Task(
            task_id=task_id(index),
            label=f"task {index}",
            inputs=tuple(
                TaskInput(name=f"x{place}", dtype="float32", shape=(1,), source=source)
                for place, source in enumerate(
                    [TaskSource(task=task, port=0) for task in read] or [InputSource(input="x")]
                )
            ),
            outputs=(Port(name="y", dtype="float32", shape=(1,)),),
            weights_digest="",
            weights_bytes=0,
            graph_bytes=100,
            state_bytes=0,
            vram_bytes=1000,
            flops=1,
            price_nano_usdc=PRICE_MICRO_USDC * limits.NANO_PER_MICRO,
        )
        for index, read in enumerate(sources)
    )
    return Manifest(
        version=1,
        kind="function",
        inputs=(Port(name="x", dtype="float32", shape=(1,)),),
        outputs=(OutputPort(name="y", dtype="float32", shape=(1,), task=len(sources) - 1, port=0),),
        tasks=tasks,
        text=None,
        tinygrad="0.14.0",
    )


def make_snapshot(
    nodes: int,
    tasks: int,
    *,
    stakes: dict[int, int] | None = None,
    rtts: dict[int, int] | None = None,
    resident: dict[int, list[int]] | None = None,
    classes: dict[int, str] | None = None,
    operators: dict[int, int] | None = None,
    figures: dict[int, dict[str, int]] | None = None,
) -> Snapshot:
    """Nodes 1 … n; every node holds every task unless ``resident`` says otherwise."""
    return Snapshot(
        configuration=1,
        sequence=1,
        epoch=1,
        entries=tuple(
            SnapshotEntry(
                node=address(n),
                signing_key=f"0x{n:064x}",
                endpoint=f"http://127.0.0.1:{9000 + n}",
                stake_micro_usdc=(stakes or {}).get(n, 1_000_000_000),
                rtt_ms=(rtts or {}).get(n, 10),
                queue_ms=0,
                resident=tuple(sorted(map(task_id, (resident or {}).get(n, range(tasks))))),
                determinism=(classes or {}).get(n, "CPU:X86"),
                operator=address(operators[n]) if operators and n in operators else "",
                **(figures or {}).get(n, {}),
            )
            for n in range(1, nodes + 1)
        ),
    )


NO_TERMS = TaskTerms(
    task_id=task_id(0),
    flops=0,
    weights_bytes=0,
    input_bytes=0,
    ready_ms=0,
    crosses_classes=False,
)


def rank_all(seed: str, task: int, role: int, snapshot: Snapshot) -> list[str]:
    """Every node of a snapshot by its clock, for a task that costs nothing."""
    index = snapshot.once(Index)
    pool = CandidatePool(task, NO_TERMS, np.arange(len(snapshot.entries)))
    return [snapshot.entries[row].node for row in rank(seed, role, [pool], index)[0]]


def make_request(steps: int = 4) -> Request:
    return Request(
        chain_id=31337,
        market=address(0xA),
        execution_id="0x" + "ee" * 32,
        model_id="0x" + "dd" * 32,
        client=address(0xC),
        client_key="0x" + "cc" * 32,
        steps=steps,
        max_price_micro_usdc=10**6,
        deadline=2_000_000_000,
        snapshot_sequence=1,
        snapshot_root="0x" + "bb" * 32,
        block_hash="0x" + "aa" * 32,
        verify_bps=800,
    )


async def wait_open(link: Link, timeout_s: float) -> None:
    """Wait until a link is connected; raise Unavailable, or the error that closed it."""
    try:
        async with asyncio.timeout(timeout_s):
            await link.connected.wait()
    except TimeoutError:
        raise Unavailable(f"node {link.peer} did not accept within {timeout_s:g} s") from None
    if link.closed:
        raise link.error or Unavailable(f"the connection to {link.peer} is closed")


def make_stored_frame(
    execution_id: str,
    task: int,
    port: int,
    step: int,
    digest: bytes,
    length: int,
    *,
    direct: bool = False,
    before: bytes = NO_STEPS,
) -> Frame:
    """Return the frame that announces a large tensor of a task's port."""
    entry = LogEntry(step, digest, length, None)
    return make_entry_frame(execution_id, (task, port), entry, before, direct=direct)


def make_tensor_frame(
    execution_id: str,
    task: int,
    port: int,
    step: int,
    data: bytes,
    digest: bytes | None = None,
    before: bytes = NO_STEPS,
) -> Frame:
    """Return the frame of an inline tensor; pass its SHA-256 as ``digest`` if it is known."""
    digest = hashlib.sha256(data).digest() if digest is None else digest
    return Frame(
        kind=FrameKind.TENSOR,
        execution_id=execution_id,
        task=task,
        port=port,
        step=step,
        digest=digest,
        length=len(data),
        payload=data,
        zeros=is_zero(digest, len(data)),
        before=before,
    )
