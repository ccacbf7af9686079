"""Which tensors this node sends and takes in chunks (``splitup.net.tensor_chunks``)."""

from __future__ import annotations

from splitup.core.errors import PeerFault, SplitUpError
from splitup.messages.frames import TensorChunk
from splitup.net.links import Link, LinkPool
from splitup.net.tensor_chunks import has_room
from splitup_node.execution.kept.executions import Execution
from splitup_node.execution.kept.routing import Readers


def find_direct_links(pool: LinkPool, readers: Readers, nbytes: int, most_bytes: int) -> list[Link]:
    """Return the links of nodes that a tensor can go to directly."""
    links = []
    for node, endpoint in readers:
        try:
            link = pool.open(node, endpoint)
        except SplitUpError:
            continue  # the client replaces a node that is gone
        if has_room(link, nbytes, most_bytes):
            links.append(link)
    return links


def check_chunk(execution: Execution, sender: str, chunk: TensorChunk) -> bool:
    """Return whether to keep a chunk from the peer with the Ed25519 key ``sender``.

    Raises PeerFault when nobody may send it here.
    """
    inlet = execution.routing.find_inlet((chunk.task, chunk.port))
    if inlet is None:
        return False
    execution.routing.check_size((chunk.task, chunk.port), chunk.length)
    if sender != inlet.key:
        if execution.executor_map.takeovers:
            return False  # the executor was replaced
        raise PeerFault(f"{sender} sends chunks of task {chunk.task} of {execution.id}")
    if chunk.step >= execution.certificate.plan.request.steps:
        raise PeerFault(f"a chunk of step {chunk.step} of {execution.id}, which was not paid for")
    return True
