"""What comes into a node and goes out of it in an execution, decided once and not at every step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from splitup.core.errors import PeerFault
from splitup.graph.manifest import Manifest
from splitup.messages.plans import Plan
from splitup.protocol.execution.routes import (
    Routes,
    compute_routes,
    get_sources,
    move_task,
    read_port,
)
from splitup.protocol.execution.takeovers import ExecutorMap
from splitup.protocol.execution.task_queue import PortId
from splitup_node.execution.kept.digests import StepsBefore

Readers = tuple[tuple[str, str], ...]  # nodes and their endpoints


@dataclass(frozen=True, slots=True)
class Inlet:
    """A port that tasks here read: who signs its tensors, and how many bytes they may have."""

    key: str
    sizes: range


@dataclass(slots=True)
class Outlet:
    """An output of a task here, and who gets it."""

    source: PortId
    send_from: int  # earlier steps only repeat what their readers have already
    before: StepsBefore | None  # of an output of the model, which goes to the client
    readers: Readers = ()
    # readers that need the output in some steps only, each with our outputs that are its tasks'
    # gates: in a step in which all of these gates are zero, it needs no other output
    gates: tuple[tuple[str, frozenset[int]], ...] = ()
    new_readers: Readers = ()  # they took over a task, and may lack steps that others have

    def route(self, step: int, zeros: Collection[int] = ()) -> tuple[Readers, bool]:
        """Return which nodes get a step, and whether the client does.

        ``zeros`` are the task's outputs that are zero in this step: readers that they gate get only
        those.
        """
        if step < self.send_from:
            return self.new_readers, False
        readers = self.readers
        if zeros and self.gates:
            shut = {node for node, gates in self.gates if gates.issubset(zeros)}
            readers = tuple(reader for reader in readers if reader[0] not in shut)
        return readers, self.before is not None


class Routing:
    """The inlets and outlets of one node in one execution, computed again after a takeover."""

    def __init__(
        self, plan: Plan, manifest: Manifest, node: str, executor_map: ExecutorMap
    ) -> None:
        """Raises PeerFault when plan and manifest do not fit."""
        self._plan = plan
        self._manifest = manifest
        self._node = node
        self._executor_map = executor_map
        self.inlets: dict[PortId, Inlet] = {}  # those that were asked for
        self._outlets: dict[int, tuple[Outlet, ...]] = {}  # by task
        self.routes: Routes = compute_routes(plan, manifest, node)
        # outputs that are gates, so that zeros leave others unsent; by task
        self.gates: dict[int, frozenset[int]] = {}
        self.stale: dict[int, set[int]] = {}  # outputs whose readers have changed, by task
        self._entries = {entry.node: entry for entry in plan.nodes}
        self.successors: set[str] = set()  # who reads an output of ours, or did
        self.takeovers: dict[int, bytes] = {}  # the client's frames, by task

    def find_inlet(self, port: PortId) -> Inlet | None:
        """Return the inlet of a port; raise PeerFault for one that nobody may send to this node.

        After a takeover, a tensor for a task that has left this node is no fault: returns None.
        """
        spec = self.routes.specs.get(port)
        key = self._executor_map.get_key(port[0])
        if spec is None or port[0] in self._outlets:
            if self._executor_map.takeovers:
                return None
            raise PeerFault(
                f"nobody may send port {port[1]} of task {port[0]} of "
                f"{self._plan.request.execution_id} to this node"
            )
        inlet = self.inlets[port] = Inlet(key, spec.sizes)
        return inlet

    def check_size(self, port: PortId, length_bytes: int) -> None:
        """Raise PeerFault for a tensor that the port, which has an inlet, cannot carry."""
        spec = self.routes.specs[port]
        if not spec.accepts(length_bytes):
            raise PeerFault(
                f"port {port[1]} of task {port[0]} of {self._plan.request.execution_id} is "
                f"{spec}, not {length_bytes} bytes"
            )

    def begin(self, task: int, send_from: int) -> tuple[Outlet, ...]:
        """Return the outlets of a task that this node runs from now on."""
        self.inlets.clear()
        self._outlets[task] = tuple(
            Outlet(
                (task, port),
                send_from,
                StepsBefore() if (task, port) in self.routes.to_client else None,
            )
            for port in range(len(self._manifest.tasks[task].outputs))
        )
        self.stale[task] = set(range(len(self._outlets[task])))
        self.connect(task)
        return self._outlets[task]

    def end(self, task: int) -> None:
        """Note that another node runs a task from now on."""
        self._outlets.pop(task, None)
        self.stale.pop(task, None)

    def renew(self, task: int, sealed: bytes = b"") -> None:
        """Note that a task was taken over; ``sealed`` is the client's frame, if it is known."""
        if sealed:
            self.takeovers[task] = sealed
        executors = self._executor_map.executors
        self.routes = move_task(self.routes, self._manifest, self._node, executors, task)
        self.inlets.clear()
        for source, port in get_sources(self._manifest, task):
            if source in self._outlets:
                self.stale.setdefault(source, set()).add(port)
                self.successors |= {executors[task]} - {self._node}

    def connect(self, task: int) -> None:
        """Look up who reads a task's outputs, and which of them are gates, where that changed."""
        if (stale := self.stale.pop(task, None)) is None:
            return
        for port in sorted(stale):
            self._connect(self._outlets[task][port])
        self.gates[task] = self.routes.find_gates(task)

    def _connect(self, outlet: Outlet) -> None:
        executors, port = self._executor_map.executors, outlet.source
        read_port(self.routes, self._manifest, self._node, executors, port)
        outlet.readers = self.find_readers(self.routes.targets[port])
        outlet.gates = tuple(self.routes.gates[port].items())
        self.successors.update(self.routes.targets[port])
        takeovers = self._executor_map.takeovers
        if takeovers:
            readers = self._manifest.consumers(*port)
            nodes = {executors[reader] for reader, _ in readers if reader in takeovers}
            outlet.new_readers = self.find_readers(sorted(nodes - {self._node}))

    def find_readers(self, nodes: Iterable[str]) -> Readers:
        """Return nodes of the plan with their endpoints."""
        entries = [self._entries[node] for node in nodes]
        return tuple((entry.node, entry.endpoint) for entry in entries)
