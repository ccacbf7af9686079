"""Decide who lied in a dispute by recomputing one operation, one kernel or one value.

The place at which a dispute ends (``splitup.protocol.disputes.bisection``) decides what is
compared:

    kernel      both parties are of one class: a third node of it runs this kernel; equal bytes
    operation   their reference results differ; the reference is exact on every machine, so the
                single operation is recomputed on it; equal bytes
    value       their reference results are equal, their kernels' outputs are not: a claim further
                from the reference than any order of rounding allows is a lie; two claims within it
                are honest, and nobody is punished (docs/adr/0013-what-a-dispute-decides.md)

``check_transcript`` lets anybody repeat all of it, except silence, which only the referee observed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from splitup.core.errors import PeerFault
from splitup.graph.arrays import decode_array, encode_array
from splitup.graph.error_bound import compute_bounds, is_within
from splitup.graph.reference import compute_node, list_region
from splitup.graph.rules import CheckedGraph, load_graph
from splitup.graph.value_trace import ValueLayout, cut_region, decode_operands, list_region_inputs
from splitup.protocol.disputes.bisection import PARTIES, Dispute, Finding, Party, Place, Transcript

GetBytes = Callable[[str], bytes | None]  # by SHA-256; from the store, the log or the parties
RunKernel = Callable[[CheckedGraph, list[bytes]], bytes]  # on a device of the parties' class


@dataclass(frozen=True, slots=True)
class Judgement:
    """The parties that lied. ``is_decided`` is false if that is unknown; then there are none."""

    finding: Finding
    liars: tuple[Party, ...]
    is_decided: bool
    reason: str


def judge(
    finding: Finding,
    layout: ValueLayout,
    get_bytes: GetBytes,
    run_kernel: RunKernel | None = None,
) -> Judgement:
    """Return who lied, by recomputing one operation, one kernel or one value.

    Takes seconds of CPU. ``get_bytes`` is not trusted: bytes with another digest count as missing.
    """
    if finding.place in (Place.BROKEN, Place.SILENT):
        return Judgement(
            finding, finding.liars, True, f"{_name(finding.liars)}: {finding.place.value}"
        )
    if finding.place is Place.INPUT:
        return Judgement(finding, (), False, "the parties used different inputs")
    if finding.place is Place.TOO_LARGE:
        return Judgement(finding, (), False, f"node {finding.root} is too large for the reference")
    operands: dict[int, bytes] = {}
    for index, digest in finding.operands.items():
        data = _get_checked(get_bytes, digest)
        if data is None:
            return Judgement(finding, (), False, f"nobody has operand {digest} of {finding.node}")
        if len(data) != layout.get_spec(finding.step, index).nbytes:
            return Judgement(
                finding, PARTIES, True, f"both parties agree about {digest}, which has a wrong size"
            )
        operands[index] = data
    if finding.place is Place.VALUE:
        return _judge_value(finding, layout, operands, get_bytes)
    graph = layout.bind(finding.step)
    where = f"node {finding.node} ({graph.nodes[finding.node].op}) in step {finding.step}"
    if finding.place is Place.KERNEL:
        if run_kernel is None:
            return Judgement(finding, (), False, f"{where}: a node of their class is needed")
        region = cut_region(layout.graph, finding.root)
        result = run_kernel(region, list_region_inputs(region, layout, finding.step, operands))
    else:
        node = graph.nodes[finding.node]
        arrays = decode_operands(layout, finding.step, operands)
        value = compute_node(node, [arrays[src] for src in node.srcs])
        result = encode_array(node.dtype, value)
    digest = hashlib.sha256(result).hexdigest()
    liars = tuple(party for party in PARTIES if finding.claims[party] != digest)
    return Judgement(finding, liars, True, f"{where} gives {digest}")


def check_transcript(
    transcript: Transcript,
    graph_bytes: bytes,
    get_bytes: GetBytes,
    run_kernel: RunKernel | None = None,
) -> Judgement:
    """Repeat a dispute from its transcript and return who lied.

    Raises InvalidInput, PeerFault or BadSignature for an invalid transcript. One that ends early
    shows whose turn it was, but does not prove that they were silent.
    """
    dispute = Dispute(transcript.context, load_graph(graph_bytes), 0.0)
    for signed in transcript.moves:
        taken = len(dispute.moves)
        dispute.receive(signed, 0.0)
        if len(dispute.moves) == taken:
            raise PeerFault("the transcript holds a move that changes nothing")
    if dispute.finding is None:
        missing = dispute.list_missing()
        finding = Finding(Place.SILENT, liars=missing)
        reason = f"{_name(missing)} did not answer, according to the referee"
        return Judgement(finding, missing, False, reason)
    return judge(dispute.finding, dispute.layout, get_bytes, run_kernel)


def _judge_value(
    finding: Finding, layout: ValueLayout, operands: Mapping[int, bytes], get_bytes: GetBytes
) -> Judgement:
    graph = layout.bind(finding.step)
    values = decode_operands(layout, finding.step, operands)
    bounds = compute_bounds(graph, list_region(graph, finding.root), values)
    spec, liars = layout.get_spec(finding.step, finding.root), []
    for party in PARTIES:
        data = _get_checked(get_bytes, finding.claims[party])
        if data is None or len(data) != spec.nbytes:  # it must reveal its claim
            liars.append(party)
        elif not is_within(decode_array(spec, data), values[finding.root], bounds[finding.root]):
            liars.append(party)
    if not liars:
        return Judgement(finding, (), False, "both claims are within the error bound of rounding")
    reason = f"{_name(tuple(liars))}: no order of rounding gives this value"
    return Judgement(finding, tuple(liars), True, reason)


def _get_checked(get_bytes: GetBytes, digest: str) -> bytes | None:
    data = get_bytes(digest)
    if data is None or hashlib.sha256(data).hexdigest() != digest:
        return None
    return data


def _name(parties: tuple[Party, ...]) -> str:
    return " and ".join(("the executor", "the challenger")[party] for party in parties)
