"""What a drawing of a cut model shows: one DAG of the nodes' tasks and of the client's own.

The client's tasks that run before the nodes come first, those after them last; without a client's
part there are the nodes' tasks alone, numbered as in the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from splitup.graph.manifest import (
    ClientPart,
    ClientTask,
    InputSource,
    NetworkSource,
    OutputPort,
    Port,
    Task,
    TaskSource,
)
from splitup_deploy.showing.profile import Edge, Profile


@dataclass(frozen=True, slots=True)
class Card:
    """One task; ``index`` counts those of nodes and those of the client apart.

    ``time_ps`` is its predicted time and ``target_bytes`` the smallest card that it fits; the
    client's have neither. Those that a step of the nodes waits for are hot.
    """

    task: Task | ClientTask
    index: int
    level: int
    reads: tuple[str, ...]  # what users give
    is_hot: bool = False
    time_ps: int | None = None
    target_bytes: int | None = None

    @property
    def is_client(self) -> bool:
        """Say whether the client runs it."""
        return isinstance(self.task, ClientTask)


@dataclass(frozen=True, slots=True)
class Scene:
    """``edges`` are between positions in ``cards``, by target; ``outputs`` say which card gives."""

    cards: tuple[Card, ...]
    edges: tuple[Edge, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[tuple[OutputPort, int], ...]

    def is_hot(self, edge: Edge) -> bool:
        """Say whether the edge is on the critical path of the nodes."""
        hot = [place for place, card in enumerate(self.cards) if card.is_hot]
        return (edge.source, edge.target) in pairwise(hot)


def make_scene(profile: Profile) -> Scene:
    """Return what is to be drawn; levels are those of the whole DAG."""
    manifest, client = profile.manifest, profile.manifest.client
    early = () if client is None else client.find_early()
    late = () if client is None else set(range(len(client.tasks))) - set(early)
    nodes = {index: len(early) + index for index in range(len(manifest.tasks))}
    order = [*early, *sorted(late)]
    own = {n: at if at < len(early) else at + len(nodes) for at, n in enumerate(order)}
    tasks: list[Task | ClientTask] = list(manifest.tasks)
    if client is not None:
        tasks = [client.tasks[n] for n in early] + tasks + [client.tasks[n] for n in sorted(late)]
    sizes: Counter[tuple[int, int]] = Counter()  # (target, source)
    reads: list[tuple[str, ...]] = []
    for place, task in enumerate(tasks):
        names = []
        for port in task.inputs:
            source = _trace(port.source, isinstance(task, ClientTask), client, profile)
            if isinstance(source, str):
                names.append(source)
                continue
            is_client, index = source
            sizes[place, own[index] if is_client else nodes[index]] += port.nbytes
        reads.append(tuple(names))
    levels = _compute_levels(len(tasks), sizes)
    hot = {nodes[index] for index in profile.critical}
    places = {place: index for index, place in (*nodes.items(), *own.items())}
    cards = tuple(
        Card(task, places[place], levels[place], reads[place], place in hot)
        if isinstance(task, ClientTask)
        else Card(
            task,
            places[place],
            levels[place],
            reads[place],
            place in hot,
            profile.times_ps[places[place]],
            profile.classes_bytes[places[place]],
        )
        for place, task in enumerate(tasks)
    )
    return Scene(
        cards=cards,
        edges=tuple(Edge(source, target, n) for (target, source), n in sorted(sizes.items())),
        inputs=manifest.user_inputs,
        outputs=tuple(
            (port, nodes[port.task] if client is None else own[port.task])
            for port in manifest.user_outputs
        ),
    )


def _trace(
    source: InputSource | TaskSource | NetworkSource,
    is_client: bool,
    client: ClientPart | None,
    profile: Profile,
) -> str | tuple[bool, int]:
    """Return the user's input that a port reads, or whose task's output: the client's, which."""
    if isinstance(source, NetworkSource):
        outputs = {port.name: port.task for port in profile.manifest.outputs}
        return False, outputs[source.output]
    if isinstance(source, InputSource) and client is not None and not is_client:
        names = [port.name for port in profile.manifest.inputs]
        source, is_client = client.sends[names.index(source.input)], True
    return source.input if isinstance(source, InputSource) else (is_client, source.task)


def _compute_levels(count: int, sizes: Mapping[tuple[int, int], int]) -> Sequence[int]:
    levels = [0] * count
    for target, source in sorted(sizes):
        levels[target] = max(levels[target], levels[source] + 1)
    return levels
