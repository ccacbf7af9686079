"""``splitup-deploy network``: a network's contracts, from a file that says what they shall be."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output, ask, ask_passphrase, print_table
from splitup.core.errors import ConfigurationError

if TYPE_CHECKING:
    from splitup_deploy.network.deployment import DeploymentPlan
    from splitup_deploy.network.settings import NetworkSettings

ROLES: Final = {
    "owner": "appoints members, pauses new executions, sets parameters within the contracts' "
    "bounds, the unbonding period (at most 90 days) and the treasury. Through members of its own "
    "it can take prices and stakes: use a multisignature account",
    "treasury": "receives fees and slashed money; decides nothing",
    "2f + 1 members": "plan, pay and slash; answer with their bonds",
    "nobody": "changes the contracts' code",
}
_ETHER: Final = 10**18
_GWEI: Final = 10**9

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Deploy a network's contracts on any EVM chain with EIP-2537, change and verify them.",
)

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The owner's file of the network.")
]
YesFlag = Annotated[bool, typer.Option("--yes", help="Do not ask before sending transactions.")]
DEFAULT_CONFIG: Final = Path("network.toml")


@app.command("init")
@as_command
def init_command(
    data_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the owner's key and files.")
    ],
    rpc_url: Annotated[str, typer.Option(metavar="URL", help="The chain's RPC endpoint.")],
    usdc: Annotated[
        str, typer.Option(metavar="ADDRESS", help='USDC on that chain, or "test" for a test token.')
    ],
    confirmations: Annotated[
        int, typer.Option(metavar="BLOCKS", help="Blocks that members wait before they believe.")
    ] = 2,
    *,
    output: JsonOutput,
) -> None:
    """Make the owner's key and network.toml, a commented file of settings.

    At a terminal it asks for the key's passphrase; elsewhere, or if empty, the key gets a random
    one. Whoever has keystore.json and passphrase owns the network.
    """
    from splitup_deploy.network.settings import create_network_file

    made = create_network_file(
        data_dir,
        rpc_url=rpc_url,
        usdc=usdc,
        confirmations=confirmations,
        passphrase=lambda: ask_passphrase("owner", data_dir / DEFAULT_CONFIG),
    )
    lines = (
        f"Made the owner's key {made.owner} and {made.config}.",
        "Next: send it ether for gas, then see what would be done:",
        f"  splitup-deploy network plan --config {made.config}",
    )
    output.give(
        {"config": str(made.config), "owner": made.owner},
        lambda: output.out.print("\n".join(lines)),
    )


@app.command("plan")
@as_command
async def plan_command(config: ConfigOption = DEFAULT_CONFIG, *, output: JsonOutput) -> None:
    """Show what 'deploy' would do now, by whom and at what cost. Sends nothing."""
    from splitup_deploy.network.deployment import make_plan
    from splitup_deploy.network.settings import NetworkSettings

    settings = NetworkSettings.load(config)
    plan = await make_plan(settings)
    output.give(_make_json(plan, settings), lambda: _show_plan(plan, settings, output))


@app.command("deploy")
@as_command
async def deploy_command(
    config: ConfigOption = DEFAULT_CONFIG, yes: YesFlag = False, *, output: JsonOutput
) -> None:
    """Make the chain as the file says: contracts, members, parameters, owner.

    Does only what is missing: repeat it after a failure, and after every change of the file.
    deployment.json, which everybody needs, is written when all of it is verified.
    """
    from splitup_deploy.network.deployment import deploy_network, make_plan
    from splitup_deploy.network.settings import NetworkSettings

    settings = NetworkSettings.load(config)
    identity = settings.load_identity()
    if not yes:
        plan = await make_plan(settings)
        _show_plan(plan, settings, Output(False, output.log, output.log))
        _confirm("Send these transactions?" if plan.steps else "Nothing to send. Verify?")
    deployment = await deploy_network(settings, identity, output.say)
    said = f"deployed and verified; give everybody {settings.deployment}"
    output.give(deployment.model_dump(), lambda: output.out.print(said))


@app.command("verify")
@as_command
async def verify_command(config: ConfigOption = DEFAULT_CONFIG, *, output: JsonOutput) -> None:
    """Compare the contracts on the chain with this version's code and with the file.

    Exit code 1 if anything differs. Anybody can do it with the owner's file, deployment and record,
    all without secrets, if 'owner' is given in the file.
    """
    from splitup_deploy.network.deployment import verify_network
    from splitup_deploy.network.settings import NetworkSettings

    problems = await verify_network(NetworkSettings.load(config))
    said = "\n".join(f"✗ {problem}" for problem in problems)
    said = said or "The contracts and their settings are as the file says."
    output.give({"problems": problems}, lambda: output.out.print(said))
    if problems:
        raise typer.Exit(1)


@app.command("reset-members")
@as_command
async def reset_members_command(
    config: ConfigOption = DEFAULT_CONFIG, yes: YesFlag = False, *, output: JsonOutput
) -> None:
    """Appoint the file's members at once, without a handover of the group key.

    Only for when more than f members are gone for good: executions that are open then cannot be
    settled, and their clients are refunded. Otherwise change the members with 'deploy'.
    """
    from splitup_deploy.network.deployment import reset_members
    from splitup_deploy.network.settings import NetworkSettings

    settings = NetworkSettings.load(config)
    identity = settings.load_identity()
    if not yes:
        _confirm(f"Appoint the {len(settings.members)} members without a handover?")
    number = await reset_members(settings, identity)
    said = f"configuration {number} is in force; its members make a new key"
    output.give({"configuration": number}, lambda: output.out.print(said))


def _confirm(question: str) -> None:

    if not sys.stdin.isatty():
        raise ConfigurationError("nobody can be asked; add --yes to send the transactions")
    if ask(f"{question} [y/N]", default="", show_default=False).lower() not in ("y", "yes"):
        raise typer.Exit(1)


def _make_json(plan: DeploymentPlan, settings: NetworkSettings) -> dict[str, Any]:
    return {
        **{key: value for key, value in asdict(plan).items() if key != "blocked"},
        "blocked": [difference.to_dict() for difference in plan.blocked],
        "gas": plan.gas,
        "cost_wei": plan.gas * plan.gas_price_wei,
        "cost_cap_wei": plan.gas * plan.gas_price_cap_wei,
        "parameters": asdict(settings.market),
        "roles": ROLES,
    }


def _show_plan(plan: DeploymentPlan, settings: NetworkSettings, output: Output) -> None:
    def say(text: str) -> None:
        output.out.print(text)

    say(f"Chain {plan.chain_id} at {settings.rpc_url}")
    say(f"Account {plan.account} with {plan.balance_wei / _ETHER:.6f} ether")
    for name, address in plan.contracts.items():
        say(f"  {name:9} {address}")
    for difference in plan.blocked:
        say(
            f"Not in this account's power: {difference.what} is {difference.found} instead of "
            f"{difference.wanted}"
        )
    if not plan.steps:
        say("Nothing is missing.")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("transaction")
    table.add_column("gas", justify="right")
    for step in plan.steps:
        table.add_row(step.what, "not known" if step.gas is None else f"{step.gas:,}")
    table.add_row("all", f"{plan.gas:,}")
    print_table(output.out, table)
    cost, cap = plan.gas * plan.gas_price_wei, plan.gas * plan.gas_price_cap_wei
    say(
        f"Cost: {cost / _ETHER:.6f} ether at {plan.gas_price_wei / _GWEI:.3f} gwei per gas, "
        f"at most {cap / _ETHER:.6f}"
    )
    if cap > plan.balance_wei:
        say(f"The account has less: send it {(cap - plan.balance_wei) / _ETHER:.6f} ether first.")
    say("Parameters:")
    for name, value in {
        "unbonding_period_s": settings.unbonding_period_s,
        "bond_period_s": settings.bond_period_s,
        "confirmations": settings.confirmations,
        **asdict(settings.market),
    }.items():
        say(f"  {name} = {value}")
    say("Later:")
    for role, power in ROLES.items():
        say(f"  {role}: {power}.")
