"""``splitup-node stake``, ``unstake`` and ``withdraw``: the stake, and what was earned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from splitup.cli.command import JsonOutput, as_command
from splitup.core import tuning
from splitup_node.cli.account import DEFAULT_CONFIG, ConfigOption, open_account


@as_command(hint="asking the chain")
async def stake(
    config: ConfigOption = DEFAULT_CONFIG,
    audit: Annotated[
        bool, typer.Option(help="Try tasks that fit before a new node registers.")
    ] = True,
    spare: Annotated[
        float, typer.Option(min=0, help="Percent of the least stake to put down above it.")
    ] = tuning.STAKE_SPARE_PERCENT,
    *,
    output: JsonOutput,
) -> None:
    """Register the node and put down its stake: 1000 USDC plus 100 USDC per GB, and 1 % to spare.

    Below the least stake a node gets no work, so the spare keeps it in business after a small
    slash. Called again, the command fills up what a slash took.

    A new node is checked first: its port, its endpoint, its memory, and tasks that fit it.
    Nothing is staked when one of the checks fails.
    """
    from splitup_node.config import NodeConfig
    from splitup_node.preflight import check_settings
    from splitup_node.tasks.audit import check_machine

    async def check() -> None:
        settings = NodeConfig.load(config)
        check_settings(settings)
        if audit:
            await check_machine(settings, on_progress=output.update)

    async with open_account(config) as account:
        done = await account.stake(check, spare)
    output.give(done, lambda: _show_stake(config, done, output.out))


def _show_stake(config: Path, result: dict[str, Any], console: Console) -> None:
    from splitup.client.inputs import format_usdc

    if result["added_micro_usdc"]:
        console.print(f"Staked {format_usdc(result['added_micro_usdc'])}.")
    console.print(
        f"Node {result['address']} holds a stake of {format_usdc(result['stake_micro_usdc'])}; "
        f"the least is {format_usdc(result['least_stake_micro_usdc'])}. "
        f"Next: splitup-node run --config {config}",
    )


@as_command(hint="asking the chain")
async def unstake(
    config: ConfigOption = DEFAULT_CONFIG,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stay after all.")] = False,
    *,
    output: JsonOutput,
) -> None:
    """Leave: no new work at once, the stake free after the unbonding period."""
    async with open_account(config) as account:
        done = await (account.cancel_unstake() if cancel else account.unstake())
    output.give(done, lambda: _show_unstake(config, done, output.out))


def _show_unstake(config: Path, result: dict[str, Any], console: Console) -> None:
    from splitup_node.owner_facts import describe_unbonding

    if not result["unbonding_at_s"]:
        console.print("The node stays.")
        return
    console.print(f"The stake is {describe_unbonding(result, config)}")


@as_command(hint="asking the chain")
async def withdraw(
    config: ConfigOption = DEFAULT_CONFIG,
    stake: Annotated[bool, typer.Option("--stake", help="The stake, after unbonding.")] = False,
    balance: Annotated[
        bool, typer.Option("--balance", help="The USDC that is ready to withdraw.")
    ] = False,
    *,
    output: JsonOutput,
) -> None:
    """Take out the USDC that is ready to withdraw (the default), the stake, or both."""
    async with open_account(config) as account:
        taken = await account.withdraw(stake, balance or not stake)
    output.give(taken, lambda: _show_withdraw(taken, output.out))


def _show_withdraw(result: dict[str, Any], console: Console) -> None:
    from splitup.client.inputs import format_usdc

    for name, what in (("balance", "payments"), ("stake", "stake")):
        amount = result[f"{name}_micro_usdc"]
        if amount:
            console.print(f"Withdrew {format_usdc(amount)} of {what}.")
    if not any(result.values()):
        console.print("Nothing is ready to withdraw.")
