"""Which tensors this node sends in chunks, and which it takes (``splitup.net.tensor_chunks``)."""

from __future__ import annotations

from collections.abc import Iterable

from splitup.core.errors import PeerFault, SplitUpError
from splitup.messages.frames import TensorChunk
from splitup.net.links import Link, LinkPool
from splitup.net.tensor_chunks import has_room
from splitup_node.execution.executions import Execution


def find_direct_links(
    pool: LinkPool, execution: Execution, targets: Iterable[str], nbytes: int, most_bytes: int
) -> list[Link]:
    """Return the links of nodes that a tensor can go to directly."""
    links = []
    for target in targets:
        node = execution.certificate.plan.node_of(target)
        try:
            link = pool.open(node.node, node.endpoint)
        except SplitUpError:
            continue  # one that is gone is the client's business
        if has_room(link, nbytes, most_bytes):
            links.append(link)
    return links


def check_chunk(execution: Execution, sender: str, chunk: TensorChunk) -> bool:
    """Return whether a chunk from the peer with the Ed25519 key ``sender`` is worth its room.

    Raises PeerFault when nobody may send it here.
    """
    if not execution.check_tensor((chunk.task, chunk.port), chunk.length):
        return False
    if sender != execution.executor_map.get_key(chunk.task):
        if execution.executor_map.takeovers:
            return False  # the executor was replaced
        raise PeerFault(f"{sender} sends chunks of task {chunk.task} of {execution.id}")
    if chunk.step >= execution.certificate.plan.request.steps:
        raise PeerFault(f"a chunk of step {chunk.step} of {execution.id}: nobody paid for it")
    return True
