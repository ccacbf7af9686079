"""Anybody judges a dispute from files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitup.cli.verbs import app
from splitup.graph.arrays import encode_array
from splitup.graph.reference import list_region
from splitup.protocol.disputes.bisection import Dispute
from tests.protocol.disputes import test_bisection as disputes
from tests.protocol.disputes.test_bisection import DEVICE, GRAPH, KEYS, REFERENCE, STORED, WORLD

RUNNER = CliRunner()
STEP, OPERATION = 1, 2  # the lie is told in this step, about this operation of the last value


def write(directory: Path, transcript: bytes, digests: dict[str, bytes]) -> list[str]:
    """Write what anybody would be given; return the command's arguments."""
    values = directory / "values"
    values.mkdir()
    for digest, data in digests.items():
        (values / digest).write_bytes(data)
    (directory / "transcript.json").write_bytes(transcript)
    (directory / "task.json").write_bytes(GRAPH.to_bytes())
    files = [str(directory / name) for name in ("transcript.json", "task.json")]
    return ["dispute", files[0], "--task", files[1], "--values", str(values)]


def judge(arguments: list[str], code: int = 0) -> dict[str, Any]:
    done = RUNNER.invoke(app, [*arguments, "--json"])
    assert done.exit_code == code, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def play_about_one_operation(liar: int) -> Dispute:
    """A lie that the liar defends with operations of its own making."""
    lie = disputes.compute_on_reference(WORLD, disputes.lie_at(STEP, STORED[2], 0.05))
    pair = (lie, REFERENCE) if liar == 0 else (REFERENCE, lie)
    dispute, provers = disputes.make_parties(*pair)
    honest = provers[liar].trace
    provers[liar].trace = lambda step, root: [
        digest if place < OPERATION else disputes.sha(b"made up %d" % place)
        for place, digest in enumerate(honest(step, root))
    ]
    disputes.play(dispute, provers)
    return dispute


@pytest.mark.parametrize(("liar", "name"), [(0, "executor"), (1, "challenger")])
def test_a21_a_transcript_names_the_operation_and_who_lied_about_it(
    tmp_path: Path, liar: int, name: str
) -> None:
    dispute = play_about_one_operation(liar)
    assert dispute.finding is not None
    arrays = disputes.compute_region_arrays(step=STEP, root=STORED[2])
    shown = [encode_array("float32", arrays[index]) for index in dispute.finding.operands]
    operands = {disputes.sha(data).hex(): data for data in shown}
    transcript = dispute.make_transcript().canonical_bytes()
    arguments = write(tmp_path, transcript, operands)
    answer = judge(arguments)
    node = list_region(GRAPH, STORED[2])[OPERATION]
    assert (answer["decided"], answer["liars"], answer["place"]) == (True, [name], "operation")
    assert (answer["step"], answer["node"]) == (STEP, node)
    assert answer["operation"] == GRAPH.nodes[node].op
    done = RUNNER.invoke(app, arguments)
    assert f"the {name} lied" in done.stdout
    for path in (tmp_path / "values").iterdir():  # an altered value is a missing one
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    answer = judge(arguments, 1)
    assert (answer["decided"], answer["liars"]) == (False, [])
    assert "nobody has operand" in answer["reason"]


def test_a_kernel_is_run_by_a_machine_of_the_parties_class(tmp_path: Path) -> None:
    lie = list(DEVICE)
    slot = len(GRAPH.inputs) + 1  # a value of the first step
    lie[slot] = bytes(len(lie[slot]))
    WORLD.keep(lie[slot])
    dispute, provers = disputes.make_parties(DEVICE, lie, one_class=True)
    disputes.play(dispute, provers)
    arguments = write(tmp_path, dispute.make_transcript().canonical_bytes(), WORLD.blobs)
    assert judge(arguments, 1)["place"] == "kernel"
    assert judge([*arguments, "--here"])["liars"] == ["challenger"]


def test_a15_what_was_altered_is_no_transcript(tmp_path: Path) -> None:
    transcript = play_about_one_operation(0).make_transcript()
    first, *rest = transcript.moves
    forged = first.model_copy(update={"signature": rest[1].signature})
    altered = transcript.model_copy(update={"moves": (forged, *rest)}).canonical_bytes()
    context = transcript.context.model_copy(update={"signing_keys": (KEYS[1].signing_key_hex,) * 2})
    others = transcript.model_copy(update={"context": context}).canonical_bytes()
    arguments = write(tmp_path, altered, {})
    for data in (altered, others, altered[:-1], b"[]", b"\x80\x04."):
        Path(arguments[1]).write_bytes(data)
        done = RUNNER.invoke(app, arguments)
        assert done.exit_code == 1 and done.output.startswith("error: "), done.output
        assert len(done.output.strip().splitlines()) == 1
    Path(arguments[1]).unlink()
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 2 and "cannot be read" in done.output
