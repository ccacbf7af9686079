"""Whom an event concerns: the accounts, executions and models under which pages list it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from splitup.chain.event_stream import ChainEvent
from splitup.crypto.quorum import unpack_word

# Snapshots come every few seconds and are shown from the members; the others are large and are
# read by members alone.
IGNORED: Final = frozenset({"SnapshotAccepted", "DealingPosted", "ComplaintPosted"})
MAX_AMOUNT: Final = 10**15  # micro-USDC; test tokens can be minted beyond what databases add up
COMMITTEE: Final = "committee"  # under which the committee's events are listed
MARKET: Final = "market"  # under which the market's settings are listed


class Mention(NamedTuple):
    """An event concerns ``subject``: an address, an id, a name (``name_subject``) or a constant.

    ``amount`` is in micro-USDC, None for roles without one.
    """

    subject: str
    role: str
    amount: int | None = None


def name_subject(name: str) -> str:
    """Return the subject of a model's name, which no id or address can equal."""
    return "n:" + name.lower().replace("\0", "\ufffd")[:64]


def find_mentions(event: ChainEvent) -> list[Mention]:
    """Return whom an event concerns; empty for events that pages do not show."""
    if event.name in IGNORED:
        return []
    found = [*_find(event)]
    if "executionId" in event.args:
        found.append(Mention(event.args["executionId"], "execution"))
    merged: dict[tuple[str, str], int | None] = {}
    for subject, role, amount in found:
        if amount is not None:
            amount = min(amount + (merged.get((subject, role)) or 0), MAX_AMOUNT)
        merged[subject, role] = amount
    return [Mention(*key, amount) for key, amount in merged.items()]


def _find(event: ChainEvent) -> Iterable[Mention]:
    args = event.args
    match event.name:
        case "RequestNodeSelections":
            yield Mention(args["modelId"], "model", args["maxPrice"])
            yield Mention(args["client"], "client", args["maxPrice"])
        case "ExecutionCommitted":
            yield from _unpack(args["exposures"], "executor")
        case "Settled":
            yield Mention(args["executionId"], "cost", args["paid"] + args["fee"])
            yield from _unpack(args["payouts"], "payout")
        case "Slashed":
            yield from _unpack(args["taken"], "slashed")
        case "Rewarded":
            yield Mention(args["to"], "reward", args["amount"])
        case "Refunded":
            yield Mention(args["executionId"], "cost", args["reservation"])
            yield Mention(args["client"], "refund", args["amount"])
        case "ModelRegistered":
            yield Mention(args["modelId"], "model")
            yield Mention(args["developer"], "developer")
            yield Mention(name_subject(args["name"]), "name")
        case "ModelRetired":
            yield Mention(args["modelId"], "model")
        case "NodeAllowed" | "OperatorChanged":
            yield Mention(args["account"], "node")
            yield Mention(args["operator"], "operator")
        case "MembersSet" | "HandoverBegun":
            yield Mention(COMMITTEE, COMMITTEE)
            for member in args["members"]:
                yield Mention(member["account"], "member")
        case "GroupKeySet" | "GroupKeyVoted":
            yield Mention(COMMITTEE, COMMITTEE)
        case "Deposited" | "Withdrawn" | "BalanceFrozen":
            yield Mention(args["account"], "client", args.get("amount"))
        case _:
            if event.contract == "nodes" and "account" in args:
                yield Mention(args["account"], "node", args.get("amount"))
            elif "executionId" not in args:
                yield Mention(MARKET, MARKET)


def _unpack(words: Iterable[str], role: str) -> Iterable[Mention]:
    for word in words:
        account, amount = unpack_word(word)
        yield Mention(account, role, amount)
