"""The transactions of a committee member: what its machine wants on the chain."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, assert_never

from eth_hash.auto import keccak

from splitup.chain.bonds import make_report
from splitup.chain.client import Chain
from splitup.chain.market import terms_to_abi
from splitup.core.errors import ChainRejected, Unavailable
from splitup.crypto import bls
from splitup.crypto.quorum import ExecutionHistory, pack_words
from splitup.messages.plans import request_to_abi
from splitup.protocol.committee.commands import (
    ChainCommand,
    ConfirmGroupKey,
    PostComplaint,
    PostDealing,
    SubmitCommitments,
    SubmitEvidence,
    SubmitPlan,
    SubmitSettlement,
    SubmitSnapshot,
)
from splitup.protocol.committee.peer_messages import Equivocation

_VOTE_PERIOD_S: Final = 5.0  # a vote, or the others', may have been lost

log = logging.getLogger("splitup.oracle")


class TransactionSender:
    """Sends what the machine submits. A failure is logged: the machine submits again in time."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    async def send(self, command: ChainCommand) -> None:
        match command:
            case SubmitSnapshot():
                await self._submit(
                    f"snapshot {command.sequence}",
                    "committee",
                    "submitSnapshot",
                    command.sequence,
                    command.epoch,
                    command.root,
                    command.signatures,
                )
            case SubmitPlan():
                await self._submit_plan(command)
            case SubmitCommitments():
                await self._submit(
                    f"the commitments of {command.execution_id}",
                    "market",
                    "commitExecution",
                    command.execution_id,
                    command.root,
                    pack_words(command.exposures),
                    command.signatures,
                )
            case SubmitSettlement():
                await self._submit(
                    f"the settlement of {command.execution_id}",
                    "market",
                    "settle",
                    command.execution_id,
                    command.settlement.to_abi(),
                    (command.history or ExecutionHistory(command.execution_id)).to_abi(),
                    command.signatures,
                )
            case SubmitEvidence():
                await self._report(command.evidence)
            case PostDealing():
                await self._submit("our dealing", "committee", "postDealing", command.dealing)
            case PostComplaint():
                await self._submit(
                    f"a complaint about {command.dealer}",
                    "committee",
                    "postComplaint",
                    command.dealer,
                    command.evidence,
                )
            case ConfirmGroupKey():
                await self._confirm_group_key(command.configuration, command.public_key)
            case _ as never:
                assert_never(never)

    async def _submit_plan(self, command: SubmitPlan) -> None:
        """Submit a plan, or open a signed request with it: then the client's signature goes too."""
        own = [command.client_signature] if command.client_signature else []
        await self._submit(
            f"the plan of {command.execution_id}",
            "market",
            "openExecution" if own else "submitCompletePlan",
            request_to_abi(command.request),
            *own,
            terms_to_abi(command.plan_root, command.seed_signature, command.executors),
            command.signatures,
        )

    async def _submit(self, what: str, contract: Any, function: str, *arguments: Any) -> None:
        try:
            receipt = await self._chain.send(contract, function, *arguments)
        except ChainRejected as error:
            # another member's transaction was first, or the state changed: the events tell which
            log.info("the chain did not take %s: %s", what, error)
        except Unavailable as error:
            log.warning("%s could not be sent: %s", what, error)
        else:
            log.info("%s is in block %s (%s gas)", what, receipt.block_number, receipt.gas_used)

    async def _report(self, evidence: Equivocation) -> None:
        """Log that a member signed two different things, and have its bond slashed if it has one.

        The evidence goes to the contract that holds the bonds.
        """
        member = evidence.first.member
        log.error("member %s signed two different things: %s", member, evidence)
        function, votes = make_report(evidence)
        await self._submit(f"the report about {member}", "bonds", function, *votes)

    async def _confirm_group_key(self, configuration: int, public_key: str) -> None:
        """Vote for the group key until the chain holds one."""
        raw = bls.encode_public_key_eip2537(public_key)
        what, key_hash = "our vote for the group key", "0x" + keccak(raw).hex()
        while True:
            try:
                agreed = await self._chain.call("committee", "groupKeyOf", configuration)
            except Unavailable:
                agreed = None
            if agreed:
                break
            await self._submit(what, "committee", "confirmGroupKey", key_hash, raw)
            await asyncio.sleep(_VOTE_PERIOD_S)
        if bytes(agreed) != raw:
            log.error("the chain holds another group key than the posted dealings give")
