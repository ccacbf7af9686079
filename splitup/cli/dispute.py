"""``splitup dispute``: which party lied, from a dispute's transcript and the values it names.

Whoever holds these files can repeat the whole judgement: signatures, bisection, and the one
disputed operation on the reference interpreter, which gives the same bytes on every machine
(ADR 13). No network is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import JsonFlag, with_options

if TYPE_CHECKING:
    from splitup.protocol.disputes.judging import Judgement, RunKernel

_NAMES: Final = ("executor", "challenger")


@dataclass(frozen=True, slots=True)
class DisputeOptions:
    """The files of a dispute."""

    transcript: Annotated[
        Path,
        typer.Argument(metavar="TRANSCRIPT", help="File with the signed moves of both parties."),
    ]
    task: Annotated[
        Path, typer.Option("--task", metavar="FILE", help="The disputed task's graph, as stored.")
    ]
    values: Annotated[
        Path | None,
        typer.Option("--values", metavar="DIR", help="Values, in files named by their SHA-256."),
    ] = None
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Run a disputed kernel here: this machine is of the parties' determinism class.",
        ),
    ] = False


@with_options
def command(options: DisputeOptions, as_json: JsonFlag = False) -> None:
    """Repeat a dispute about a task down to one operation, run that, and say who lied.

    Needs no network. Exit code 1 when the files at hand do not decide it.
    """
    output = Output.open(as_json)

    def run() -> None:
        judged = judge_dispute(options)
        if output.as_json:
            output.print_json(judged.to_dict())
        else:
            output.out.print(judged.describe(), markup=False, soft_wrap=True)
        if not judged.judgement.is_decided:
            raise typer.Exit(1)

    run_command(output, run)


@dataclass(frozen=True, slots=True)
class Judged:
    """The judgement, and the name of the disputed operation, "" when it was not narrowed down."""

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
            return f"undecided: {self.judgement.reason}"
        return f"{liars or 'nobody'} lied: {self.judgement.reason}"


def judge_dispute(options: DisputeOptions) -> Judged:
    """Repeat a dispute. Seconds of CPU.

    Raises InvalidInput for files that cannot be read, PeerFault or BadSignature for an invalid
    transcript, InvalidModel for an invalid task.
    """
    from splitup.core import limits
    from splitup.graph.rules import load_graph
    from splitup.protocol.disputes.bisection import Place, Transcript
    from splitup.protocol.disputes.judging import check_transcript

    limit = limits.MAX_TRANSCRIPT_BYTES
    transcript = Transcript.parse(_read(options.transcript, limit), max_bytes=limit)
    graph = _read(options.task, limits.MAX_GRAPH_BYTES)
    run_here: RunKernel | None = None
    if options.here:
        from splitup.backend.trace_recording import run_kernel

        run_here = run_kernel
    judgement = check_transcript(transcript, graph, partial(_find_value, options.values), run_here)
    operation = ""
    if judgement.finding.place in (Place.KERNEL, Place.OPERATION, Place.VALUE):
        operation = load_graph(graph).nodes[judgement.finding.node].op
    return Judged(judgement, operation)


def _read(path: Path, limit: int) -> bytes:
    """Return a file's bytes; raise InvalidInput when it has more than ``limit``."""
    from splitup.core.errors import InvalidInput

    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise InvalidInput(f"{path} has more than {limit} bytes")
    return data


def _find_value(directory: Path | None, digest: str) -> bytes | None:
    """Return the value with this SHA-256 (64 hexadecimal digits), None when it is absent."""
    from splitup.core import limits
    from splitup.core.errors import InvalidInput

    if directory is None:
        return None
    try:
        return _read(directory / digest, limits.MAX_TENSOR_BYTES)
    except InvalidInput:
        return None
