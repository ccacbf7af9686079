"""One account across committee configurations: one ``CommitteeMember`` machine for each of them.

A handover is announced on chain, the key is reshared there, and then the chain changes to the new
configuration. A request belongs to the configuration that was current at its position on the chain,
and stays with it to its end, so two machines may run side by side. No restart is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from splitup.core import limits, tuning
from splitup.core.errors import PeerFault, SplitUpError, Unavailable
from splitup.crypto import quorum
from splitup.crypto.keys import Identity, derive_key
from splitup.graph.manifest import Manifest
from splitup.messages.base import ZERO_BYTES32
from splitup.messages.completions import SignedTakeover
from splitup.messages.plans import PlanCertificate
from splitup.messages.snapshots import Snapshot
from splitup.messages.verification import Evidence, SignedAttestation, SignedDueNotice
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from splitup.protocol.committee.commands import Command, ConfirmGroupKey, Gossip, Log
from splitup.protocol.committee.context import SigningGuard
from splitup.protocol.committee.events import (
    BlockSeen,
    BoardRead,
    ComplaintPosted,
    ConfigurationSeen,
    DealingPosted,
    Event,
    GossipReceived,
    KeyReady,
    ManifestFetched,
    MemberEvent,
    NodesSeen,
    PlanPushed,
    RequestSeen,
    SignedRequestReceived,
    SnapshotAccepted,
)
from splitup.protocol.committee.key_generation import KeyGeneration, Predecessor
from splitup.protocol.member import CommitteeMember
from splitup.protocol.settlement.attestations import sign_notice
from splitup.protocol.snapshots.demand import Holdings

T = TypeVar("T")

_ENTROPY = b"splitup/dkg/entropy/v1"


class Membership:
    """The machines of one account. ``secret`` (32 bytes) must be in the journal already.

    ``make_member`` makes the machine of a configuration from what the journal holds by then. All
    machines share ``signing_guard``: a reorganisation that crosses a handover moves a request from
    one machine to another, and what the first signed for it binds the second.
    """

    def __init__(
        self,
        identity: Identity,
        domain: quorum.Domain,
        secret: bytes,
        make_member: Callable[[CommitteeView, SigningGuard], CommitteeMember],
        signing_guard: SigningGuard,
        confirmations: int = 0,
    ) -> None:
        self._identity = identity
        self._domain = domain
        self._secret = secret
        self._make_member = make_member
        self._signing_guard = signing_guard
        self._confirmations = confirmations
        self._views: dict[int, CommitteeView] = {}
        self._generations: dict[int, KeyGeneration] = {}
        self._keys: dict[int, KeyReady] = {}  # with our share, where we have one
        self._machines: dict[int, CommitteeMember] = {}
        self._latest: dict[type[MemberEvent], MemberEvent] = {}  # what a new machine must know
        self._post_at = 0.0
        self.current = 0

    # ---- questions: of the current machine, or of whichever knows ---------------------------

    @property
    def is_member(self) -> bool:
        """Return whether we are a member of the current configuration or of a later one."""
        return any(c >= self.current for c in self._machines)

    def find_certificate(self, execution_id: str) -> PlanCertificate | None:
        return self._find(lambda m: m.plans.find_certificate(execution_id))

    def find_evidence(self, execution_id: str) -> Evidence | None:
        return self._find(lambda m: m.settlements.find_evidence(execution_id))

    def find_attestation(self, execution_id: str) -> SignedAttestation | None:
        return self._find(lambda m: m.settlements.find_attestation(execution_id))

    def sign_notice(
        self, execution_id: str, validator: str, tasks: Collection[int]
    ) -> SignedDueNotice | None:
        """Return what our attestation says to a node, or None; see ``attestations``."""
        attested = self.find_attestation(execution_id)
        if attested is None:
            return None
        return sign_notice(self._identity, attested.attestation, validator, tasks)

    def is_over(self, execution_id: str) -> bool:
        return bool(self._find(lambda m: m.settlements.is_over(execution_id)))

    def find_refusal(self, execution_id: str) -> str:
        return self._find(lambda m: m.plans.find_refusal(execution_id)) or ""

    def find_snapshot(self, root: str) -> Snapshot | None:
        return self._find(lambda m: m.contents.find_snapshot(root))

    def find_member(self, signing_key: str) -> MemberView | None:
        """Return the member with this signing key in any of our configurations, or None."""
        return self._find(lambda m: m.context.view.member_with_key(signing_key))

    def list_peers(self) -> list[MemberView]:
        """Return the other members of all our configurations, as the latest one states them."""
        peers = {
            peer.account: peer
            for _, machine in sorted(self._machines.items())
            for peer in machine.context.view.members
            if peer.account != self._identity.address
        }
        return list(peers.values())

    def list_accounts(self, configuration: int) -> list[str]:
        """Return the accounts that messages of a configuration go to."""
        machine = self._machines.get(configuration)
        accounts = machine.context.accounts() if machine else []
        return [account for account in accounts if account != self._identity.address]

    def is_unprobed(self, node: str) -> bool:
        return bool(self._find(lambda m: m.nodes.is_unprobed(node)))

    def list_heard(self, now: float) -> list[tuple[str, str]]:
        return self._find(lambda m: m.nodes.list_heard(now)) or []

    def get_head(self) -> str:
        return self._find(lambda m: m.nodes.heads.head) or ZERO_BYTES32

    def list_replaced(self, node: str) -> list[SignedTakeover]:
        """Return the takeovers that a node is to be told, of all configurations."""
        told = (m.settlements.list_replaced(node) for m in self._machines.values())
        return list(chain.from_iterable(told))[: limits.MAX_TOLD_TAKEOVERS]

    def get_heartbeat_period_s(self) -> float:
        return self._find(lambda m: m.nodes.period_s) or limits.HEARTBEAT_PERIOD_S

    def get_heartbeat_rest_s(self, now: float) -> float:
        return self._find(lambda m: m.nodes.get_rest_s(now)) or limits.HEARTBEAT_PERIOD_S

    def is_resting(self, now: float) -> bool:
        """Return whether no machine has anything to do, and no key is being generated."""
        latest = self._generations.get(max(self._generations, default=0))
        is_posting = latest is not None and not latest.is_done
        return not is_posting and all(m.is_resting(now) for m in self._machines.values())

    def get_next_s(self, now: float) -> float:
        """Return when the next tick has something to do, unless an event comes before."""
        if not self.is_resting(now):
            return now
        return min((m.get_next_s(now) for m in self._machines.values()), default=math.inf)

    def may_name(self, block_hash: str, now: float) -> bool:
        return bool(self._find(lambda m: m.nodes.may_name(block_hash, now)))

    def find_manifest(self, model_id: str) -> Manifest | None:
        return self._find(lambda m: m.contents.find_manifest(model_id))

    def has_manifest(self, model_id: str) -> bool:
        return all(m.contents.find_manifest(model_id) is not None for m in self._machines.values())

    def is_open(self, execution_id: str) -> bool:
        return bool(self._find(lambda m: execution_id in m.plans))

    def compute_demand(self, now: float, retired: Collection[str]) -> list[dict[str, Any]]:
        return self._find(lambda m: m.compute_demand(now, retired)) or []

    def collect_holdings(self, now: float) -> Holdings:
        return self._find(lambda m: m.collect_holdings(now)) or Holdings.collect(())

    def find_current_snapshot(self) -> Snapshot | None:
        return self._find(lambda m: m.snapshots.find_current())

    def get_status(self, now: float) -> dict[str, Any]:
        status = self._find(lambda m: m.get_status(now)) or {"block": 0, "group_key": ""}
        return {
            **status,
            "account": self._identity.address,
            "configuration": self.current,
            "executions_open": sum(len(m.plans) for m in self._machines.values()),
        }

    # ---- the machine ------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Give one event to the machines it concerns; raise the error if all of them raise one."""
        match event:
            case ConfigurationSeen():
                return self._process_configuration(event, now)
            case DealingPosted() | ComplaintPosted():
                generation = self._generations.get(event.configuration)
                if generation is None:
                    return []
                if isinstance(event, DealingPosted):
                    return generation.process_dealing(event)
                return generation.process_complaint(event)
            case BoardRead():
                return self._process_board(event.block_number, now)
            case GossipReceived():
                machine = self._machines.get(event.configuration)
                if machine is None:
                    raise Unavailable(
                        f"we are not in committee configuration {event.configuration}, or not yet"
                    )
                return self._tag(event.configuration, machine.handle(event, now))
            case RequestSeen():
                number = event.configuration or self.current
                return self._process_request(number, event, now)
            case SignedRequestReceived():
                machine = self._machines.get(self.current)
                if machine is None:
                    raise Unavailable("we are no committee member now; ask the others")
                return self._tag(self.current, machine.handle(event, now))
            case PlanPushed():
                return self._forward(event, now, lambda m: event.execution_id in m.plans)
            case NodesSeen() | SnapshotAccepted() | BlockSeen():
                self._latest[type(event)] = event
                return self._forward(event, now, lambda _: True)
            case _:  # for all machines; mypy checks that no board fact gets here
                return self._forward(event, now, lambda _: True)

    def _forward(
        self, event: MemberEvent, now: float, concerns: Callable[[CommitteeMember], bool]
    ) -> list[Command]:
        commands: list[Command] = []
        errors: list[SplitUpError] = []
        asked = 0
        for number, machine in sorted(self._machines.items(), reverse=True):
            if not concerns(machine):
                continue
            asked += 1
            try:
                commands += self._tag(number, machine.handle(event, now))
            except (PeerFault, Unavailable) as error:
                errors.append(error)
        if errors and len(errors) == asked:
            raise errors[0]
        return commands

    def _tag(self, configuration: int, commands: list[Command]) -> list[Command]:
        return [
            replace(command, configuration=configuration)
            if isinstance(command, Gossip)
            else command
            for command in commands
        ]

    # ---- configurations ---------------------------------------------------------------------

    def _process_configuration(self, event: ConfigurationSeen, now: float) -> list[Command]:
        commands: list[Command] = []
        number = event.configuration
        if number not in self._views:
            commands += self._announce(event, now)
        if event.is_current and number > self.current:
            commands += self._change_over(number)
        return commands

    def _announce(self, event: ConfigurationSeen, now: float) -> list[Command]:
        """Follow the key generation of a new configuration; start our machine in it."""
        number, predecessor = event.configuration, None
        if event.is_handover:
            # the old key was complete on the chain before the handover began
            self._read_keys(event.block_number, now)
            key = self._keys.get(self.current)
            if key is None:
                return [Log(f"the key before configuration {number} is unknown; cannot follow it")]
            predecessor = Predecessor(self._views[self.current], key.group, key.share)
        members = tuple(sorted(event.members, key=lambda member: member.account))
        view = self._views[number] = CommitteeView(
            configuration=number,
            members=members,
            quorum=quorum.compute_quorum_size(len(members)),
            group_key="",
            domain=self._domain,
        )
        entropy = derive_key(self._secret, _ENTROPY + number.to_bytes(8, "big"))
        self._generations[number] = KeyGeneration(
            self._identity, view, entropy, predecessor, self._confirmations
        )
        self._post_at = 0.0
        if not self._is_ours(number):
            return []
        commands = self._start_machine(number, now)
        return [Log(f"we are a member of committee configuration {number}"), *commands]

    def _is_ours(self, number: int) -> bool:
        view = self._views.get(number)
        return view is not None and self._identity.address in {m.account for m in view.members}

    def _start_machine(self, number: int, now: float) -> list[Command]:
        machine = self._make_member(self._views[number], self._signing_guard)
        machine.context.is_active = number == self.current
        key = self._keys.get(number)
        events: list[MemberEvent] = [*self._latest.values()]
        known = (m for other in self._machines.values() for m in other.contents.manifests())
        events += map(ManifestFetched, known)
        events += [key] if key is not None else []
        self._machines[number] = machine
        return [c for event in events for c in self._tag(number, machine.handle(event, now))]

    def _process_request(self, number: int, event: RequestSeen, now: float) -> list[Command]:
        """Give a request to the machine of its configuration.

        The machine of an earlier one is started again: after a restart the chain's configurations
        are read before its requests, and a reorganisation may bring requests back.
        """
        commands: list[Command] = []
        if number not in self._machines and self._is_ours(number):
            commands += self._start_machine(number, now)
        machine = self._machines.get(number)
        return commands + self._tag(number, machine.handle(event, now)) if machine else []

    def _change_over(self, number: int) -> list[Command]:
        """The chain changed to this configuration: new requests belong to its machine."""
        self.current = number
        for configuration, machine in list(self._machines.items()):
            machine.context.is_active = configuration == number
            if configuration < number and not len(machine.plans):
                del self._machines[configuration]
        role = "a member" if number in self._machines else "no member"
        rest = " and finish the open executions" if self._machines and role != "a member" else ""
        return [Log(f"committee configuration {number} is current now; we are {role}{rest}")]

    def _process_board(self, block_number: int, now: float) -> list[Command]:
        """Evaluate the board up to this block; post our dealing while the chain lacks it."""
        commands = self._read_keys(block_number, now)
        target = max(self._generations, default=0)
        generation = self._generations.get(target)
        if generation is not None and not generation.is_done and now >= self._post_at:
            self._post_at = now + tuning.BOARD_RETRY_S  # post again until the chain holds it
            commands += generation.process_start()
        for number in [
            n for n, m in self._machines.items() if n < self.current and not len(m.plans)
        ]:
            del self._machines[number]
        return commands

    def _read_keys(self, block_number: int, now: float) -> list[Command]:
        commands: list[Command] = []
        for number, generation in sorted(self._generations.items()):
            if number in self._keys:
                continue
            for command in generation.process_block(block_number):
                if isinstance(command, KeyReady):
                    self._keys[number] = command
                    machine = self._machines.get(number)
                    if machine is not None:
                        commands += self._tag(number, machine.handle(command, now))
                elif isinstance(command, ConfirmGroupKey):
                    commands.append(replace(command, configuration=number))
                else:
                    commands.append(command)
            if generation.group is not None and number not in self._keys:
                self._keys[number] = KeyReady(generation.group, b"")
        return commands

    def _find(self, ask: Callable[[CommitteeMember], T | None]) -> T | None:
        """Return the first non-empty answer, asking the current machine first."""
        order = sorted(self._machines, key=lambda number: (number != self.current, -number))
        for number in order:
            answer = ask(self._machines[number])
            if answer:
                return answer
        return None
