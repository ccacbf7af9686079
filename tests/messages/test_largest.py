"""Every message that parties send each other fits what carries it, at its largest."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
from annotated_types import MaxLen
from pydantic.fields import FieldInfo

from splitup.core import limits
from splitup.messages import api
from splitup.messages.base import Message, count_values
from splitup.messages.completions import Completion, ExecutorCommitment
from splitup.messages.verification import Draw, SignedAttestation
from splitup.protocol.committee.observations import PackedProposal
from splitup.protocol.committee.peer_messages import _KINDS
from splitup.protocol.committee.settlement_proposals import PackedSettlement
from splitup.protocol.settlement.evidence import make_evidence
from splitup.protocol.settlement.proof_of_sampling import Outcome, Verdict
from tests.builders import address

PORTS = 8  # of a task, in and out: all that 1,024 tasks' share of a manifest has room for
TOKEN_CHARS = 2 * limits.KIB  # of a validator's result with so many ports
ENVELOPE_BYTES = limits.KIB  # the claims of a token; configuration and kind
# what no field states, and counts that the parts of one message never reach together
COUNTS = {
    "CommitmentsShared.commitments": 2,  # divided by their bytes, not by their number
    "Draw.commitments": limits.MAX_TASKS,
    "Draw.signature": 194,  # a BLS signature
    "Grant.url": 700,
    "Grants.grants": limits.MAX_GRANTS,
    "Observation.views": limits.MAX_NODES,
    "Plan.nodes": limits.MAX_PLAN_NODES,
    "Plan.tasks[]": limits.MAX_FALLBACKS,
    "Plan.unverifiable": limits.MAX_TASKS,
    "PlanCertificate.seed_signature": 194,
    "Ruling.inputs": PORTS,
    "Ruling.missing": 0,
    "Ruling.outputs": PORTS,
    "Attestation.rulings": 3 * limits.MAX_TASKS,  # on an executor, and two validators
    "Snapshot.entries": limits.MAX_NODES,
    "PackedSettlement.held": limits.MAX_ASKED * limits.MAX_TASKS,
    "PackedSettlement.silent": limits.MAX_STATEMENTS,
    # found by two halves of the members, on the executor's claim and on two validators'
    "PackedSettlement.rulings": 3 * 2 * limits.MAX_TASKS,
    "PackedSettlement.results": limits.MAX_ASKED * limits.MAX_TASKS,
    "PackedSettlement.results[]": TOKEN_CHARS,
    "PackedAttestation.rulings": 3 * limits.MAX_TASKS,
    "UploadAnswer.grants": limits.MAX_UPLOAD_OBJECTS,
    "UploadAnswer.present": 0,
    "UploadAnswer.present[]": limits.OBJECT_KEY_BYTES,
    "VerificationResult.inputs": limits.MAX_PORTS,
    "VerificationResult.outputs": limits.MAX_PORTS,
}
# nodes whose figures are many say less of each: what the largest network was measured with
NODES = {"NodeView.resident": 12, "SnapshotEntry.resident": 12, "Claim.resident": 12}
CHUNKED_NODES = {
    **NODES,
    "Observation.views": limits.MAX_NODES,
    "PackedProposal.claims": limits.MAX_NODES,
}


class Size(NamedTuple):
    """Bytes of JSON, and the values that they hold."""

    bytes: int
    values: int

    def times(self, count: int) -> Size:
        return Size(2 + count * (self.bytes + 1), 1 + count * self.values)


def measure(kind: type[Message], counts: dict[str, int]) -> Size:
    """Return the largest size of a message by what its fields state."""
    if kind is Completion:
        return _measure_completion(counts)
    sizes = [
        (name, _measure(info.annotation, info.metadata, f"{kind.__name__}.{name}", counts))
        for name, info in kind.model_fields.items()
    ]
    return Size(
        2 + sum(len(name) + 4 + size.bytes for name, size in sizes),
        1 + sum(size.values for _, size in sizes),
    )


def _measure(kind: Any, metadata: Sequence[Any], place: str, counts: dict[str, int]) -> Size:
    origin, inner = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        found = [m for m in kind.__metadata__ if not isinstance(m, FieldInfo)]
        for info in kind.__metadata__:
            found += info.metadata if isinstance(info, FieldInfo) else ()
        return _measure(inner[0], [*metadata, *found], place, counts)
    if origin in (Union, types.UnionType):
        return max(_measure(one, metadata, place, counts) for one in inner)
    if origin is Literal:
        return Size(max(len(str(one)) for one in inner) + 2, 1)
    if origin is tuple and inner[-1] is not ...:
        sizes = [_measure(one, (), place, counts) for one in inner]
        return Size(2 + sum(s.bytes + 1 for s in sizes), 1 + sum(s.values for s in sizes))
    most = counts.get(place, next((m.max_length for m in metadata if isinstance(m, MaxLen)), None))
    if origin is tuple:
        assert most is not None, f"{place} states no limit, and none stands in COUNTS"
        return _measure(inner[0], (), f"{place}[]", counts).times(most)
    if kind is str:
        patterns = [m.pattern for m in metadata if getattr(m, "pattern", None)]
        if most is None:
            assert patterns, f"{place} states no limit, and none stands in COUNTS"
            most = 2 + sum(int(n) for n in re.findall(r"\{(\d+)\}", patterns[0]))
        return Size(most + 2, 1)
    if isinstance(kind, type) and issubclass(kind, Message):
        return measure(kind, counts)
    if origin is dict:
        return Size(200, 4)  # headers of a presigned URL
    assert kind in (int, bool, type(None)), f"{place} is a {kind}"
    return Size(17, 1)


def _measure_completion(counts: dict[str, int]) -> Size:
    tasks = counts.get("Completion.tasks", limits.MAX_TASKS)
    packed = 34 + tasks * (6 + 32 * (2 * PORTS + 1) + 72)
    info = Completion.model_fields["end"]
    end = _measure(info.annotation, info.metadata, "Completion.end", counts)
    return Size(200 + packed * 4 // 3 + end.bytes, 4 + end.values)


DRAW = Draw(
    execution_id="0x" + "ee" * 32,
    block_hash="0x" + "bb" * 32,
    commitments=(),
    steps=1,
    signature="0x",
    seed="0x" + "55" * 32,
)
GOSSIP = {kind.__name__: kind for kind in _KINDS.values()}
ROUTES = {
    route.path: route
    for routes in api.ROUTES.values()
    for route in routes
    if route.message is not None or route.reply is not None
}


@pytest.mark.parametrize("name", GOSSIP)
def test_s42_gossip_fits_a_chunked_message(name: str) -> None:
    """What is larger than ``GOSSIP_BYTES`` is sent in chunks, and what is not fits a token."""
    counts = COUNTS | (CHUNKED_NODES if GOSSIP[name] is PackedProposal else NODES)
    if GOSSIP[name] is PackedSettlement:  # its executors have one task each
        counts |= {"Completion.tasks": 1, "End.inputs": PORTS, "End.outputs": PORTS}
        # several attestations of one member are together as large as one may be
        counts |= {"PackedSettlement.attestations": limits.MAX_COMMITTEE}
    size = measure(GOSSIP[name], counts)
    if GOSSIP[name] is PackedSettlement:  # and a third of the members states what nobody else does
        one, liars = measure(SignedAttestation, counts), (limits.MAX_COMMITTEE - 1) // 3
        assert one.bytes <= limits.MAX_ATTESTATION_BYTES
        stated = Size(limits.MAX_ATTESTATION_BYTES, limits.MAX_ATTESTATION_BYTES // 40)
        assert one.bytes / one.values > 40
        size = Size(size.bytes + liars * stated.bytes, size.values + liars * stated.values)
    assert size.bytes + ENVELOPE_BYTES <= limits.MAX_CHUNKED_MESSAGE_BYTES, size
    assert size.values <= limits.MAX_DOCUMENT_VALUES, size
    if size.bytes <= limits.GOSSIP_BYTES:
        assert size.values <= limits.MAX_JSON_VALUES, size


@pytest.mark.parametrize("path", ROUTES)
def test_requests_and_replies_fit(path: str) -> None:
    route = ROUTES[path]
    if route.message is not None:
        size = measure(route.message, COUNTS | NODES)
        most = limits.MAX_MESSAGE_BYTES if route.typ else limits.HTTP_BODY_BYTES
        assert size.bytes + ENVELOPE_BYTES <= most, size
        assert size.values <= limits.MAX_JSON_VALUES, size
    if route.reply is not None:
        size = measure(route.reply, COUNTS | NODES)
        assert size.bytes <= route.max_reply_bytes, size
        assert size.values <= count_values(route.max_reply_bytes), size


def test_members_pass_on_whatever_an_honest_executor_commits_to() -> None:
    size = measure(ExecutorCommitment, COUNTS)
    assert (size.bytes + ENVELOPE_BYTES) * 4 // 3 <= limits.MAX_COMMITMENT_BYTES, size


def test_s42_every_validator_of_a_task_may_be_found_lying_with_its_executor() -> None:
    """One liar more than the evidence had room for ended each member's settlement with an error."""
    validators = tuple(address(2 + place) for place in range(limits.MAX_ASKED))
    verdict = Verdict(0, Outcome.LIED, (), (address(1), *validators))
    evidence = make_evidence(DRAW, [verdict])
    assert evidence.verdicts[0].liars == (address(1), *validators)
