"""``splitup dispute``: who lied, from the transcript of a dispute and the values that it names.

Whoever holds these files repeats the whole judgement: signatures, bisection, and the one operation,
on the reference, which gives the same bytes on every machine (ADR 13). Nobody has to be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.graph.rules import load_graph
from splitup.protocol.disputes.bisection import Place, Transcript
from splitup.protocol.disputes.judging import Judgement, RunKernel, check_transcript

_NAMES: Final = ("executor", "challenger")


@dataclass(frozen=True, slots=True)
class DisputeOptions:
    """What the user typed."""

    transcript: Path  # canonical bytes of a Transcript
    task: Path  # the task's graph, as it is stored
    values: Path | None  # a directory of values, each in a file named by its SHA-256
    here: bool  # this machine is of the parties' class, and runs the kernel


@dataclass(frozen=True, slots=True)
class Judged:
    """The judgement, and the operation it rests on; "" where it rests on none."""

    judgement: Judgement
    operation: str

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        finding = self.judgement.finding
        return {
            "decided": self.judgement.is_decided,
            "liars": [_NAMES[party] for party in self.judgement.liars],
            "reason": self.judgement.reason,
            "place": finding.place.value,
            "step": finding.step,
            "node": finding.node,
            "operation": self.operation,
            "claims": list(finding.claims),
            "operands": {str(index): digest for index, digest in finding.operands.items()},
        }

    def describe(self) -> str:
        """Return a sentence."""
        liars = " and ".join(f"the {_NAMES[party]}" for party in self.judgement.liars)
        if not self.judgement.is_decided:
            return f"open: {self.judgement.reason}"
        return f"{liars or 'nobody'} lied: {self.judgement.reason}"


def judge_dispute(options: DisputeOptions) -> Judged:
    """Repeat a dispute. Seconds of CPU.

    Raises InvalidInput for files that cannot be read, PeerFault or BadSignature for a transcript
    that is none, InvalidModel for a task that is none.
    """
    limit = limits.MAX_TRANSCRIPT_BYTES
    transcript = Transcript.parse(_read(options.transcript, limit), max_bytes=limit)
    graph = _read(options.task, limits.MAX_GRAPH_BYTES)
    run_here: RunKernel | None = None
    if options.here:
        from splitup.backend.trace_recording import (
            run_kernel,  # loads tinygrad: only when asked for
        )

        run_here = run_kernel
    judgement = check_transcript(transcript, graph, partial(_find_value, options.values), run_here)
    operation = ""
    if judgement.finding.place in (Place.KERNEL, Place.OPERATION, Place.VALUE):
        operation = load_graph(graph).nodes[judgement.finding.node].op
    return Judged(judgement, operation)


def _read(path: Path, limit: int) -> bytes:
    """Return a file's bytes; one more than ``limit`` is enough to tell that there are too many."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise InvalidInput(f"{path} has more than {limit} bytes")
    return data


def _find_value(directory: Path | None, digest: str) -> bytes | None:
    """Return a value, if it is there. ``digest`` is 64 hexadecimal digits, hence a file's name."""
    if directory is None:
        return None
    try:
        return _read(directory / digest, limits.MAX_TENSOR_BYTES)
    except InvalidInput:
        return None
