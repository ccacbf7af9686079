"""splitup: run models on the network, run a network of your own, see whether a machine is fit.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the network or chain failed
(or, for the demo, the result differs), 2 the input cannot be used, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from splitup.cli.console import EXIT_CODES, Output, run_command
from splitup.cli.dispute_judgement import DisputeOptions, judge_dispute
from splitup.cli.text_generation import (
    GenerateOptions,
    describe_receipt,
    read_lookahead,
    run_generate,
)
from splitup.client.connection import DEFAULT_DEADLINE_S, RECEIPT_TIMEOUT_S, SplitUp
from splitup.client.generation import DecoderName
from splitup.client.inputs import format_usdc, parse_usdc
from splitup.client.market.plan_check import (
    CheckedPlan,
    PassedOver,
    fetch_unexplained,
    report_choice,
)
from splitup.client.outcome import Array, Receipt, Result
from splitup.config import DEFAULT_HOME, HOME_VARIABLE, MemoryField
from splitup.core import event_loop
from splitup.core.errors import InvalidInput, SplitUpError
from splitup.devnet.commands import NetworkStatus, down, fetch_status, fund, up, up_detached
from splitup.devnet.network import DevnetOptions

_WAIT_UNSAID_S: Final = 2.0  # who waits longer is told for what

app = typer.Typer(
    name="splitup",
    help=f"Run models on the network, or run a network of your own.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DirFlag = Annotated[
    Path,
    typer.Option("--dir", metavar="DIR", envvar=HOME_VARIABLE, help="Directory of the network."),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="Network file or directory (default: $SPLITUP_HOME, .splitup).",
    ),
]
PriceFlag = Annotated[
    str | None,
    typer.Option("--max-price", metavar="USDC", help="Most USDC to pay (default: what it costs)."),
]
DeadlineFlag = Annotated[
    float,
    typer.Option(
        "--deadline", metavar="SECONDS", min=5.0, help="Seconds until the money comes back."
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


# ---- using a network ---------------------------------------------------------------------------


@app.command("run")
def run_model_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or id of a registered model.")
    ],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input", metavar="NAME=FILE", help="NAME=FILE.npy; once per input of the model."
        ),
    ],
    directory: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Directory for the outputs.")
    ],
    max_price: PriceFlag = None,
    deadline: DeadlineFlag = DEFAULT_DEADLINE_S,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a model over arrays; write every output as NAME.npy."""
    output = Output.open(as_json)

    def run() -> None:
        arrays = dict(_read_input(text) for text in inputs)

        async def execute() -> Result:
            async with SplitUp.connect(config) as net:
                return await net.execute(
                    model, arrays, max_price_usdc=max_price, deadline_s=deadline
                )

        result = event_loop.run(execute())
        directory.mkdir(parents=True, exist_ok=True)
        files = {name: directory / f"{name}.npy" for name in result.outputs}
        for name, path in files.items():
            np.save(path, result.outputs[name], allow_pickle=False)
        if output.as_json:
            output.print_json(_describe_result(result, files))
            return
        for name, path in files.items():
            array = result.outputs[name]
            output.out.print(f"{name}: {array.dtype}{list(array.shape)} in {path}", markup=False)
        nodes = len(set(result.nodes))
        output.say(
            f"{len(result.manifest.tasks)} tasks on {nodes} nodes in {result.elapsed_s:.2f} s; "
            f"what it cost: splitup receipt {result.execution_id}"
        )

    _run(output, run)


@app.command("generate")
def generate_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or id of a registered text model.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Most tokens to generate.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="T", min=0.0, help="0 takes the likeliest token."),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Equal seeds give equal text.")
    ] = 0,
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", metavar="K", min=0, help="Draw from the likeliest K tokens; 0: from all."
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Draw from the fewest tokens of this probability, above 0 and at most 1.",
        ),
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End before this text. Repeatable."),
    ] = None,
    decoder: Annotated[
        DecoderName,
        typer.Option("--decoder", help="How: lookahead takes fewer steps for the same text."),
    ] = "sequential",
    window: Annotated[
        int | None,
        typer.Option(
            "--lookahead-window", metavar="W", min=0, help="Columns guessed at once; by default 7."
        ),
    ] = None,
    ngram: Annotated[
        int | None,
        typer.Option(
            "--lookahead-ngram", metavar="N", min=2, help="Tokens of an n-gram; by default 4."
        ),
    ] = None,
    guesses: Annotated[
        int | None,
        typer.Option(
            "--lookahead-guesses", metavar="G", min=1, help="N-grams tried per step; by default 7."
        ),
    ] = None,
    max_price: PriceFlag = None,
    deadline: DeadlineFlag = DEFAULT_DEADLINE_S,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Continue a text, token by token as they come."""
    output, has_text = Output.open(as_json), False

    def write(text: str) -> None:
        nonlocal has_text
        if not output.as_json:
            has_text = True
            sys.stdout.write(text)
            sys.stdout.flush()

    def run() -> None:
        options = GenerateOptions(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            stop=tuple(stop or ()),
            decoder=decoder,
            lookahead=read_lookahead(decoder, window, ngram, guesses),
            max_price_usdc=max_price,
            deadline_s=deadline,
            config=config,
        )
        try:
            done = event_loop.run(run_generate(options, write, output.say))
        except SplitUpError:
            write("\n" * has_text)
            raise
        if output.as_json:
            output.print_json(done.to_dict())
        else:
            write("\n" * (done.receipt is None))
        output.say(done.describe())
        if done.is_interrupted:
            raise typer.Exit(130)

    _run(output, run)


@app.command("deposit")
def deposit_command(
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="USDC to move from your wallet into the market.")
    ],
    freeze: Annotated[
        float | None,
        typer.Option(
            "--freeze", metavar="SECONDS", help="Keep the balance for signed requests, for SECONDS."
        ),
    ] = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Put money into the market, so that executions find it there.

    With --freeze they start without waiting for a block; the balance stays there as long.
    """
    output = Output.open(as_json)

    async def deposit() -> int | None:
        async with SplitUp.connect(config) as net:
            if parse_usdc(amount, name="AMOUNT") or freeze is None:
                await net.deposit(amount)
            return None if freeze is None else await net.freeze(freeze)

    def run() -> None:
        until = event_loop.run(deposit())
        if output.as_json:
            output.print_json({"deposited_usdc": amount, "frozen_until": until})
        else:
            kept = "" if freeze is None else f"; the balance is kept for {freeze:g} s"
            output.out.print(f"{amount} USDC went into the market{kept}")

    _run(output, run)


@app.command("receipt")
def receipt_command(
    execution_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of an execution, 0x and 64 digits.")
    ],
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show how the chain closed an execution; waits for it."""
    output = Output.open(as_json)

    def run() -> None:
        async def fetch() -> Receipt:
            async with SplitUp.connect(config) as net:
                said = f"waiting until the chain has closed it, at most {RECEIPT_TIMEOUT_S:g} s"
                asyncio.get_running_loop().call_later(_WAIT_UNSAID_S, output.say, said)
                return await net.receipt(execution_id)

        receipt = event_loop.run(fetch())
        if output.as_json:
            output.print_json(asdict(receipt))
            return
        output.out.print(describe_receipt(receipt))
        for payment in receipt.payments:
            source = " out of a slashed stake" if payment.from_slash else ""
            amount = format_usdc(payment.amount_micro_usdc)
            output.out.print(f"  {payment.account}  {amount}{source}")
        for node, slashed in receipt.slashes:
            output.out.print(f"  {node}  slashed {format_usdc(slashed)}")

    _run(output, run)


@app.command("check", short_help="Was an execution planned as it must be?")
def check_command(
    execution_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of an execution, 0x and 64 digits.")
    ],
    report: Annotated[
        bool, typer.Option("--report", help="Show a wrong choice to the chain.")
    ] = False,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute an execution's plan anew: did the committee choose as it must?

    Exit code 1 when it did not. With --report the members that signed lose their bonds.
    """
    output = Output.open(as_json)

    def run() -> None:
        async def fetch() -> tuple[CheckedPlan, dict[str, str], tuple[PassedOver, ...]]:
            async with SplitUp.connect(config) as net:
                checked = await net.check_plan(execution_id)
                answers = await report_choice(net.chain, checked) if report else {}
                return checked, answers, await fetch_unexplained(net.chain, checked)

        checked, answers, unexplained = event_loop.run(fetch())
        if output.as_json:
            output.print_json(
                {
                    "execution_id": execution_id,
                    "snapshot_root": checked.snapshot.root(),
                    "signers": checked.signers,
                    "difference": checked.difference,
                    "provable": checked.challenge is not None,
                    "passed_over": [asdict(passed) for passed in checked.passed_over],
                    "unexplained": [asdict(passed) for passed in unexplained],
                    "reported": answers,
                }
            )
        elif not checked.difference:
            output.out.print(
                f"right: {len(checked.certificate.plan.tasks)} tasks among "
                f"{len(checked.snapshot.entries)} live nodes, every choice as the seed gives it"
            )
        else:
            output.out.print(f"wrong: {checked.difference}", markup=False)
            if checked.challenge is None:
                output.out.print("the chain cannot judge this by itself")
            for member, answer in answers.items():
                said = answer or "its bond was taken"
                output.out.print(f"  {member}  {said}", markup=False)
        if not output.as_json:
            for passed in checked.passed_over:
                output.out.print(_describe_passed(passed, passed in unexplained), markup=False)
        if checked.difference or unexplained:
            raise typer.Exit(1)

    _run(output, run)


@app.command("dispute", short_help="Who lied? Judge a dispute from its transcript.")
def dispute_command(
    transcript: Annotated[
        Path, typer.Argument(metavar="TRANSCRIPT", help="What the two parties said, a file.")
    ],
    task: Annotated[
        Path, typer.Option("--task", metavar="FILE", help="The disputed task, as it is stored.")
    ],
    values: Annotated[
        Path | None,
        typer.Option("--values", metavar="DIR", help="Values, in files named by their SHA-256."),
    ] = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="Run a kernel here: this machine is of the parties' class."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Repeat a dispute about a task down to one operation, run that, and say who lied.

    Needs no network. Exit code 1 when what is at hand does not tell.
    """
    output = Output.open(as_json)

    def run() -> None:
        judged = judge_dispute(DisputeOptions(transcript, task, values, here))
        if output.as_json:
            output.print_json(judged.to_dict())
        else:
            output.out.print(judged.describe(), markup=False, soft_wrap=True)
        if not judged.judgement.is_decided:
            raise typer.Exit(1)

    _run(output, run)


def _describe_passed(passed: PassedOver, is_unexplained: bool) -> str:
    doubt = "; the chain's own events do not explain that" if is_unexplained else ""
    return (
        f"task {passed.task} passes over {passed.node}: it takes {format_usdc(passed.needed)} of "
        f"stake, and {format_usdc(passed.locked)} of {format_usdc(passed.stake)} were locked{doubt}"
    )


def _read_input(text: str) -> tuple[str, Array]:
    name, separator, file = text.partition("=")
    if not separator or not name:
        raise InvalidInput(f"--input {text} is not of the form NAME=FILE.npy")
    try:
        return name, np.load(Path(file), allow_pickle=False)
    except OSError as error:
        raise InvalidInput(
            f"input file {file} cannot be read ({error.strerror}); write it with numpy.save"
        ) from None
    except ValueError as error:
        raise InvalidInput(
            f"input file {file} is no array of numbers ({error}); write it with numpy.save"
        ) from None


def _describe_result(result: Result, files: dict[str, Path]) -> dict[str, Any]:
    return {
        "execution_id": result.execution_id,
        "elapsed_s": round(result.elapsed_s, 3),
        "nodes": list(result.nodes),
        "outputs": {
            name: {
                "file": str(path),
                "dtype": str(result.outputs[name].dtype),
                "shape": list(result.outputs[name].shape),
            }
            for name, path in files.items()
        },
    }


# ---- running a network -------------------------------------------------------------------------


@app.command("up", short_help="Start, or resume, a network on this machine.")
def up_command(
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", metavar="N", help="Number of nodes, 1 to 64 (default: 6, or as before)."
        ),
    ] = None,
    directory: DirFlag = DEFAULT_HOME,
    members: Annotated[
        int | None,
        typer.Option(
            "--members",
            metavar="N",
            help="Committee members, 3f + 1 of them to survive f: 4, 7, 10 … 31 "
            "(default: 4, or as before).",
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            "--vram",
            metavar="SIZE",
            help="Memory per node: 1GB, 900MB (default: 1GB; kept after the first start).",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is ready; it keeps running.")
    ] = False,
) -> None:
    """Start a whole network on this machine, or resume the one in the directory."""
    output = Output.open()

    def run() -> None:
        vram_bytes = None if vram is None else _parse_size(vram)
        options = DevnetOptions(directory, nodes, vram_bytes, members=members)
        (up_detached if detach else up)(options, output.say)

    _run(output, run)


@app.command("down")
def down_command(directory: DirFlag = DEFAULT_HOME) -> None:
    """Stop the network of a directory; everything it holds stays."""
    output = Output.open()
    _run(output, lambda: down(directory, output.say))


@app.command("fund", short_help="Give an account test money of a network on this machine.")
def fund_command(
    account: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address of the account, 0x and 40 digits.")
    ],
    amount: Annotated[
        str, typer.Option("--usdc", metavar="AMOUNT", help="Test USDC to give.")
    ] = "2000",
    directory: DirFlag = DEFAULT_HOME,
) -> None:
    """Give an account test USDC, and ether for gas if it has none, on a network of this machine.

    So a node of your own can stake there. A real network's money has to be bought.
    """
    output = Output.open()

    def run() -> None:
        fund(directory, account, parse_usdc(amount, name="--usdc"))
        output.say(f"{account} was given {amount} USDC, and has ether for gas")

    _run(output, run)


@app.command("status", short_help="Show a network's processes and nodes.")
def status_command(directory: DirFlag = DEFAULT_HOME, as_json: JsonFlag = False) -> None:
    """Show processes, committee and nodes of a network; exit code 1 when it is not ready."""
    output = Output.open(as_json)

    def run() -> None:
        status = fetch_status(directory)
        if output.as_json:
            output.print_json(status.to_dict())
        else:
            _show_status(output, status)
        if status.health is None or not status.health.is_ready():
            raise typer.Exit(1)

    _run(output, run)


def _show_status(output: Output, status: NetworkStatus) -> None:
    running = f"process {status.supervisor}" if status.supervisor is not None else "not running"
    output.out.print(f"network in {status.directory}: {running}", highlight=False)
    if status.processes:
        table = Table("party", "process", "state", box=None, pad_edge=False)
        for name, pid, alive in status.processes:
            table.add_row(name, str(pid), "running" if alive else "ended")
        output.out.print(table)
    if status.health is None:
        output.out.print(status.problem, markup=False, highlight=False, soft_wrap=True)
        return
    output.out.print(status.health.describe(), highlight=False)
    table = Table("node", "endpoint", "stake", "tasks", "live", box=None, pad_edge=False)
    table.columns[0].no_wrap = True  # 42 digits to be copied; all in 80 columns
    for node in status.health.nodes:
        stake = format_usdc(node.stake_micro_usdc).removesuffix(" USDC")
        listed = "yes" if node.in_snapshot else "no"
        endpoint = node.endpoint.removeprefix("http://")
        table.add_row(node.address, endpoint, stake, str(len(node.tasks)), listed)
    output.out.print(table)


@app.command("doctor", short_help="Say what this machine lacks.")
def doctor_command(directory: DirFlag = DEFAULT_HOME, as_json: JsonFlag = False) -> None:
    """Say what this machine lacks and the command that mends it; exit code 1 when it lacks any."""
    from splitup.cli.machine_checks import run_checks, to_dict  # loads tinygrad

    output = Output.open(as_json)

    def run() -> None:
        checks = run_checks(directory)
        if output.as_json:
            output.print_json(to_dict(checks))
        else:
            for check in checks:
                mark = "ok     " if check.ok else "missing"
                output.out.print(
                    f"{mark}  {check.name}: {check.found}", soft_wrap=True, markup=False
                )
                if check.fix:
                    output.out.print(f"         mend it with: {check.fix}", markup=False)
        if not all(check.ok for check in checks):
            raise typer.Exit(1)

    _run(output, run)


@app.command("demo", short_help="Run a model on a network of its own.")
def demo_command(
    as_json: JsonFlag = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the network's directory, for splitup up.")
    ] = False,
) -> None:
    """Run a model on a network of its own, compare, verify, pay, show, and stop everything."""
    from splitup.demo import DemoOptions, run_demo, show_report

    output = Output.open(as_json)

    def run() -> None:
        report = run_demo(DemoOptions(keep=keep), output.say)
        if output.as_json:
            output.print_json(report.to_dict())
        else:
            show_report(report, output.out)
        if not report.is_equal:
            raise typer.Exit(1)

    _run(output, run)


def _parse_size(text: str) -> int:
    try:
        return int(TypeAdapter(MemoryField).validate_python(text))
    except ValidationError:
        raise InvalidInput(
            f"--vram {text} is no size, or too little; write for example 1GB or 900MB"
        ) from None


_run = partial(run_command, interrupted="interrupted")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
