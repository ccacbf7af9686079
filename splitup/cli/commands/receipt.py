"""``splitup receipt``: how the chain closed an execution, and what it cost."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from splitup.cli.command import JsonOutput, as_command
from splitup.cli.console import Output
from splitup.cli.options import ConfigFlag, ExecutionArgument
from splitup.client import defaults

if TYPE_CHECKING:
    from splitup.client.market.receipts import Receipt
    from splitup.messages.verification import Evidence

_SILENT_S: Final = 2.0  # a longer wait is announced


@as_command(hint="asking the chain")
async def command(
    execution_id: ExecutionArgument, config: ConfigFlag = None, *, output: JsonOutput
) -> None:
    """Show what an execution cost and who was paid; wait until it is settled or refunded."""
    receipt, evidence = await _fetch(output, config, execution_id)
    verdicts = evidence and [verdict.model_dump(mode="json") for verdict in evidence.verdicts]
    found = {**asdict(receipt), "verdicts": verdicts}
    output.give(found, lambda: _show(output, receipt, evidence))


async def _fetch(
    output: Output, config: ConfigFlag, execution_id: str
) -> tuple[Receipt, Evidence | None]:
    """Return the receipt, and the verdicts if a member still has them.

    It is what ``SplitUp`` offers, without the client that runs models.
    """
    from splitup.chain.client import Chain
    from splitup.chain.committee_reader import Committees
    from splitup.client.inputs import check_execution_id
    from splitup.client.market.receipts import wait_for_receipt
    from splitup.client.market.settlement_evidence import find_evidence
    from splitup.config import NetworkConfig
    from splitup.core.errors import SplitUpError
    from splitup.messages.network import Deployment
    from splitup.net.http import SignedClient

    network = NetworkConfig.load(config)
    user = network.load_user()
    check_execution_id(execution_id)
    chain = await Chain.connect(
        network.rpc_url, Deployment.load(network.deployment), private_key=user.private_key
    )
    async with chain, SignedClient() as http:
        text = f"waiting until the execution is settled, at most {defaults.RECEIPT_TIMEOUT_S:g} s"
        announce = asyncio.get_running_loop().call_later(_SILENT_S, output.update, text)
        try:
            receipt = await wait_for_receipt(
                *(chain, execution_id),
                from_block=0,
                timeout_s=defaults.RECEIPT_TIMEOUT_S,
                account=user.address,
            )
        finally:
            announce.cancel()
        try:
            return receipt, await find_evidence(chain, Committees(chain), http, receipt)
        except SplitUpError:
            return receipt, None  # refunded, or settled long ago


def _show(output: Output, receipt: Receipt, evidence: Evidence | None) -> None:
    from splitup.client.inputs import format_share, format_usdc

    output.out.print(f"{receipt.status} in block {receipt.block_number}")
    output.out.print(describe_cost(receipt))
    share = f"{format_share(receipt.verify_bps)} of the tasks were to be verified"
    if evidence is not None:
        outcomes = Counter(verdict.outcome for verdict in evidence.verdicts)
        found = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        share += f"; drawn and verified: {found or 'none'}"
    output.out.print(share)
    for payment in receipt.payments:
        source = " out of a slashed stake" if payment.from_slash else ""
        amount = format_usdc(payment.amount_micro_usdc)
        output.out.print(f"  {payment.account}  {amount}{source}")
    for node, slashed in receipt.slashes:
        output.out.print(f"  {node}  slashed {format_usdc(slashed)}")


def describe_cost(receipt: Receipt) -> str:
    """Return one line about what a closed execution cost."""
    from splitup.client.inputs import format_usdc

    paid, fee = receipt.paid_micro_usdc, receipt.fee_micro_usdc
    if not paid + fee:
        cost = "nothing"
    elif not paid:
        cost = f"{format_usdc(fee)} for the stake that was reserved"
    else:
        cost = (
            f"{format_usdc(paid + fee)} ({format_usdc(paid)} to the nodes, {format_usdc(fee)} fee)"
        )
    return f"cost: {cost}; {format_usdc(receipt.refunded_micro_usdc)} came back"
