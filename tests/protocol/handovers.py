"""One seed, one history of members that take a key over from each other, again and again.

The machines are those of the processes, their signatures real; dealing and judging, which are pure
and costly, are computed once for all members (``share_work``). The chain does what the contract
does. Every boundary between persisting and sending is a place where a member can die.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest

from splitup.core.errors import BadSignature
from splitup.crypto import bls, dkg
from splitup.crypto.keys import Identity
from splitup.crypto.quorum import Domain, compute_quorum_size
from splitup.protocol.committee import commands as cmd
from splitup.protocol.committee import events as ev
from splitup.protocol.committee.certificates import CommitteeView
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.member import CommitteeMember
from splitup.protocol.membership import Membership
from tests.protocol.committee.test_key_generation import spoil
from tests.protocol.committees import CHAIN_ID, COMMITTEE, make_identity, make_view
from tests.protocol.histories import ECONOMICS
from tests.protocol.scenarios import Broken
from tests.protocol.simulator import GRACE_S, read_token

DOMAIN = Domain(CHAIN_ID, COMMITTEE)
END_BLOCKS = 120  # of one handover: the wait for late dealings, twice and more
_DOWN_BLOCKS = 3  # how long a member that died is away
_CONFIRM_BLOCKS = 2  # a vote that the chain does not hold is sent again
_PARTIES = 12


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a history depends on; members are numbers of ``make_identity``."""

    seed: int
    committees: tuple[tuple[int, ...], ...]  # one after the other
    crash_rate: float = 0.0  # per boundary
    crash_at: tuple[int, int] | None = None  # (member, boundary): exactly there
    loses_journal: bool = False  # whoever dies
    loss: float = 0.0  # of transactions
    lag_blocks: int = 0  # how far members may read behind the chain
    liars: frozenset[int] = frozenset()  # deal one member a bad share, complain about everybody
    dead: frozenset[int] = frozenset()  # from the first handover on

    @property
    def faulty(self) -> frozenset[int]:
        return self.liars | self.dead


def make_scenario(seed: int) -> Scenario:
    """Draw two handovers; at most f members of each committee are faulty."""
    rng = random.Random(seed)
    sizes = (4, rng.choice((4, 4, 4, 7)), 4)
    numbers = list(range(1, _PARTIES + 1))
    committees = [tuple(numbers[: sizes[0]])]
    for size in sizes[1:]:
        stay = rng.sample(committees[-1], rng.randint(0, min(size, len(committees[-1]))))
        others = [number for number in numbers if number not in committees[-1]]
        new = rng.sample(others, size - len(stay))
        committees.append(tuple(sorted(stay + new)))
    faulty = frozenset([rng.choice(committees[0])] if rng.random() < 0.5 else [])
    lies = rng.random() < 0.5
    return Scenario(
        seed=seed,
        committees=tuple(committees),
        # a victim that is away cannot complain in time, and would be one faulty member more
        crash_rate=0.0 if lies and faulty else rng.choice((0.0, 0.05, 0.2)),
        loses_journal=rng.random() < 0.2,
        loss=0.0 if lies and faulty else rng.choice((0.0, 0.3)),
        lag_blocks=rng.choice((0, 1)),
        liars=faulty if lies else frozenset(),
        dead=frozenset() if lies else faulty,
    )


@dataclass(slots=True)
class Life:
    """A member's process: its journal, how far it has read, and whether it runs."""

    number: int
    identity: Identity
    secret: bytes
    machine: Membership | None = None
    read: int = 0  # blocks
    boundaries: int = 0
    crashes: int = 0
    up_at: int = 0
    votes: dict[int, str] = field(default_factory=dict)  # what it confirms until it is on chain


class Board:
    """Runs a scenario; ``run`` returns when every handover is done, or raises Broken."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed ^ 0xB0A2D)
        self.block = 0
        self.blocks: list[list[ev.Event]] = [[]]
        self.views: list[CommitteeView] = []
        self.current = self.target = -1  # indices of scenario.committees
        self.key = ""
        self._pending: list[Callable[[], None]] = []
        self._dealt: set[tuple[int, str]] = set()
        self._voted: dict[int, dict[str, str]] = {}
        self._said: dict[tuple[int, str], bytes] = {}  # honest: what they dealt
        numbers = sorted({number for committee in scenario.committees for number in committee})
        self.lives = [
            Life(number, make_identity(1000 + number), bytes([number]) * 32) for number in numbers
        ]
        self.by_account = {life.identity.address: life for life in self.lives}

    # ---- running ----------------------------------------------------------------------------

    def run(self) -> Board:
        for committee in self.scenario.committees:
            self._announce([make_identity(1000 + number) for number in committee])
            ends = self.block + END_BLOCKS
            while self._is_open():
                if self.block == ends:
                    raise Broken(f"no key of committee {self.target} after {END_BLOCKS} blocks")
                self._mine()
            for _ in range(_DOWN_BLOCKS + self.scenario.lag_blocks + 1):
                self._mine()
            self._check()
        return self

    def _is_open(self) -> bool:
        return self.target != self.current or not self.key

    def _add_block(self) -> None:
        self.block += 1
        self.blocks.append([])

    def _mine(self) -> None:
        self._add_block()
        pending, self._pending = self._pending, []
        for transaction in pending:
            transaction()
        self.random.shuffle(self.lives)
        for life in self.lives:
            if self._is_dead(life):
                life.machine = None
            elif life.machine is None and self.block >= life.up_at:
                self._start(life)
            self._read(life)
            if life.machine is not None and self.block % _CONFIRM_BLOCKS == 0:
                for configuration, key in life.votes.items():
                    self._send(partial(self._confirm, life, configuration, key))

    def _is_dead(self, life: Life) -> bool:
        return life.number in self.scenario.dead and self.target > 0

    def _check(self) -> None:
        """All who are up agree on the key, and its shares sign; old ones are worth nothing."""
        view = self.views[self.current]
        ready = []
        for life in self.lives:
            machine = life.machine
            if machine is None or life.number in self.scenario.liars:
                continue
            known = machine._keys.get(view.configuration)
            if known is None:
                raise Broken(f"{life.number} does not know the key")
            ready.append((life, known))
        groups = {known.group for _, known in ready}
        if len(groups) != 1 or groups.pop().public_key != self.key:
            raise Broken(f"members hold different keys of configuration {view.configuration}")
        accounts = [member.account for member in view.members]
        shares = {
            accounts.index(life.identity.address): known.share
            for life, known in ready
            if known.share
        }
        if len(shares) < view.quorum:
            raise Broken(f"only {len(shares)} members can sign")
        chosen = self.random.sample(sorted(shares), view.quorum)
        if not _signs(self.key, {place: shares[place] for place in chosen}, view.quorum):
            raise Broken(f"the members {chosen} cannot sign together")
        if self.current == 0:
            return
        before = self.views[self.current - 1].configuration
        stale = next(
            known.share
            for life in self.lives
            if life.machine and (known := life.machine._keys.get(before)) and known.share
        )
        if _signs(self.key, {**{p: shares[p] for p in chosen}, chosen[0]: stale}, view.quorum):
            raise Broken("a share of the committee before still counts")

    # ---- members ----------------------------------------------------------------------------

    def _start(self, life: Life) -> None:
        if life.crashes and self.scenario.loses_journal:
            life.secret = bytes([life.number + 100 * life.crashes % 156]) * 32

        def make_member(view: CommitteeView, guard: SigningGuard) -> CommitteeMember:
            return CommitteeMember(
                life.identity, view, ECONOMICS, read_token, grace_s=GRACE_S, signing_guard=guard
            )

        guard = SigningGuard()
        life.machine = Membership(life.identity, DOMAIN, life.secret, make_member, guard)
        life.read, life.votes = 0, {}

    def _read(self, life: Life) -> None:
        """Tell a member what blocks hold, some of them at once."""
        last = self.block - self.random.randint(0, self.scenario.lag_blocks)
        for event in [event for block in self.blocks[life.read : last + 1] for event in block]:
            self._feed(life, event)
        life.read = max(life.read, last + 1)
        self._feed(life, ev.BoardRead(last))

    def _feed(self, life: Life, event: ev.Event) -> None:
        if life.machine is None:
            return
        for command in life.machine.handle(event, float(self.block)):
            if isinstance(command, cmd.Fault):
                self._check_fault(command.peer)
            if not isinstance(command, cmd.PostDealing | cmd.PostComplaint | cmd.ConfirmGroupKey):
                continue
            if self._dies(life):
                return
            self._carry_out(life, command)
            if self._dies(life):
                return
        if life.number in self.scenario.liars and isinstance(event, ev.DealingPosted):
            lie = cmd.PostComplaint(event.dealer, b"{}")
            self._send(partial(self._complain, life, lie))

    def _dies(self, life: Life) -> bool:
        """Let a member die at this boundary, when the scenario says so."""
        life.boundaries += 1
        scenario = self.scenario
        if scenario.crash_at != (life.number, life.boundaries) and (
            life.crashes > 3 or self.random.random() >= scenario.crash_rate
        ):
            return False
        life.machine = None
        life.crashes += 1
        life.up_at = self.block + self.random.randint(1, _DOWN_BLOCKS)
        return True

    def _carry_out(self, life: Life, command: cmd.Command) -> None:
        match command:
            case cmd.PostDealing():
                dealing = command.dealing
                if life.number in self.scenario.liars:
                    assert life.machine is not None
                    ceremony = life.machine._generations[self.target + 1]._ceremony
                    victim = self.random.randrange(len(ceremony.members))
                    dealing = spoil(dealing, ceremony, victim)
                elif not self.scenario.loses_journal:
                    key = (self.target, life.identity.address)
                    if self._said.setdefault(key, dealing) != dealing:
                        raise Broken(f"{life.number} dealt twice")
                self._send(partial(self._deal, life, dealing, self.target))
            case cmd.PostComplaint():
                self._send(partial(self._complain, life, command))
            case cmd.ConfirmGroupKey():
                life.votes[command.configuration] = command.public_key
                self._send(partial(self._confirm, life, command.configuration, command.public_key))

    def _send(self, transaction: Callable[[], None]) -> None:
        if self.random.random() >= self.scenario.loss:
            self._pending.append(transaction)

    def _check_fault(self, peer: str) -> None:
        if self.by_account[peer].number not in self.scenario.liars:
            raise Broken(f"honest member {peer} is blamed")

    # ---- the chain, as Committee.sol ----------------------------------------------------------

    def _announce(self, members: list[Identity]) -> None:
        self.target += 1
        self._add_block()
        view = make_view(members, configuration=self.target + 1)
        self.views.append(view)
        if self.target == 0:
            self.current = 0
        self._emit_configuration(view, is_handover=self.target > 0)

    def _emit_configuration(self, view: CommitteeView, *, is_handover: bool) -> None:
        self.blocks[self.block].append(
            ev.ConfigurationSeen(
                configuration=view.configuration,
                members=view.members,
                is_handover=is_handover,
                is_current=not is_handover,
                block_number=self.block,
            )
        )

    def _deal(self, life: Life, dealing: bytes, target: int) -> None:
        account = life.identity.address
        if not self._is_open() or target != self.target or (target, account) in self._dealt:
            return
        if self._sits(account, self.current):
            self._dealt.add((target, account))
            self.blocks[self.block].append(
                ev.DealingPosted(account, dealing, self.block, self.views[target].configuration)
            )

    def _complain(self, life: Life, command: cmd.PostComplaint) -> None:
        account = life.identity.address
        if self._is_open() and self._sits(account, self.target):
            number = self.views[self.target].configuration
            self.blocks[self.block].append(
                ev.ComplaintPosted(command.dealer, account, command.evidence, self.block, number)
            )

    def _confirm(self, life: Life, configuration: int, key: str) -> None:
        account, view = life.identity.address, self.views[self.target]
        if not self._is_open() or configuration != view.configuration:
            return
        if not self._sits(account, self.target) or (self.key and key != self.key):
            return
        votes = self._voted.setdefault(configuration, {})
        votes.setdefault(account, key)
        if sum(vote == key for vote in votes.values()) < compute_quorum_size(len(view.members)):
            return
        self.key = key
        if self.current != self.target:
            self.current = self.target
            self._emit_configuration(view, is_handover=False)

    def _sits(self, account: str, index: int) -> bool:
        return any(member.account == account for member in self.views[index].members)


def _signs(key: str, shares: Mapping[int, bytes], threshold: int) -> bool:
    partials = {place: bls.sign_partial(share, b"d", b"m") for place, share in shares.items()}
    try:
        bls.verify_signature(key, b"d", b"m", bls.combine(partials, threshold))
    except BadSignature:
        return False
    return True


@contextmanager
def share_work() -> Iterator[None]:
    """Have all members of all histories share what is pure and costly of key generation."""

    def compute_group(ceremony: dkg.Ceremony, dealings: Mapping[int, Any]) -> dkg.GroupKey:
        return grouped(ceremony, tuple(sorted(dealings.items())))

    compute = dkg.compute_group
    grouped = cache(lambda ceremony, dealings: compute(ceremony, dict(dealings)))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_dealing", "make_resharing", "make_complaint", "is_complaint_valid"):
            patch.setattr(dkg, name, cache(getattr(dkg, name)))
        for name in ("compute_public_key", "parse_public_key", "sign_partial"):
            patch.setattr(bls, name, cache(getattr(bls, name)))
        patch.setattr(dkg, "open_and_verify_share", _cache_outcome(dkg.open_and_verify_share))
        patch.setattr(dkg, "compute_group", compute_group)
        patch.setattr(dkg.Dealing, "from_bytes", staticmethod(cache(dkg.Dealing.from_bytes)))
        yield


def _cache_outcome(function: Callable[..., Any]) -> Callable[..., Any]:
    """As ``functools.cache``, and what is raised is remembered, too."""

    @cache
    def attempt(*arguments: Any) -> tuple[Any, Exception | None]:
        try:
            return function(*arguments), None
        except Exception as error:
            return None, error

    def call(*arguments: Any) -> Any:
        value, error = attempt(*arguments)
        if error is not None:
            raise error
        return value

    return call


def run_scenario(scenario: Scenario) -> str:
    """Run one history; return "" or how to replay the failure."""
    try:
        Board(scenario).run()
    except Exception as error:
        return f"Board({scenario}).run()   # {type(error).__name__}: {error}"
    return ""
