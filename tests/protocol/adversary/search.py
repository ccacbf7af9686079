"""Searches seeds for worlds that break a promise, and replays them.

python -m tests.protocol.adversary.search 4711             # what happens in one world
python -m tests.protocol.adversary.search --seeds 100000   # a long search
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from splitup.core import limits
from tests.protocol.adversary.deviations import Adversary
from tests.protocol.adversary.market import GRACE_S
from tests.protocol.adversary.parties import Parties
from tests.protocol.adversary.promises import REMAINS, list_broken
from tests.protocol.adversary.world import CLIENT, World, make_setting

REPLAY = "python -m tests.protocol.adversary.search"


@dataclass(slots=True)
class Outcome:
    """How a world ended."""

    seed: int
    party: str
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    world: World | None = None

    def describe(self) -> str:
        """Return the line that replays this world, and why one should."""
        return f"{REPLAY} {self.seed}   # {self.party}: {'; '.join(self.broken)}"


def run_world(seed: int, *, is_honest: bool = False) -> Outcome:
    """Run one world to its end; return what it broke. ``is_honest``: nobody deviates."""
    with patch.object(limits, "INTERIM_STEPS", 1):
        return _run_world(seed, is_honest)


def _run_world(seed: int, is_honest: bool) -> Outcome:
    adversary = Adversary(seed)
    setting = make_setting(seed, adversary.party)
    if is_honest:
        adversary.party, adversary.gives_away = "nobody", False
        setting = replace(setting, registered_low=False)
    else:
        adversary.choose_habits(is_signed=setting.is_signed, is_abroad=setting.is_abroad)
    world = World(setting, adversary, seed)
    _give_keys(world)
    parties = Parties(world)
    outcome = Outcome(seed, adversary.party, notes=adversary.notes, world=world)
    world.after(0.1, parties.ask)
    patience_s = world.setting.deadline_s + GRACE_S + 2 * world.setting.block_s
    world.advance(patience_s, world.is_over)
    if "repeat" in {habit.action for habit in adversary.habits}:
        world.advance(max(world.now, 100.0))
        world.advance(world.now + patience_s, world.is_over)
    world.advance(world.now + 1.0)
    world.skip(world.now + 1_300.0)
    world.skip(world.now + 1_300.0)
    outcome.broken = list_broken(world, parties)
    return outcome


def _give_keys(world: World) -> None:
    """Let the adversary act for its party, as far as that is known from the start."""
    adversary = world.adversary
    if adversary.party == "client":
        adversary.accounts = {CLIENT.address}
        adversary.identities = {CLIENT.address: CLIENT}
    if adversary.party == "member":
        identity = adversary.random.choice(world.identities)
        adversary.accounts = {identity.address}
        adversary.identities = {identity.address: identity}
        adversary.context = world.members[identity.address].context
        adversary.told, adversary.misled = sorted(world.members.keys() - adversary.accounts)[:2]


def search(seed: int) -> str:
    """Return "" or the line that replays a world in which a deviation broke a promise.

    What docs/security.md says that remains is not reported, nor what breaks without an adversary.
    """
    try:
        outcome = run_world(seed)
        known = {text for party, text in REMAINS if party == outcome.party}
        outcome.broken = [text for text in outcome.broken if text not in known]
        if outcome.broken:
            twin = run_world(seed, is_honest=True)
            outcome.broken = [text for text in outcome.broken if text not in twin.broken]
    except Exception as error:
        return f"{REPLAY} {seed}   # {type(error).__name__}: {error}"
    return outcome.describe() if outcome.broken else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replay", type=int, nargs="*", help="seeds to replay")
    parser.add_argument("--seeds", type=int, default=0, help="how many to search")
    parser.add_argument("--first", type=int, default=0, help="where to begin")
    options = parser.parse_args(arguments)
    failed = 0
    for seed in options.replay:
        outcome = run_world(seed)
        assert outcome.world is not None
        print(outcome.world.setting, *outcome.world.adversary.habits, sep="\n")
        print(*outcome.notes, sep="\n")
        print(*(f"!!! {text}" for text in outcome.broken), sep="\n")
        failed |= bool(outcome.broken)
    kinds: Counter[str] = Counter()
    for line in map(search, range(options.first, options.first + options.seeds)):
        if line:
            failed = 1
            kinds[line.partition("# ")[2]] += 1
            if kinds[line.partition("# ")[2]] <= 3:
                print(line, flush=True)
    for text, count in kinds.most_common():
        print(f"{count:6}  {text}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
