"""A sentence for people for each of the contracts' custom errors.

Each names the cause and, where there is one, the remedy; it is filled with the error's arguments.
A test compares the table with the ABIs, so that every error has its sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from splitup.chain.abi import RevertReason, decode_revert
from splitup.chain.rpc import RpcError
from splitup.core.errors import ChainRejected

STATUS_NAMES: Final = ("unknown", "requested", "planned", "settled", "refunded")

SENTENCES: Final[Mapping[str, str]] = {
    # ---- token
    "ERC20InsufficientBalance": "{sender} has {balance:usdc} USDC, {needed:usdc} are needed; "
    "send it more USDC",
    "ERC20InsufficientAllowance": "{spender} is approved to take {allowance:usdc} USDC, and "
    "{needed:usdc} are needed; approve more, or try again if another command is using the account",
    "ERC20InvalidApprover": "{approver} cannot approve USDC",
    "ERC20InvalidReceiver": "{receiver} cannot receive USDC",
    "ERC20InvalidSender": "{sender} cannot send USDC",
    "ERC20InvalidSpender": "{spender} cannot be approved for USDC",
    "ERC2612ExpiredSignature": "the permit ended at {deadline:time}; sign a new one",
    "ERC2612InvalidSigner": "the permit is not the next one of {owner}; another command is using "
    "this account, try again",
    "InvalidAccountNonce": "the permit of {account} was used already; another command is using "
    "this account, try again",
    "SafeERC20FailedOperation": "the token {token} refused the transfer",
    # ---- ownership, encoding
    "OwnableUnauthorizedAccount": "{account} does not own the contract",
    "OwnableInvalidOwner": "{owner} cannot own the contract",
    "InvalidShortString": "the contract's name is too short",
    "StringTooLong": "the contract's name is too long",
    "AddressMissing": "an address is zero",
    "AmountMissing": "the amount is zero",
    "RootMissing": "the root is zero",
    "EndpointTooLong": "the endpoint of {account} has {length} bytes; 256 are allowed",
    # ---- committee
    "MemberCountInvalid": "{count} members are not 3f+1 within 4 and 31; list 4, 7, 10 … members",
    "MembersNotAscending": "members must be sorted by address without repetition; {account} is not",
    "MemberKeyMissing": "member {account} has no signing key",
    "NotMember": "{account} is not a member of the committee",
    "DealingExists": "{dealer} has posted its dealing of configuration {configuration} already",
    "BlobLengthInvalid": "the data has {length} bytes; 1 to {maximum} are allowed",
    "GroupKeyExists": "configuration {configuration} has its group key already",
    "GroupKeyHashMismatch": "the group key does not have the stated hash {stated}",
    "VoteExists": "{member} has voted for the group key of configuration {configuration} already",
    "GroupKeyInvalid": "the group key is no point of the curve's subgroup",
    "GroupKeyChanged": "configuration {configuration} must keep the group key; this one differs",
    "GroupKeyMissing": "configuration {configuration} has no group key yet; wait for its members "
    "to generate one",
    "RandomnessInvalid": "the signature is not the committee's (configuration {configuration})",
    "ConfigurationUnknown": "configuration {configuration} of the committee was never in force",
    "PrecompileMissing": "the chain lacks {precompile} of EIP-2537; it needs the Prague upgrade",
    "SequenceInvalid": "snapshot {sequence} is not the next one; submit {expected}",
    "SignaturesMalformed": "{length} bytes are not a list of signatures of the committee",
    "QuorumTooSmall": "{count} signatures are no quorum; {required} members must sign",
    "SignatureInvalid": "the signature at position {index} does not verify",
    "SignersNotAscending": "signatures must be sorted by signer without repetition; {signer}'s is "
    "not",
    # ---- the members' bonds
    "PeriodTooLong": "a bond's period of {period} s is too long; {maximum} s are allowed",
    "BondMissing": "{account} has no bond",
    "MemberBonded": "{account} is, or will be, a member of the committee; its bond stays locked",
    "ReleaseNotRequested": "{account} has not requested its bond; request it first, then wait",
    "StillBonded": "the bond of {account} is locked until {releasableAt:time}",
    "VoteInvalid": "the vote carries no valid signature",
    "VotersDiffer": "the votes are by {first} and {second}, not by one member",
    "SlotsDiffer": "the votes are for different slots, so they do not contradict each other",
    "VotesAgree": "the votes do not contradict each other",
    "AlreadyPunished": "{account} was punished for this already",
    "OpeningInvalid": "part {part} of the evidence does not match the signed root",
    "PlaceInvalid": "the plan lists no node at place {place}",
    "NotACandidate": "{node} may not run the task, or is listed at an earlier place already",
    "ChoiceRight": "the plan's choice is correct: its sampling clock is not above the other's",
    "StrangerUnproven": "the entries do not show that {node} is absent from the snapshot",
    # ---- nodes
    "NodeExists": "{account} is registered already; withdraw its stake first to register anew",
    "UnknownNode": "{account} is not registered; stake first with: splitup-node stake",
    "SigningKeyInvalid": "the signing key {signingKey} is zero or belongs to the node {owner}",
    "VramMissing": "a node must offer at least 1 GB of video memory",
    "NodeLeaving": "{account} is leaving already; its stake is free at {unbondingAt:time}",
    "NodeStaying": "{account} is not leaving; request that first with: splitup-node unstake",
    "StillUnbonding": "the stake of {account} is locked until {unbondingAt:time}; withdraw then",
    "NotMarket": "{caller} is not the market",
    "MarketExists": "the market is {market} already",
    "PageTooLong": "{count} nodes are too many for one page; {maximum} are allowed",
    "PeriodInvalid": "an unbonding period of {period} s is not within {minimum} s, longer than any "
    "execution with its snapshot, and {maximum} s",
    "StakeExposed": "{locked:usdc} USDC of the stake of {account} are locked for executions that "
    "are not closed; withdraw the earnings, which releases settled ones, or wait for the others",
    "ExposureTooHigh": "{account} has {free:usdc} USDC of free stake; {required:usdc} would "
    "have to be locked",
    "ExposureTooLow": "an execution locks at least {floor:usdc} USDC of every executor's stake; "
    "{amount:usdc} are stated for {account}",
    "SlashesNotAscending": "slashes must be sorted by node without repetition; {account} is not",
    "ExposuresNotAscending": "exposures must be sorted by node without repetition; {account} is "
    "not",
    "OperatorUnwilling": "{operator} has not allowed node {account} to name it as its operator",
    # ---- models
    "IdMissing": "a model's or task's id is zero",
    "ModelExists": "the model {modelId} is registered already",
    "UnknownModel": "there is no model {modelId}; list them with: splitup-deploy list",
    "NotDeveloper": "the model {modelId} belongs to its developer {developer}",
    "ModelRetiredAlready": "the model {modelId} is retired already",
    "UnknownName": "there is no model named {name!r}; list them with: splitup-deploy list",
    "NameTaken": "the name {name!r} belongs to {owner}; choose another",
    "NameLengthInvalid": "a name has 1 to 64 bytes, not {length}",
    "TaskCountInvalid": "a model has 1 to 1024 tasks, not {count}; raise the VRAM target",
    "EdgeCountInvalid": "{count} edges are too many for one model",
    "EdgeInvalid": "edge {index} ({edge:#x}) does not lead from a task to a later one",
    "EdgesNotAscending": "edge {index} is not above the one before",
    # ---- market
    "TransferShort": "the token transferred {received} of {expected} units; it is not a plain USDC",
    "Frozen": "the balance of {account} is frozen for signed requests until {until:time}",
    "FreezeInvalid": "a freeze until {until:time} is not between {earliest:time} and {latest:time}",
    "RequestsPaused": "the market accepts no new requests at the moment; open executions go on",
    "UnbondingTooShort": "nodes unbond within {unbondingPeriod} s, and an execution with the "
    "snapshot that it names may last {least} s; set a longer unbonding period first",
    "ClientSignatureInvalid": "the request is not signed by its client {client}",
    "SnapshotUnknown": "snapshot {sequence} with root {root} is not one of the latest",
    "RecordMismatch": "the stated record of execution {executionId} differs from that on chain",
    "PayoutsNotAscending": "payouts must be sorted by account without repetition; {account} is not",
    "AlreadyDistributed": "the payouts of execution {executionId} are credited already",
    "SafeCastOverflowedUintDowncast": "the amount {value} does not fit {bits} bits",
    "BalanceTooSmall": "{account} has {balance:usdc} USDC in the market, {required:usdc} are "
    "needed; deposit more",
    "ParameterInvalid": "the parameter {parameter} is out of its range",
    "OutsideGainTooHigh": "a lie that earns {outsideGain:usdc} USDC outside would be profitable: "
    "its expected loss is {expectedLoss:usdc} USDC",
    "ParametersUnsafe": "cheating would be profitable: the expected loss is {expectedLossMicro} "
    "millionths of a task's cost, the gain {gainMicro}; raise the slash or the sampling",
    "StepsInvalid": "{steps} steps are not within 1 and {maximum}",
    "PriceTooLow": "a maximum price of {maxPrice:usdc} USDC is too low; offer at least "
    "{required:usdc}",
    "ShareInvalid": "a share of {verifyBps} of 10,000 tasks to verify is not between "
    "{minimum} and 10,000",
    "DeadlineInvalid": "a deadline at {deadline:time} is not between {earliest:time} and "
    "{latest:time}",
    "NonceUsed": "{client} has used number {nonce} already; choose another",
    "StatusInvalid": "execution {executionId} is {status:status}",
    "DeadlinePassed": "the deadline of execution {executionId} was {deadline:time}",
    "ExecutorsMissing": "the plan of execution {executionId} has no executor",
    "TooMany": "{count} items are too many for one call; {maximum} are allowed",
    "CommitmentExists": "the commitments of execution {executionId} are on chain already",
    "Overpaid": "the payments of execution {executionId} add up to {paid:usdc} USDC, and only "
    "{available:usdc} are available",
    "NotRefundable": "execution {executionId} is refundable from {refundableAt:time} on; wait",
}
_PANICS: Final = {
    0x01: "an assertion failed",
    0x11: "a number overflowed",
    0x12: "a division by zero",
    0x32: "an index is out of bounds",
    0x41: "too much memory was asked for",
}


class _Shown:
    """An argument that can be formatted as usdc, time or status, besides Python's formats."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        if spec == "usdc":
            return f"{self.value / 10**6:,.6f}".rstrip("0").rstrip(".")
        if spec == "time":
            try:
                return datetime.fromtimestamp(self.value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            except (OverflowError, ValueError, OSError):
                return f"time {self.value}"
        if spec == "status":
            return STATUS_NAMES[self.value] if self.value < len(STATUS_NAMES) else str(self.value)
        return format(self.value, spec)


def explain_retirement(model_id: str) -> str:
    """Return why no new execution of a model starts that its developer has retired."""
    return (
        f"the model {model_id} was retired by its developer and takes no new executions; "
        "see the others with: splitup-deploy list"
    )


def explain_refusal(action: str, error: RpcError) -> ChainRejected | RpcError:
    """Return what to raise for a failed call: ChainRejected after a revert, else the error."""
    if not error.is_revert:
        return error
    reason = decode_revert(error.data) if error.data else None
    if reason is None:
        return ChainRejected(f"{action} was refused by the chain: {error.message}")
    return explain_revert(action, reason)


def explain_revert(action: str, reason: RevertReason) -> ChainRejected:
    """Return the error for a decoded revert of ``action``."""
    sentence = SENTENCES.get(reason.name)
    if reason.name == "Error":
        sentence = str(reason.args["reason"])
    elif reason.name == "Panic":
        code = reason.args["code"]
        sentence = _PANICS.get(code, f"panic {code:#x}")
    elif sentence is not None:
        sentence = sentence.format(**{name: _Shown(value) for name, value in reason.args.items()})
    else:
        sentence = f"{reason.name} {dict(reason.args)}"
    return ChainRejected(f"{action} was refused: {sentence}", error_name=reason.name)
