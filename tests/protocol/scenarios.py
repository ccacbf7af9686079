"""What goes wrong in a history of a committee, and the promises that must hold all the same.

``Checker`` is written against the protocol's promises and shares no code with the machines.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitup.protocol.committee.equivocation import compute_vote_hash, get_slot
from splitup.protocol.committee.peer_messages import PlanVote, SnapshotVote

STABLE_S = 10.0  # from then on the network delivers, and who is down comes back


class Broken(AssertionError):
    """A history in which a promise of the protocol was not kept."""


# ---- what happens in a history -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Partition:
    """Between two times, members of ``side`` and the others hear nothing of each other."""

    start_s: float
    end_s: float
    side: frozenset[int]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a history depends on; places are members' indices."""

    seed: int
    size: int = 4
    loss: float = 0.0
    repeat: float = 0.0
    delay_ms: tuple[int, int] = (1, 5)
    partitions: tuple[Partition, ...] = ()
    crash_rate: float = 0.0  # per batch of commands that persists or sends
    crash_at: tuple[int, int] | None = None  # (place, boundary): exactly there
    twins: frozenset[int] = frozenset()  # the same key twice
    liars: frozenset[int] = frozenset()  # sign and say different things to different members
    mute: frozenset[int] = frozenset()  # down from the start to the end
    first_epoch: int = 0
    reorgs: int = 0
    requests: int = 2

    @property
    def faulty(self) -> frozenset[int]:
        return self.twins | self.liars | self.mute


def make_scenario(seed: int) -> Scenario:
    """Draw what goes wrong; never more than f members are faulty for good."""
    rng = random.Random(seed)
    size = 7 if rng.random() < 0.25 else 4
    places = list(range(size))
    rng.shuffle(places)
    kinds: dict[str, set[int]] = {"twins": set(), "liars": set(), "mute": set()}
    for place in places[: rng.randint(0, (size - 1) // 3)]:
        kinds[rng.choice(list(kinds))].add(place)
    partitions = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        start = rng.uniform(0, STABLE_S - 3)
        side = frozenset(rng.sample(range(size), rng.randint(1, size - 1)))
        partitions.append(Partition(start, rng.uniform(start, STABLE_S), side))
    bad = rng.random() < 0.4
    return Scenario(
        seed=seed,
        size=size,
        loss=rng.uniform(0, 0.3) if bad else 0.0,
        repeat=rng.uniform(0, 0.3) if bad else 0.0,
        delay_ms=(1, rng.choice((5, 50, 500, 2000))) if bad else (1, 5),
        partitions=tuple(partitions),
        crash_rate=rng.choice((0.0, 0.0, 0.01, 0.05)),
        twins=frozenset(kinds["twins"]),
        liars=frozenset(kinds["liars"]),
        mute=frozenset(kinds["mute"]),
        first_epoch=rng.randrange(size),
        reorgs=rng.choice((0, 0, 0, 1, 2)),
    )


# ---- what must hold ------------------------------------------------------------------------------


@dataclass(slots=True)
class Checker:
    """Sees every vote that leaves a member, and whatever the chain accepts."""

    size: int
    honest: frozenset[str]
    signers: dict[tuple[str, bytes], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )  # (slot, what) -> who
    said: dict[tuple[str, str], bytes] = field(default_factory=dict)  # honest: (who, slot) -> what
    certified: dict[str, bytes] = field(default_factory=dict)
    seeds: dict[str, str] = field(default_factory=dict)

    @property
    def quorum(self) -> int:
        return 2 * ((self.size - 1) // 3) + 1

    def note_vote(self, vote: SnapshotVote | PlanVote) -> None:
        """Never two things from an honest member, never two certificates for one slot."""
        slot, what = get_slot(vote), compute_vote_hash(vote)
        if vote.member in self.honest:
            before = self.said.setdefault((vote.member, slot), what)
            if before != what:
                raise Broken(f"{vote.member} signed two things for {slot}")
        voters = self.signers[slot, what]
        voters.add(vote.member)
        if len(voters) >= self.quorum and self.certified.setdefault(slot, what) != what:
            raise Broken(f"two certificates exist for {slot}")

    def note_quorum(self, what: str, signers: Sequence[str], members: Sequence[str]) -> None:
        if len(set(signers)) < self.quorum or not set(signers) <= set(members):
            raise Broken(f"{what} rests on {len(set(signers))} signers, not {self.quorum}")

    def note_seed(self, alpha: str, seed: str) -> None:
        if self.seeds.setdefault(alpha, seed) != seed:
            raise Broken(f"two seeds for {alpha}")

    def note_accused(self, member: str) -> None:
        if member in self.honest:
            raise Broken(f"evidence of equivocation against {member}, who is honest")
