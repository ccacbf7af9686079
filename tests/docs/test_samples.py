"""Samples of output on the pages are what the commands print; the command table is complete.

Each sample's values are put into the function that the command prints with. "…" stands for lines
that a page leaves out.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from rich.console import Console, RenderableType
from splitup_deploy.calibration.calibration_report import (
    CalibrationReport,
    TaskReport,
    render_report,
)
from splitup_deploy.calibration.separation import Calibration
from splitup_deploy.showing.report import render_models
from splitup_deploy.uncut_model import load_reference
from splitup_edge.export.plan import plan_export
from splitup_edge.export.showing import render_export
from splitup_gateway.apis.answers import AnswerChoice, CompletionForm
from splitup_gateway.generation import Piece, Report
from splitup_gateway.names import AnswerNames
from splitup_node.cli import audit, status
from splitup_oracle.member.shell import Member
from tokenizers import Tokenizer
from typer import Context
from typer.main import get_command

from splitup.chain.registered_models import RegisteredModel
from splitup.cli.commands import check, network, receipt
from splitup.cli.console import Output
from splitup.client.market.receipts import Receipt
from splitup.client.text.generation import Token
from splitup.core.errors import InvalidInput
from splitup.crypto.quorum import Payment
from splitup.decode.speculation.lookahead import LookaheadOptions
from splitup.decode.step import make_causal_step
from splitup.devnet.processes import find_program
from splitup.devnet.status import NetworkHealth, NodeHealth
from splitup.graph.tolerances import Tolerance
from tests.deploy.steps import run_step
from tests.docs.test_pages import APPS, ROOT
from tests.protocol.simulator import Simulation

USE: Final = "docs/guides/use.md"
GATEWAY: Final = "extras/gateway/splitup_gateway"
PRIVATE: Final = "extras/private/splitup_private"
OFFER: Final = "docs/guides/offer-a-gpu.md"
OPERATIONS: Final = "docs/operations.md"
SERVE: Final = "docs/guides/serve.md"
PUBLISH: Final = "docs/guides/publish-a-model.md"
EXAMPLE: Final = ROOT / "examples" / "packages-4m"
SAMPLE: Final = re.compile(r"^```console[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAYEES: Final = {
    "0x004f117bd500a78d546dba0a8552c588bb472ece": 72,
    "0x0fbcd4e25908484dd9ff761216d30ad6023430bd": 180,
    "0x378a240bdd2b81897d16329246e7b02fad01da35": 36,
    "0x68ebe40d99b5a79841857c15b504ced90922ba17": 36,
    "0x7490c6088b1871a11f06d062bd535a43c147d628": 108,
    "0xa4b2f2bec44c91524943fc05b7a591bee1117b7d": 108,
}
# One line of output each, printed by an f-string or a literal of the file.
LINES: Final = (
    ("docs/guides/serve.md", "serving ", f"{GATEWAY}/commands/serve.py"),
    ("docs/guides/serve.md", "keep it now", f"{GATEWAY}/commands/keys.py"),
    (
        "docs/guides/private-inference.md",
        "serving ",
        f"{GATEWAY}/commands/serve.py",
    ),
    (
        "docs/guides/private-inference.md",
        "certificate (SHA-256)",
        f"{GATEWAY}/commands/relay.py",
    ),
    (
        "docs/guides/private-inference.md",
        "no authority signed it",
        f"{GATEWAY}/commands/relay.py",
    ),
    (
        "docs/guides/private-inference.md",
        "https://192.0.2.7:9095/",
        f"{GATEWAY}/commands/relay.py",
    ),
    (
        "docs/guides/encrypted-adapters.md",
        "adapter packages",
        f"{PRIVATE}/adapters/command.py",
    ),
    (
        "docs/guides/encrypted-adapters.md",
        "adapter host:",
        f"{PRIVATE}/adapters/command.py",
    ),
    (USE, "logits: ", "splitup/cli/commands/run.py"),
)


def read_sample(page: str, command: str) -> list[str]:
    """Return the lines that a page shows below a command, without trailing spaces."""
    for block in SAMPLE.findall((ROOT / page).read_text("utf-8")):
        first, _, output = block.partition("\n")
        if first.startswith(f"$ {command}") and output.strip():
            return [line.rstrip() for line in output.splitlines()]
    raise AssertionError(f"{page} shows no output of {command}")


def render(*parts: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=True)
    return [line.rstrip() for line in capture.get().splitlines()]


def capture_output(show: Any, *arguments: Any) -> list[str]:
    console = Console(width=100, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        show(Output(False, console, console), *arguments)
    return [line.rstrip() for line in capture.get().splitlines()]


def check_shortened(shown: list[str], printed: list[str]) -> None:
    """Assert that a page shows these lines, in order, and says where it leaves some out."""
    parts = (r"(?:.*\n)+?" if line.strip() == "…" else re.escape(line) + "\n" for line in shown)
    text = "".join(f"{line}\n" for line in printed)
    assert re.fullmatch("".join(parts), text), f"the command prints\n{text}"


def make_receipt(verify_bps: int) -> Receipt:
    return Receipt(
        execution_id="0x" + "a0" * 32,
        status="settled",
        steps=36,
        payments=tuple(Payment(account, amount, False) for account, amount in PAYEES.items()),
        slashes=(),
        paid_micro_usdc=sum(PAYEES.values()),
        fee_micro_usdc=5,
        refunded_micro_usdc=504,
        evidence_root="0x" + "e0" * 32,
        block_number=130,
        transaction="0x" + "b0" * 32,
        model_id="0x" + "c0" * 32,
        verify_bps=verify_bps,
    )


def test_a_receipt_is_shown_as_it_is_printed() -> None:
    honest = SimpleNamespace(outcome="honest")
    evidence = SimpleNamespace(verdicts=[honest] * 3)
    printed = capture_output(receipt._show, make_receipt(800), evidence)
    assert read_sample(USE, "splitup receipt") == printed
    evidence = SimpleNamespace(verdicts=[honest] * 12)
    printed = capture_output(receipt._show, make_receipt(10_000), evidence)
    assert f"```text\n{printed[2]}\n```" in (ROOT / USE).read_text("utf-8")


def test_a_check_is_shown_as_it_is_printed() -> None:
    checked = SimpleNamespace(
        difference="",
        certificate=SimpleNamespace(plan=SimpleNamespace(tasks=range(12))),
        snapshot=SimpleNamespace(entries=range(6)),
        passed_over=(),
    )
    assert read_sample(USE, "splitup check") == capture_output(check._show, checked, {}, ())


def test_a_list_of_models_is_shown_as_it_is_printed() -> None:
    model = RegisteredModel(
        model_id="0x41b0129ef3db5260f31d1787d9d2db82ea2b1d2df60698cf205181340472270a",
        name="packages-4m",
        developer="0xde94abb4d9c1350ab68a25f7af0d4fbeb7ef1623",
        task_count=12,
        price_per_step_nano_usdc=12_000,
        is_current=True,
        is_retired=False,
    )
    assert read_sample(USE, "splitup-deploy list") == render(render_models([model]))


def test_an_error_of_lookahead_is_shown_as_it_is_printed() -> None:
    with pytest.raises(InvalidInput) as caught:
        LookaheadOptions(columns=5, length=3).check_chunk(8)
    assert f"    error: {caught.value}\n" in (ROOT / USE).read_text("utf-8")


def test_an_audit_is_shown_as_it_is_printed() -> None:
    names = ["embed", "block 0 attention", "block 0 MLP"]
    rows = [
        {
            "index": index,
            "label": label,
            "model_id": "0x41b0129e" + "0" * 56,
            "verdict": "equal",
            "detail": "all bytes as they must be",
            "may_serve": True,
        }
        for index, label in enumerate(names)
    ]
    result = {"determinism_class": "tinygrad 0.14.0/CPU:X86/x86_64/products 4", "tasks": rows}
    console = Console(width=100, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        audit._show(result, console)
    printed = [line.rstrip() for line in capture.get().splitlines()]
    check_shortened(read_sample(OFFER, "splitup-node audit"), printed)


def test_a_nodes_status_is_shown_as_it_is_printed() -> None:
    chain = {
        "address": "0x731bdf5663904ffb05bb8f38bab58bdb7979b530",
        "stake_micro_usdc": 1_111_000_000,
        "locked_micro_usdc": 0,
        "active": True,
        "unbonding_at_s": 0,
        "balance_micro_usdc": 0,
        "ready_to_withdraw_micro_usdc": 120,
        "undistributed_micro_usdc": 120,
        "withdrawn_micro_usdc": 0,
        "wallet_micro_usdc": 900_000_000,
    }
    node = {
        "running": True,
        "pid": 6584,
        "endpoint": "http://127.0.0.1:17788",
        "relay": "",
        "reach_problem": "",
        "device": {"reason": "x86-64 processor", "sandbox": ""},
        "vram_used_bytes": 13 * 10**6,
        "vram_bytes": 100 * 10**6,
        "sessions": 0,
        "state_bytes": 0,
        "state_limit_bytes": 87 * 10**6,
        "queue_ms": 0,
        "verified": 0,
        "verifications": [],
        "resident": [
            {"label": "block 2 MLP", "task_id": "531b0d904fe2" + "0" * 52},
            {"label": "block 3 MLP", "task_id": "b55510f41a69" + "0" * 52},
            {"label": "block 4 MLP", "task_id": "1f" * 32},
        ],
        "not_loaded": [],
        "trades": [],
    }
    facts = {"chain": chain, "node": node, "obstacles": []}
    console = Console(width=100, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        status._show_status(Path("node.toml"), facts, console)
    printed = [line.rstrip() for line in capture.get().splitlines()]
    check_shortened(read_sample(OFFER, "splitup-node status"), printed)


def test_a_networks_status_is_shown_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = NodeHealth(
        address="0x52aaadcecf4aba4b1695fcf23f2249c40bed11bb",
        endpoint="http://127.0.0.1:19068",
        stake_micro_usdc=1_100_000_000,
        own=True,
        answers=True,
        in_snapshot=True,
        tasks=tuple(str(number) for number in range(12)),
    )
    health = NetworkHealth(
        block=9,
        has_group_key=True,
        gateways=("http://127.0.0.1:22914", "http://127.0.0.1:25117"),
        members=("a", "b", "c", "d"),
        nodes=(first,) * 6,
        wanted_nodes=6,
        wanted_members=4,
    )
    value = SimpleNamespace(
        directory=Path(".splitup"),
        supervisor=25395,
        processes=[("chain", 25502, True), ("gateway-0", 25641, True), ("gateway-1", 25642, True)],
        health=health,
        problem="",
    )
    printed = capture_output(network._show_status, value)
    check_shortened(read_sample(OPERATIONS, "splitup status"), printed)


def run_deploy(*arguments: str) -> list[str]:
    """Return the lines that ``splitup-deploy`` prints."""
    command = [find_program("splitup-deploy"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.long  # in small: the registration, below
def test_a_preview_is_shown_as_it_is_printed() -> None:
    configuration = "tests/deploy/configs/llama-70b.json"
    shown = read_sample(PUBLISH, f"splitup-deploy inspect {EXAMPLE.relative_to(ROOT)}")
    command = f"$ splitup-deploy inspect {configuration} --target-vram 8GB,12GB,24GB"
    assert shown[0] == command
    check_shortened(shown[1:], run_deploy(*command.split()[2:]))


def test_a_registration_is_shown_as_it_is_printed() -> None:
    flags = ["examples/packages-4m", "--target-vram", "1.3MB", "--chunk", "8"]
    flags += ["--name", "packages-4m"]
    *shown, last = read_sample(PUBLISH, f"splitup-deploy register {' '.join(flags)}")
    check_shortened(shown, run_deploy("register", *flags, "--dry-run"))
    price = shown[-1].removeprefix("price    ")
    pattern = rf"registered as 'packages-4m' in block \d+ for {price}; \d+ objects were stored"
    assert re.fullmatch(pattern, last)
    test_a_line_is_printed_by_the_command(
        PUBLISH, "registered as", "deploy/splitup_deploy/showing/progress.py"
    )


def test_a_calibration_is_shown_as_it_is_printed() -> None:
    found = Calibration(
        dtype="float32",
        honest={"relative_l2_ppb": 12_000},
        noise={"relative_l2_ppb": 0},
        perturbations={"activations in lower precision": {"relative_l2_ppb": 650_000}},
        tolerance=Tolerance(
            dtype="float32",
            relative_l2_ppb=162_478,
            exponent_ppb=None,
            mantissa_ppb=None,
            max_ulp=None,
        ),
        reason="",
    )
    task = TaskReport(0, "embed ... head", "0x", (found,), None)
    printed = render(render_report(CalibrationReport((), (task,), 4)), width=120)
    shown = read_sample(PUBLISH, "splitup-deploy calibrate")
    assert shown[:2] == printed


def test_an_export_is_shown_as_it_is_printed() -> None:
    plan = plan_export(str(EXAMPLE), "fp32", None, None)
    written = {"file": "packages.pte", "file_bytes": 18_300_000, "backend": "xnnpack"}
    printed = render(render_export({**plan.describe(), **written}))
    pages = "docs/guides/devices.md"
    shown = read_sample(pages, "pip install -e '.[edge]'")
    first = shown.index("$ splitup-deploy export examples/packages-4m --output packages.pte") + 1
    assert shown[first : shown.index("  …")] == printed


def test_events_are_shown_as_they_are_sent() -> None:
    form = CompletionForm(
        SimpleNamespace(name="packages-4m"),  # type: ignore[arg-type]
        is_chat=False,
        wants_usage=False,
        names=AnswerNames(),
    )
    choice = AnswerChoice(0, Report((1,)))
    piece = Piece(Token(1, " the"), None)
    [event] = form.add(choice, piece, choice.append(piece))
    shown = read_sample(SERVE, "curl -N http://127.0.0.1:8000/v1/completions")
    assert re.fullmatch(r"id: strm_[\w-]{32}:1", shown[0])
    pattern = ".+".join(map(re.escape, shown[1].split("…")))
    assert re.match(pattern, form.encode(event).decode()), form.encode(event)


def test_a_members_status_is_shown_as_it_is_sent() -> None:
    simulation = Simulation()
    [machine, *_] = simulation.members.values()
    shell = SimpleNamespace(
        machine=SimpleNamespace(get_status=lambda _: machine.get_status(simulation.now)),
        gossip=SimpleNamespace(peers=()),
        chain=SimpleNamespace(count_requests=lambda: 1),
    )
    sent = list(Member.get_status(shell))  # type: ignore[arg-type]
    before, after = " ".join(read_sample(OPERATIONS, "curl -s http://127.0.0.1")).split(" …, ")
    known = [*json.loads(before.rstrip(",") + "}"), None, *json.loads("{" + after)]
    cut = known.index(None)
    assert sent[:cut] == known[:cut] and sent[cut - len(known) + 1 :] == known[cut + 1 :]


def test_generated_texts_are_those_of_the_model() -> None:
    """The example continues what the guide lets it continue, and as far as it is shown."""
    program = load_reference(str(EXAMPLE))
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))
    end = json.loads((EXAMPLE / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    for model, tokens in (("packages-4m", 40), ("private-4m", 12)):
        shown = read_sample(USE, f"splitup generate {model}")
        given = tokenizer.encode("network monitoring tool").ids
        state, written = program.new_state(), list(given)
        logits = run_step(program, state, make_causal_step(given, 0, outputs=[len(given) - 1]))
        while len(written) < len(given) + tokens and (token := int(logits[-1].argmax())) != end:
            written.append(token)
            step = make_causal_step(written[-1:], len(written) - 1)
            logits = run_step(program, state, step)
        text = tokenizer.decode(written)
        assert text.splitlines() == shown


@pytest.mark.parametrize(("page", "start", "source"), LINES)
def test_a_line_is_printed_by_the_command(page: str, start: str, source: str) -> None:
    samples = SAMPLE.findall((ROOT / page).read_text("utf-8"))
    lines = [line for block in samples for line in block.splitlines() if line.startswith(start)]
    assert lines, f"{page} shows no line that begins with {start!r}"
    tree = ast.parse((ROOT / source).read_text("utf-8"))
    said = [node.args[0] for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    patterns = [make_pattern(text) for text in said if make_pattern(text)]
    for line in lines:
        assert any(re.fullmatch(one, line) for one in patterns), f"{source} prints no {line!r}"


def make_pattern(text: ast.expr) -> str:
    """Return a pattern of what a string prints, "" for what fixes no words."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    fixed = [part.value for part in parts if isinstance(part, ast.Constant)]
    if not any(isinstance(word, str) and len(word.strip()) > 1 for word in fixed):
        return ""
    return "".join(
        re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in parts
    )


def test_the_command_table_is_complete() -> None:
    rows = re.findall(r"^\| `(splitup[\w-]*)` \|[^|]*\|([^|]*)\|$", (ROOT / USE).read_text(), re.M)
    shown = {program: re.findall(r"`([\w-]+)`", commands) for program, commands in rows}
    assert shown == {name: list_commands(get_command(app)) for name, app in APPS.items()}


def list_commands(group: Any) -> list[str]:
    return list(group.list_commands(Context(group)))
