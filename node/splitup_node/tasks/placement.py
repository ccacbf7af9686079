"""Which tasks a node loads: the least served first, then the best paid, as long as they fit.

Anybody can register models that nobody wants. So tasks of models in use come before all others
until enough operators hold them.

Pure functions: the committee's list of tasks in, one choice out. Nodes that start together see the
same list; a hash of node and task breaks ties, so that they choose different tasks. A node whose
memory is full trades: it unloads a task that many nodes serve for one that too few serve.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault
from splitup.messages.base import Bytes32Field, Count, DigestField, Message

ModelTask = tuple[str, str]  # ids of a model and of one of its tasks, which other models may share


class DemandEntry(Message):
    """A registered task as a committee member lists it in its answer to a heartbeat."""

    model_id: Bytes32Field
    task: Count
    task_id: DigestField
    vram_bytes: Count
    weights_bytes: Count
    price_nano_usdc: Count
    holders: Count  # live nodes that serve it
    operators: Count = 0  # in the determinism class with most of them
    used: bool = False  # the model was paid for lately

    @property
    def key(self) -> ModelTask:
        """Return what this entry is about: other models may state other facts of the same task."""
        return self.model_id, self.task_id


def parse_demand(value: object) -> tuple[DemandEntry, ...]:
    """Validate the ``tasks`` of a heartbeat's answer; raise PeerFault when they are malformed."""
    if not isinstance(value, list) or len(value) > limits.MAX_DEMAND_TASKS:
        raise PeerFault("a heartbeat's answer holds no list of tasks, or too long a one")
    return tuple(DemandEntry.from_value(entry) for entry in value)


def merge_demand(answers: Sequence[Sequence[DemandEntry]], members: int) -> tuple[DemandEntry, ...]:
    """Return one entry per task of a model that more than a third of the ``members`` list alike.

    Fewer may lie: invented tasks would be tried before all others. Holders and operators are the
    lowest numbers but those of as many members as may lie. A model is in use if more than a third
    say so: others may have started again since.
    """
    few = (members - 1) // 3
    listed: dict[tuple[str | int, ...], list[DemandEntry]] = {}
    for answer in answers:
        for facts, entry in {_get_facts(entry): entry for entry in answer}.items():
            listed.setdefault(facts, []).append(entry)
    return tuple(
        said[0].model_copy(
            update={
                "holders": sorted(entry.holders for entry in said)[few],
                "operators": sorted(entry.operators for entry in said)[few],
                "used": sum(entry.used for entry in said) > few,
            }
        )
        for said in listed.values()
        if len(said) > few
    )


def _get_facts(entry: DemandEntry) -> tuple[str | int, ...]:
    """Return what all members read in the model's manifest."""
    sizes = entry.vram_bytes, entry.weights_bytes, entry.price_nano_usdc
    return entry.model_id, entry.task, entry.task_id, *sizes


def choose_task(
    node: str,
    demand: Iterable[DemandEntry],
    loaded: Collection[str],
    excluded: Collection[ModelTask],
    free_bytes: int,
) -> DemandEntry | None:
    """Return the task to load next, None when nothing fits or all tasks are loaded.

    ``loaded`` are the tasks of this node, ``excluded`` those that failed to load here.
    """
    fitting = [
        entry
        for entry in demand
        if entry.task_id not in loaded
        and entry.key not in excluded
        and entry.vram_bytes <= free_bytes
    ]
    return min(
        fitting,
        key=lambda entry: (
            not (entry.used and _is_scarce(entry)),
            *(entry.holders, -entry.price_nano_usdc, _tie(node, entry)),
        ),
        default=None,
    )


def choose_unlisted(
    demand: Sequence[DemandEntry], loaded: Collection[str], excluded: Collection[ModelTask]
) -> tuple[str, ...]:
    """Return the loaded tasks of models that are gone, if the memory is needed for other tasks.

    A list that is full may leave out tasks that are still wanted.
    """
    listed = {entry.task_id for entry in demand}
    wanted = {entry.task_id for entry in demand if entry.key not in excluded}
    if not wanted - set(loaded) or len(demand) >= limits.MAX_DEMAND_TASKS:
        return ()
    return tuple(sorted(set(loaded) - listed))


def _tie(node: str, entry: DemandEntry) -> bytes:
    return hashlib.sha256(f"{node}/{entry.task_id}".encode()).digest()


@dataclass(frozen=True, slots=True)
class Trade:
    """A task to unload, and the one to load in its place."""

    given: DemandEntry
    wanted: DemandEntry


class Trader:
    """Decides when a node without free memory unloads a task that many serve for a scarce one.

    Nodes decide independently, from equal lists. So each looks at its own moment in every period,
    and a random draw decides whether it goes ahead: of all nodes that could, about as many trade as
    operators are lacking. A trade never makes the given task the scarcer of the two, so trades come
    to an end. It never takes a task below the operators that verification needs: otherwise models
    that nobody uses would take the verification from models in use. Traded tasks are not traded
    again for ``TRADE_HOLD_S``.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._epoch = -1  # the last period in which the node looked
        self._held: dict[str, float] = {}  # task_id -> the time until which it is not traded

    def is_due(self, now_s: float) -> bool:
        """Return True once in a period, at this node's own moment in it."""
        epoch, past_s = divmod(now_s, tuning.TRADE_PERIOD_S)
        if self._epoch < 0:  # nodes that start together do not look together
            self._epoch = int(epoch)
        share = self._draw(f"moment/{int(epoch)}")
        if self._epoch == epoch or past_s < share * tuning.TRADE_PERIOD_S:
            return False
        self._epoch = int(epoch)
        return True

    def choose(
        self,
        demand: Iterable[DemandEntry],
        loaded: Collection[str],
        rooms: Mapping[str, int],
        excluded: Collection[ModelTask],
        now_s: float,
    ) -> Trade | None:
        """Return the trade to make, None when there is none or the draw decides against it.

        ``rooms`` are the loaded tasks that may go, with the bytes that each would make room for.
        """
        entries = [entry for entry in demand if now_s >= self._held.get(entry.task_id, 0.0)]
        mine = [entry for entry in entries if entry.task_id in rooms]
        mine.sort(key=lambda entry: (*_count(entry), _tie(self._node, entry)), reverse=True)
        unused = [entry for entry in mine if not entry.used]
        mine = [entry for entry in mine if not _is_needed(entry)]
        wanted = [
            entry
            for entry in entries
            if _is_scarce(entry) and entry.task_id not in loaded and entry.key not in excluded
        ]
        wanted.sort(key=lambda entry: (not entry.used, *_count(entry), _tie(self._node, entry)))
        for want in wanted:
            for given in chain(unused if want.used else (), mine):
                if not _is_gain(*_count_left(given), given, want):
                    break  # nor are the next ones, which fewer serve
                if want.vram_bytes <= rooms[given.task_id]:
                    equal = len({one.task_id for one in wanted if _count(one) == _count(want)})
                    lacking = equal * (limits.MIN_OPERATORS - want.operators)
                    is_drawn = self._draw(f"lot/{self._epoch}") * given.holders < lacking
                    return Trade(given, want) if is_drawn else None
        return None

    def confirms(self, trade: Trade, demand: Iterable[DemandEntry]) -> bool:
        """Return whether a trade is still good by a list that no longer counts this node."""
        now = {entry.task_id: entry for entry in demand}
        given, wanted = now.get(trade.given.task_id), now.get(trade.wanted.task_id)
        return (
            given is not None
            and wanted is not None
            and _is_scarce(wanted)
            and (wanted.used or _is_scarce(trade.given) or not _is_scarce(given))
            and _is_gain(*_count(given), given, wanted)
        )

    def note(self, trade: Trade, now_s: float, *, made: bool) -> None:
        """Remember a trade: both tasks if it was made, the given one if it was called off."""
        self._held = {task: until for task, until in self._held.items() if until > now_s}
        for entry in (trade.given, trade.wanted) if made else (trade.given,):
            self._held[entry.task_id] = now_s + tuning.TRADE_HOLD_S

    def _draw(self, what: str) -> float:
        """Return a pseudo-random number in [0, 1) that only this node draws."""
        digest = hashlib.sha256(f"{self._node}/{what}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48


def _count(entry: DemandEntry) -> tuple[int, int]:
    return entry.operators, entry.holders


def _is_scarce(entry: DemandEntry) -> bool:
    return entry.operators < limits.MIN_OPERATORS


def _count_left(entry: DemandEntry) -> tuple[int, int]:
    """Return the fewest operators and holders that a task may have left without one of its holders.

    Where an operator has several nodes, the count shows only after the node has left.
    """
    return entry.operators - (entry.operators == entry.holders), entry.holders - 1


def _is_needed(entry: DemandEntry) -> bool:
    """Return whether a task would be sold without verification if one more node left it."""
    return not _is_scarce(entry) and _count_left(entry)[0] < limits.MIN_OPERATORS


def _is_gain(operators: int, holders: int, given: DemandEntry, wanted: DemandEntry) -> bool:
    """Return whether a task with so many operators and holders is served better than ``wanted``.

    One that nobody uses gives way in any case to one that is used.
    """
    if wanted.used and not given.used:
        return True
    return (operators, holders > wanted.holders) > (wanted.operators, False)
