"""``splitup check``: did the committee plan an execution as the protocol demands?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.cli.options import ConfigFlag, ExecutionArgument

if TYPE_CHECKING:
    from splitup.client.market.plan_check import CheckedPlan, PassedOver


@as_command(hint="asking the chain")
async def command(
    execution_id: ExecutionArgument,
    report: Annotated[
        bool, typer.Option("--report", help="Send the proof of a wrong choice to the chain.")
    ] = False,
    config: ConfigFlag = None,
    *,
    output: JsonOutput,
) -> None:
    """Compute an execution's plan again and compare it with the committee's.

    Exit code 1 when they differ. With --report the members that signed it lose their bonds.
    """
    from splitup.client.connection import SplitUp
    from splitup.client.market.plan_check import fetch_unexplained, report_choice

    async with SplitUp.connect(config) as net:
        checked = await net.check_plan(execution_id)
        answers = await report_choice(net.chain, checked) if report else {}
        unexplained = await fetch_unexplained(net.chain, checked)
    found = {
        "execution_id": execution_id,
        "snapshot_root": checked.snapshot.root(),
        "signers": checked.signers,
        "difference": checked.difference,
        "provable": checked.challenge is not None,
        "passed_over": [asdict(passed) for passed in checked.passed_over],
        "unexplained": [asdict(passed) for passed in unexplained],
        "reported": answers,
    }
    output.give(found, lambda: _show(output, checked, answers, unexplained))
    if checked.difference or unexplained:
        raise typer.Exit(1)


def _show(
    output: Output,
    checked: CheckedPlan,
    answers: dict[str, str],
    unexplained: tuple[PassedOver, ...],
) -> None:
    if not checked.difference:
        output.out.print(
            f"correct: {len(checked.certificate.plan.tasks)} tasks assigned among "
            f"{len(checked.snapshot.entries)} live nodes, every choice as the random seed demands",
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
