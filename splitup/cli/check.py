"""``splitup check``: did the committee plan an execution as the protocol demands?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.console import Output, run_command
from splitup.cli.options import ConfigFlag, ExecutionArgument, JsonFlag

if TYPE_CHECKING:
    from splitup.client.market.plan_check import CheckedPlan, PassedOver


def command(
    execution_id: ExecutionArgument,
    report: Annotated[
        bool, typer.Option("--report", help="Send the proof of a wrong choice to the chain.")
    ] = False,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute an execution's plan again and compare it with the committee's.

    Exit code 1 when they differ. With --report the members that signed it lose their bonds.
    """
    output = Output.open(as_json)

    def run() -> None:
        from splitup.core import event_loop

        checked, answers, unexplained = event_loop.run(_check(config, execution_id, report))
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
        else:
            _show(output, checked, answers, unexplained)
        if checked.difference or unexplained:
            raise typer.Exit(1)

    run_command(output, run)


async def _check(
    config: ConfigFlag, execution_id: str, report: bool
) -> tuple[CheckedPlan, dict[str, str], tuple[PassedOver, ...]]:
    from splitup.client.connection import SplitUp
    from splitup.client.market.plan_check import fetch_unexplained, report_choice

    async with SplitUp.connect(config) as net:
        checked = await net.check_plan(execution_id)
        answers = await report_choice(net.chain, checked) if report else {}
        return checked, answers, await fetch_unexplained(net.chain, checked)


def _show(
    output: Output,
    checked: CheckedPlan,
    answers: dict[str, str],
    unexplained: tuple[PassedOver, ...],
) -> None:
    if not checked.difference:
        output.out.print(
            f"correct: {len(checked.certificate.plan.tasks)} tasks assigned among "
            f"{len(checked.snapshot.entries)} live nodes, every choice as the random seed demands"
        )
    else:
        output.out.print(f"wrong: {checked.difference}")
        if checked.challenge is None:
            output.out.print("the chain cannot verify this difference, so nobody is slashed")
        for member, answer in answers.items():
            output.out.print(f"  {member}  {answer or 'its bond was slashed'}")
    for passed in checked.passed_over:
        output.out.print(_describe_passed(passed, passed in unexplained))


def _describe_passed(passed: PassedOver, is_unexplained: bool) -> str:
    from splitup.client.inputs import format_usdc

    doubt = "; the chain's events do not explain this" if is_unexplained else ""
    return (
        f"task {passed.task} was not given to {passed.node}: it needs "
        f"{format_usdc(passed.needed)} of free stake, and {format_usdc(passed.locked)} of "
        f"{format_usdc(passed.stake)} were locked{doubt}"
    )
