"""What must hold at the end of every world, whoever deviated and however.

Written against the protocol's promises; shares no code with the machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from splitup.core import tuning
from splitup.core.limits import EXPOSURE_FLOOR_MICRO_USDC
from splitup.messages.base import CLIENT as CLIENT_TASK
from splitup.messages.completions import TaskCommitment
from splitup.messages.verification import Evidence, VerificationResult
from splitup.protocol.execution.routes import get_sources
from splitup.protocol.settlement.proof_of_sampling import UNPAID
from tests.protocol.adversary.giveaways import GiveAway
from tests.protocol.adversary.market import Record
from tests.protocol.adversary.parties import Parties
from tests.protocol.adversary.tensors import Run, digest, digest_all
from tests.protocol.adversary.world import CLIENT, NODES, STAKE_MICRO_USDC, World

LARGEST: Final = 1_500  # entries of a member's containers when nothing is open; honest: 230
_DEPTH: Final = 7
_UNPAID: Final = frozenset(outcome.value for outcome in UNPAID)
# What docs/security.md says that remains: who breaks what, and words of the sentence that says so.
REMAINS: Final = {
    (
        "executor",
        "honest work is unpaid: a neighbour contradicts it, and is not paid either",
    ): "neighbours that contradict each other both go unpaid",
    (
        "executor",
        "honest work is unpaid: fewer steps count than were delivered",
    ): "leaves the others' pay at an earlier interim end",
    (
        "executor",
        "honest work is unpaid: blocks are slow",
    ): "On a chain whose blocks take longer",
    (
        "client",
        "honest work is unpaid: blocks are slow",
    ): "On a chain whose blocks take longer",
    (
        "client",
        "honest work is unpaid: a neighbour contradicts it, and is not paid either",
    ): "neighbours that contradict each other both go unpaid",
    (
        "client",
        "honest work is unpaid: a node of the client answers for its task",
    ): "A client with a node of its own among the candidates of a task",
    (
        "executor",
        "the client received other outputs than were committed to, and nobody pays: it did not end "
        "the execution in time",
    ): "What a client received is compared only if it ends the execution in time",
    (
        "executor",
        "a node received other tensors than were committed to, and nobody pays",
    ): "What a node received of another, or of one that was replaced",
    (
        "executor",
        "honest validation is unpaid: the executor's inputs are others than the store's",
    ): "Validators of a task whose executor commits to other inputs",
    (
        "executor",
        "a node is paid for inputs of a node that was replaced",
    ): "What a node received of another, or of one that was replaced",
    (
        "executor",
        "a drawn lie is paid: it names inputs of a node that was replaced",
    ): "What a node received of another, or of one that was replaced",
    (
        "validator",
        "honest validation is unpaid: it came too late",
    ): "A validator that was asked because another was late",
    (
        "validator",
        "honest validation is unpaid: it was asked in addition",
    ): "A validator that was asked because another was late",
    (
        "relay",
        "honest validation is unpaid: it came too late",
    ): "A relay that holds a verification order back",
    (
        "relay",
        "honest validation is unpaid: it was asked in addition",
    ): "A relay that holds a verification order back",
    (
        "member",
        "honest validation is unpaid: it came too late",
    ): "A member that sends an order to verify again",
    (
        "member",
        "honest validation is unpaid: it was asked in addition",
    ): "A member that sends an order to verify again",
    (
        "gateway",
        "honest validation is unpaid: its inputs were altered",
    ): "A storage gateway that serves altered log objects",
}


def list_broken(world: World, parties: Parties) -> list[str]:
    """Return the promises that this world broke, each in a sentence, also those in ``REMAINS``."""
    found = [*_check_bonds(world), *_check_stakes(world), *_check_end(world)]
    found += _check_reserved(world)
    for run in parties.runs.values():
        record = world.market.records.get(run.id)
        found += _check_price(world, run)
        if record is None:
            continue
        evidence = _find_evidence(world, run.id)
        if (away := parties.giveaways.get(run.id)) is not None:
            found += _check_giveaway(world, run, away, evidence)
        elif record.status == "settled" and evidence is not None:
            found += _Settled(world, run, record, evidence).check()
        elif world.adversary.party != "client" and run.told.keys() - world.adversary.accounts:
            found.append(f"honest work is unpaid: {_explain_unpaid(world, run)}")
        elif world.adversary.party == "client" and _is_owed(world, run):
            why = "blocks are slow" if _is_slow(world) else "the client ordered it"
            found.append(f"honest work is unpaid: {why}")
    return list(dict.fromkeys(found))


def _check_giveaway(
    world: World, run: Run, away: GiveAway, evidence: Evidence | None
) -> Iterator[str]:
    """Yield what a client broke that gave tasks away."""
    record = world.market.records[run.id]
    owed = [] if _is_slow(world) else list(away.list_owed())
    if record.settlement is None or evidence is None:
        if record.status == "settled":
            yield "no member holds the evidence of a settlement"
        elif owed or (away.is_done() and not _is_slow(world)):
            yield "honest work is unpaid: the client gave it away"
        return
    steps, executors = evidence.draw.steps, evidence.draw.executors or run.plan.executors()
    paid: Counter[str] = Counter()
    for payment in record.settlement.payments:
        paid[payment.account] += payment.amount_micro_usdc
    if steps > away.asked and steps not in away.ended:
        yield "the client pays for steps that it did not ask for"
    committed = {node for node, _ in evidence.draw.commitments}
    prices = [task.price_nano_usdc for task in world.manifest.tasks]
    pays = sum(p for p, node in zip(prices, executors, strict=True) if node in committed) * steps
    if any(most > pays for _, most in owed):
        yield "honest work is unpaid: fewer steps count than most executors computed"
    verdicts = {verdict.task: verdict for verdict in evidence.verdicts}
    unpaid = {t for t, verdict in verdicts.items() if verdict.outcome in _UNPAID}
    for task, node in enumerate(executors):
        honest = away.find_coverers(steps, task)
        edges = [edge for edge in world.manifest.edges() if task in edge]
        around = {executors[end] for edge in edges for end in edge}
        if node not in honest or task not in unpaid:
            pass
        elif verdicts[task].outcome == "contradicted" and around & world.adversary.accounts:
            yield "honest work is unpaid: a neighbour contradicts it, and is not paid either"
        else:
            yield f"honest work is unpaid: its task is {verdicts[task].outcome}"
        if node not in honest and node not in world.adversary.accounts and not _is_slow(world):
            if steps <= away.done and away.is_computed(steps, task):
                yield "honest work is unpaid: nobody answers for its task"
        if honest and node in world.adversary.accounts:
            yield "honest work is unpaid: a node of the client answers for its task"
        elif honest and node not in honest and not _is_slow(world):
            yield "honest work is unpaid: a node that did not do it answers for its task"
    due = away.list_due(steps, executors)
    if not unpaid and any(paid[node] < amount for node, amount in due.items()):
        yield "honest work is unpaid"


def _explain_unpaid(world: World, run: Run) -> str:
    """Return why an execution was not settled that honest nodes committed to."""
    if run.id in world.drawn:
        return "it was not settled"
    if _is_slow(world):
        return "blocks are slow"
    prices = _list_prices(world, run)
    withheld = sum(price for node, price in prices if node in world.adversary.accounts)
    if 2 * withheld >= sum(price for _, price in prices):
        return "executors of half of the price did not commit in time"
    return "somebody did not commit in time"


def _is_owed(world: World, run: Run) -> bool:
    """Return whether executors of more than half of the price committed to one number of steps.

    The client acknowledged it; or it ordered it, as somebody can show, and the outputs were
    computed. Nodes take no inputs that another key has signed.
    """
    prices, executors = _list_prices(world, run), run.executors.executors
    results = {executors[port.task] for port in world.manifest.outputs}
    sent = [run.work[name].inputs[place] for name, place in _list_client_inputs(world, run)]
    for number in range(1, run.plan.request.steps + 1):
        done = {node: one for (node, _), one in run.completions.items() if one.steps == number}
        covered = sum(price for node, price in prices if node in done)
        is_signed = any(not one.end.is_count for one in done.values())
        is_ordered = results <= done.keys() and any(len(one) >= number for one in sent)
        is_ordered &= run.plan.request.client_key == CLIENT.signing_key_hex
        if 2 * covered > sum(price for _, price in prices) and (is_signed or is_ordered):
            return True
    return False


def _list_client_inputs(world: World, run: Run) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield task and node of everybody that read an input of the client, and the input's place."""
    for task, node in run.work:
        if run.executors.executors[task] == node:
            for place, (source, _) in enumerate(get_sources(world.manifest, task)):
                if source == CLIENT_TASK:
                    yield (task, node), place


def _list_prices(world: World, run: Run) -> list[tuple[str, int]]:
    """Return executor and price of every task."""
    prices = [task.price_nano_usdc for task in world.manifest.tasks]
    return list(zip(run.executors.executors, prices, strict=True))


def _is_slow(world: World) -> bool:
    """Return whether the chain may have no block between agreement and deadline."""
    last_s = world.setting.deadline_s - tuning.STOP_MARGIN_S
    return world.setting.block_s > tuning.AGREE_MARGIN_S or world.setting.first_block_s > last_s


def _check_bonds(world: World) -> Iterator[str]:
    for (member, _), roots in world.plan_votes.items():
        if len(roots) > 1 and member not in world.adversary.accounts:
            yield "an honest member signed two plans for one execution: its bond is lost"
    if world.accused - world.adversary.accounts:
        yield "an honest member is accused of equivocation"


def _check_stakes(world: World) -> Iterator[str]:
    for node in NODES:
        if node.address in world.adversary.accounts:
            continue
        if world.market.stakes[node.address] < STAKE_MICRO_USDC:
            yield "an honest node's stake was slashed"


def _check_price(world: World, run: Run) -> Iterator[str]:
    request = run.plan.request
    if run.computed and request.max_price_micro_usdc < 2 * world.manifest.cost_micro_usdc(
        request.steps
    ):
        yield "nodes computed below the price"


def _check_reserved(world: World) -> Iterator[str]:
    """Yield where a plan kept stake from others, and its client paid less than a fifth a year."""
    for record in world.market.records.values():
        ends_s = min(record.closed_s, record.request.deadline)
        stake_years = record.executors * EXPOSURE_FLOOR_MICRO_USDC * (ends_s - record.opened_s)
        if record.kept < stake_years // (5 * 365 * 86_400):
            yield "stake was reserved for nothing"


def _check_end(world: World) -> Iterator[str]:
    for record in world.market.records.values():
        if record.status not in ("settled", "refunded"):
            yield f"an execution is {record.status} for ever"
        if any(record.locked.values()):
            yield "stake stays locked"
    for account, member in world.members.items():
        if account in world.adversary.accounts:
            continue
        if len(member.plans) or len(member.settlements):
            yield "a member keeps an execution for ever"
        if world.is_measured and count_entries(member) > LARGEST:
            yield f"a member's memory holds {count_entries(member)} entries"


def count_entries(value: Any, depth: int = _DEPTH) -> int:
    """Return how many entries the containers below an object hold."""
    if depth == 0 or isinstance(value, str | bytes | int | float | type | None):
        return 0
    if isinstance(value, dict):
        return len(value) + sum(count_entries(item, depth - 1) for item in value.values())
    if isinstance(value, list | set | tuple | frozenset):
        return len(value) + sum(count_entries(item, depth - 1) for item in value)
    if any(kind.__module__.startswith("splitup.protocol") for kind in type(value).__mro__):
        names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", {})]
        return sum(count_entries(getattr(value, name, None), depth - 1) for name in names)
    return 0


def _find_evidence(world: World, execution_id: str) -> Evidence | None:
    for account, member in world.members.items():
        evidence = member.settlements.find_evidence(execution_id)
        if evidence is not None and account not in world.adversary.accounts:
            return evidence
    return None


class _Settled:
    """The promises about one settled execution."""

    def __init__(self, world: World, run: Run, record: Record, evidence: Evidence) -> None:
        self.world, self.run, self.evidence = world, run, evidence
        self.bad = world.adversary.accounts
        self.executors = evidence.draw.executors or run.plan.executors()
        self.verdicts = {verdict.task: verdict for verdict in evidence.verdicts}
        self.paid: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        assert record.settlement is not None
        for payment in record.settlement.payments:
            self.paid[payment.account] += payment.amount_micro_usdc
        for slash in record.settlement.slashes:
            self.lost[slash.node] += slash.amount_micro_usdc
        self.used = evidence.draw.steps
        self.prices = [task.pay_micro_usdc(self.used) for task in world.manifest.tasks]

    def check(self) -> list[str]:
        found = [*self._check_gain(), *self._check_lies(), *self._check_sent()]
        if self.world.adversary.party != "client":
            found += [*self._check_pay(), *self._check_validators()]
        return found

    def is_paid(self, task: int) -> bool:
        """Return whether the executor of a task is paid for it, not only for validations."""
        verdict, node = self.verdicts.get(task), self.executors[task]
        is_owed = verdict is None or verdict.outcome not in _UNPAID
        checked = sum(self.prices[v.task] for v in self.verdicts.values() if node in v.validators)
        return is_owed and self.paid[node] > checked

    def _check_pay(self) -> Iterator[str]:
        due: Counter[str] = Counter()
        delivered = len(next(iter(self.run.received.values()), ()))
        if self.used < delivered and not self.bad.issuperset(self.executors):
            yield "honest work is unpaid: fewer steps count than were delivered"
        for task, node in enumerate(self.executors):
            if node in self.bad or (task, node) not in self.run.work:
                continue
            verdict = self.verdicts.get(task)
            if verdict is None or verdict.outcome not in _UNPAID:
                due[node] += self.prices[task]
            elif verdict.outcome == "contradicted" and self._has_unpaid_neighbour(task):
                yield "honest work is unpaid: a neighbour contradicts it, and is not paid either"
            else:
                yield f"honest work is unpaid: its task is {verdict.outcome}"
        if any(self.paid[node] < amount for node, amount in due.items()):
            yield "honest work is unpaid"

    def _has_unpaid_neighbour(self, task: int) -> bool:
        """Return whether a task of the adversary next to this one is not paid."""
        edges = [edge for edge in self.world.manifest.edges() if task in edge]
        others = {end for edge in edges for end in edge} - {task}
        return any(self.executors[o] in self.bad and not self.is_paid(o) for o in others)

    def _check_validators(self) -> Iterator[str]:
        for (task, node), result in self.run.results.items():
            verdict = self.verdicts.get(task)
            if node in self.bad or result.error or verdict is None:
                continue
            if node not in verdict.validators:
                yield f"honest validation is unpaid: {self._explain(task, node, result)}"

    def _explain(self, task: int, node: str, result: VerificationResult) -> str:
        """Return why a validator's result was of no use."""
        claim = self._find_claim(task, self.executors[task])
        sources = get_sources(self.world.manifest, task)
        authors = [CLIENT.address if s == CLIENT_TASK else self.executors[s] for s, _ in sources]
        stored = [
            self.run.store.get((s, a), ()) for (s, _), a in zip(sources, authors, strict=True)
        ]
        if result.inputs != tuple(digest_all(tensors[: self.used]) for tensors in stored):
            return "its inputs were altered"
        if claim is not None and claim.inputs != result.inputs:
            return "the executor's inputs are others than the store's"
        if self.run.attestations.find_fixed(task, node) is None:
            return "it came too late"
        if self.verdicts[task].validators:
            return "it was asked in addition"
        return f"the task is {self.verdicts[task].outcome}"

    def _check_gain(self) -> Iterator[str]:
        """No account of the adversary gets more than for honest work."""
        for account in self.bad - {CLIENT.address}:
            due = sum(self.prices[t] for t, node in enumerate(self.executors) if node == account)
            due += sum(self.prices[t] for t, node in self.run.ordered if node == account)
            if self.paid[account] - self.lost[account] > due:
                yield "a deviation gains: its party gets more than for honest work"

    def _check_lies(self) -> Iterator[str]:
        """A task whose result does not follow from what was read is not paid once it is drawn."""
        for task, node in enumerate(self.executors):
            claim, work = self._find_claim(task, node), self.run.work.get((task, node))
            if node not in self.bad or claim is None or work is None:
                continue
            right = work.right[: self.used]
            wrong = claim.outputs != (digest_all(right),)
            if not self.world.setting.is_abroad:  # elsewhere states are not compared
                wrong = wrong or claim.state != digest("state", right)
            drawn = task in self.verdicts
            read = tuple(digest_all(tensors[: self.used]) for tensors in work.inputs)
            inputs = self._describe_inputs(task) if claim.inputs != read else ""
            if wrong and drawn and self.is_paid(task) and self.lost[node] < self.prices[task]:
                outcome = self.verdicts[task].outcome
                hides = outcome == "unresolved" and inputs.endswith("replaced")
                yield f"a drawn lie is paid: {f'it names {inputs}' if hides else outcome}"
            if inputs and self.is_paid(task):
                yield f"a node is paid for {inputs}"

    def _describe_inputs(self, task: int) -> str:
        """Return what inputs a node made up that commits to others than it read."""
        planned = self.run.plan.executors()
        is_replaced = any(
            source != CLIENT_TASK and planned[source] != self.executors[source]
            for source, _ in get_sources(self.world.manifest, task)
        )
        return "inputs of a node that was replaced" if is_replaced else "inputs that nobody sent"

    def _check_sent(self) -> Iterator[str]:
        """What somebody received is what its sender committed to, or the sender is not paid."""
        for task, node in enumerate(self.executors):
            claim = self._find_claim(task, node)
            if node not in self.bad or claim is None or not self.is_paid(task):
                continue
            received = self.run.received.get(task, ())[: self.used]
            if received and (digest_all(received),) != claim.outputs:
                what = "the client received other outputs than were committed to, and nobody pays"
                yield what if self._is_ended() else f"{what}: it did not end the execution in time"
            if any((digest_all(got[: self.used]),) != claim.outputs for got in self._read_of(task)):
                yield "a node received other tensors than were committed to, and nobody pays"

    def _is_ended(self) -> bool:
        """Return whether an executor showed an end of the client for the steps that count."""
        shown = map(self.run.completions.get, self.evidence.draw.commitments)
        return any(one is not None and not one.end.is_count for one in shown)

    def _read_of(self, task: int) -> Iterator[Sequence[str]]:
        """Yield what honest executors read of a task's output."""
        for reader, node in enumerate(self.executors):
            work = self.run.work.get((reader, node))
            if work is None or node in self.bad:
                continue
            for (source, _), tensors in zip(
                get_sources(self.world.manifest, reader), work.inputs, strict=True
            ):
                if source == task != CLIENT_TASK:
                    yield tensors

    def _find_claim(self, task: int, node: str) -> TaskCommitment | None:
        committed = [entry for entry in self.evidence.draw.commitments if entry[0] == node]
        completion = self.run.completions.get(committed[0]) if committed else None
        if completion is None or completion.steps != self.used:
            return None
        return next((entry for entry in completion.tasks if entry.task == task), None)
