"""The clients of this node's executions: their links, and the frames they may have missed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from splitup.core import tuning
from splitup.core.errors import Unavailable
from splitup.core.latest import Latest
from splitup.crypto.keys import Identity
from splitup.messages.base import CLIENT
from splitup.messages.frames import Frame, FrameKind
from splitup.messages.plans import PlanCertificate
from splitup.messages.progress import Progress, TaskFailure
from splitup.net.links import Link
from splitup.net.signed_frames import make_message_frame, seal_frame
from splitup_node.execution.kept.executions import Execution

_log = logging.getLogger("splitup.node.clients")


class ClientLinks:
    """Sends to clients over the links that they opened."""

    def __init__(self, identity: Identity, executions: Mapping[str, Execution]) -> None:
        self._identity = identity
        self._executions = executions
        self._links: dict[str, list[Link]] = {}  # by the opener's key
        # client key, ERROR
        self._refused: Latest[str, tuple[str, bytes]] = Latest(tuning.MAX_FINISHED)

    def is_refused(self, execution_id: str) -> bool:
        """Return whether this node refused an execution."""
        return execution_id in self._refused

    def is_told(self, key: str, execution_id: str) -> bool:
        """Return whether the client with this key may come to learn that it was refused."""
        return self._refused.get(execution_id, ("", b""))[0] == key

    def refuse(self, certificate: PlanCertificate, reason: str) -> bool:
        """Tell a client why this node does not run its execution, now or when it connects.

        Returns False when the plan gives this node nothing to run.
        """
        request, node = certificate.plan.request, self._identity.address
        executors = certificate.plan.executors()
        if node not in executors:
            return False
        task = executors.index(node)
        failure = TaskFailure(task=task, step=0, node=node, reason=reason[:500])
        frame = make_message_frame(FrameKind.ERROR, request.execution_id, task, 0, failure)
        sealed = seal_frame(self._identity, frame)
        self._refused[request.execution_id] = (request.client_key, sealed)
        for link in self._iter_links(request.client_key, request.execution_id):
            link.send(sealed)
        return True

    def tell_loading(self, certificate: PlanCertificate) -> None:
        """Tell a client that asks for progress that the tasks of its plan are being loaded."""
        request, node = certificate.plan.request, self._identity.address
        progress = Progress(execution_id=request.execution_id, node=node, tasks=(), is_loading=True)
        frame = make_message_frame(FrameKind.PROGRESS, request.execution_id, CLIENT, 0, progress)
        sealed = seal_frame(self._identity, frame)
        for link in self._iter_links(request.client_key, request.execution_id):
            link.send(sealed)

    def tell_failure(self, execution: Execution, task: int, step: int) -> None:
        """Send the execution's failure."""
        failure = TaskFailure(
            task=task, step=step, node=self._identity.address, reason=execution.life.failure
        )
        self.tell(execution, make_message_frame(FrameKind.ERROR, execution.id, task, step, failure))

    def tell(self, execution: Execution, frame: Frame) -> None:
        """Send a frame, and keep it for a client that connects again."""
        self.send(execution, seal_frame(self._identity, frame))

    def send(self, execution: Execution, sealed: bytes, *, keep: bool = True) -> None:
        """Send a sealed frame over the newest of the client's links."""
        if keep:
            execution.outbox.add(sealed)
        for link in self._iter_links(execution.client_key, execution.id):
            try:
                link.send(sealed)
            except Unavailable as error:
                _log.warning("client of %s: %s", execution.id, error)
                continue
            return

    def find_link(self, execution: Execution) -> Link | None:
        """Return the newest of the client's links, None when it has none."""
        return next(self._iter_links(execution.client_key, execution.id), None)

    def _iter_links(self, client_key: str, execution_id: str) -> Iterator[Link]:
        for link in reversed(self._links.get(client_key, ())):
            if link.execution_id in ("", execution_id):
                yield link

    def on_opened(self, link: Link) -> None:
        """Send a client that connects, perhaps again, all frames that it may have missed."""
        self._links.setdefault(link.peer, []).append(link)
        for execution in self._executions.values():
            if execution.client_key == link.peer and link.execution_id in ("", execution.id):
                for sealed in execution.outbox.frames:
                    link.send(sealed)
        for execution_id, (client_key, sealed) in self._refused.items():
            if client_key == link.peer and link.execution_id in ("", execution_id):
                link.send(sealed)

    def on_closed(self, link: Link) -> None:
        """Forget a link."""
        links = self._links.get(link.peer, [])
        if link in links:
            links.remove(link)
        if not links:
            self._links.pop(link.peer, None)
