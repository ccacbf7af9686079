"""``splitup-deploy network``: a network's contracts, from a file that says what they shall be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from splitup.cli.console import Output, ask_passphrase
from splitup_deploy.cli.options import JsonFlag
from splitup_deploy.cli.steps import run_quietly

if TYPE_CHECKING:
    from splitup.crypto.keys import Identity
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
    as_json: JsonFlag = False,
) -> None:
    """Make the owner's key and network.toml, a commented file of settings.

    At a terminal it asks for the key's passphrase; elsewhere, or if empty, the key gets a random
    one. Whoever has keystore.json and passphrase owns the network.
    """
    output = Output.open(as_json)

    def run() -> None:
        from splitup_deploy.network.settings import create_network_file

        passphrase = ask_passphrase("owner") if sys.stdin.isatty() else ""
        made = create_network_file(
            data_dir,
            rpc_url=rpc_url,
            usdc=usdc,
            confirmations=confirmations,
            passphrase=passphrase,
        )
        if as_json:
            output.print_json({"config": str(made.config), "owner": made.owner})
            return
        for line in (
            f"Made the owner's key {made.owner} and {made.config}.",
            "Next: send it ether for gas, then see what would be done:",
            f"  splitup-deploy network plan --config {made.config}",
        ):
            output.out.print(line, soft_wrap=True)

    run_quietly(output, run)


@app.command("plan")
def plan_command(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonFlag = False) -> None:
    """Show what 'deploy' would do now, by whom and at what cost. Sends nothing."""

    output = Output.open(as_json)

    def run() -> None:
        from splitup.core import event_loop
        from splitup_deploy.network.deployment import make_plan
        from splitup_deploy.network.settings import NetworkSettings

        settings = NetworkSettings.load(config)
        plan = event_loop.run(make_plan(settings))
        if as_json:
            output.print_json(_make_json(plan, settings))
        else:
            _show_plan(plan, settings, output)

    run_quietly(output, run)


@app.command("deploy")
def deploy_command(
    config: ConfigOption = DEFAULT_CONFIG, yes: YesFlag = False, as_json: JsonFlag = False
) -> None:
    """Make the chain as the file says: contracts, members, parameters, owner.

    Does only what is missing: repeat it after a failure, and after every change of the file.
    deployment.json, which everybody needs, is written when all of it is verified.
    """

    async def deploy(settings: NetworkSettings, identity: Identity, output: Output) -> None:
        from splitup_deploy.network.deployment import deploy_network, make_plan

        if not yes:
            plan = await make_plan(settings)
            _show_plan(plan, settings, Output(False, output.log, output.log))
            _confirm("Send these transactions?" if plan.steps else "Nothing to send. Verify?")
        deployment = await deploy_network(settings, identity, output.say)
        if as_json:
            output.print_json(asdict(deployment))
        else:
            text = f"deployed and verified; give everybody {settings.deployment}"
            output.out.print(text, soft_wrap=True)

    _act(config, as_json, deploy)


@app.command("verify")
def verify_command(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonFlag = False) -> None:
    """Compare the contracts on the chain with this version's code and with the file.

    Exit code 1 if anything differs. Anybody can do it with the owner's file, deployment and record,
    all without secrets, if 'owner' is given in the file.
    """
    output = Output.open(as_json)

    def run() -> None:
        from splitup.core import event_loop
        from splitup_deploy.network.deployment import verify_network
        from splitup_deploy.network.settings import NetworkSettings

        problems = event_loop.run(verify_network(NetworkSettings.load(config)))
        if as_json:
            output.print_json({"problems": problems})
        for problem in () if as_json else problems:
            output.out.print(f"✗ {problem}", soft_wrap=True)
        if problems:
            raise typer.Exit(1)
        if not as_json:
            output.out.print("The contracts and their settings are as the file says.")

    run_quietly(output, run)


@app.command("reset-members")
def reset_members_command(
    config: ConfigOption = DEFAULT_CONFIG, yes: YesFlag = False, as_json: JsonFlag = False
) -> None:
    """Appoint the file's members at once, without a handover of the group key.

    Only for when more than f members are gone for good: executions that are open then cannot be
    settled, and their clients are refunded. Otherwise change the members with 'deploy'.
    """

    async def reset(settings: NetworkSettings, identity: Identity, output: Output) -> None:
        from splitup_deploy.network.deployment import reset_members

        if not yes:
            _confirm(f"Appoint the {len(settings.members)} members without a handover?")
        number = await reset_members(settings, identity)
        if as_json:
            output.print_json({"configuration": number})
        else:
            output.out.print(f"configuration {number} is in force; its members make a new key")

    _act(config, as_json, reset)


def _act(config: Path, as_json: bool, act: Callable[..., Any]) -> None:
    """Load the file and open its key, then act."""
    output = Output.open(as_json)

    def run() -> None:
        from splitup.core import event_loop
        from splitup_deploy.network.settings import NetworkSettings

        settings = NetworkSettings.load(config)
        event_loop.run(act(settings, settings.load_identity(), output))

    run_quietly(output, run)


def _confirm(question: str) -> None:
    from splitup.core.errors import ConfigurationError

    if not sys.stdin.isatty():
        raise ConfigurationError("nobody can be asked; add --yes to send the transactions")
    if not typer.confirm(question, err=True):
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
        output.out.print(text, soft_wrap=True)

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
    output.out.print(table)
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
