"""Translates events of the contracts into events of the protocol's machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitup.chain.event_stream import ChainEvent
from splitup.crypto.quorum import unpack_word
from splitup.messages.network import Deployment
from splitup.messages.plans import Request
from splitup.protocol.committee.certificates import MemberView
from splitup.protocol.committee.events import (
    BoardFact,
    ComplaintPosted,
    ConfigurationSeen,
    DealingPosted,
    ExecutionCommitted,
    ExecutionEnded,
    NodeRecord,
    PlanAccepted,
    RequestSeen,
    RevertibleEvent,
    SnapshotAccepted,
)


def make_request(event: ChainEvent, deployment: Deployment) -> Request:
    """Return the request that an event RequestNodeSelections states."""
    args = event.args
    return Request(
        chain_id=deployment.chain_id,
        market=deployment.market,
        execution_id=args["executionId"],
        model_id=args["modelId"],
        client=args["client"],
        client_key=args["clientKey"],
        steps=args["steps"],
        max_price_micro_usdc=args["maxPrice"],
        deadline=args["deadline"],
        snapshot_sequence=args["snapshotSequence"],
        snapshot_root=args["snapshotRoot"],
        block_hash=event.block_hash,
        inputs_digest=args["inputsDigest"],
        nonce=args["nonce"],
        verify_bps=args["verifyBps"],
    )


def make_event(
    event: ChainEvent, deployment: Deployment, configuration: int
) -> RevertibleEvent | None:
    """Return the machines' form of an event, None for events that they do not use.

    ``configuration`` is the committee's at the event's position on the chain.
    """
    args = event.args
    match event.name:
        case "RequestNodeSelections":
            return RequestSeen(make_request(event, deployment), configuration)
        case "PlanAccepted":
            return PlanAccepted(args["executionId"], args["planRoot"])
        case "ExecutionCommitted":
            return ExecutionCommitted(
                execution_id=args["executionId"],
                root=args["root"],
                block_hash=event.block_hash,
                exposures=tuple(unpack_word(word) for word in args["exposures"]),
            )
        case "Settled":
            return ExecutionEnded(args["executionId"], args["evidenceRoot"], args["fee"])
        case "Refunded":
            return ExecutionEnded(args["executionId"])
        case "SnapshotAccepted":
            return SnapshotAccepted(args["configuration"], args["sequence"], args["root"])
    return None


def make_board_event(event: ChainEvent) -> BoardFact | None:
    """Return the machines' form of an event about members and their keys, or None."""
    args, number = event.args, event.block_number
    match event.name:
        case "MembersSet" | "HandoverBegun":
            return ConfigurationSeen(
                configuration=args["configuration"],
                members=tuple(
                    MemberView(m["account"], m["signingKey"], m["endpoint"])
                    for m in args["members"]
                ),
                is_handover=event.name == "HandoverBegun",
                is_current=event.name == "MembersSet",
                block_number=number,
            )
        case "DealingPosted":
            dealing = bytes(args["dealing"])
            return DealingPosted(args["dealer"], dealing, number, args["configuration"])
        case "ComplaintPosted":
            return ComplaintPosted(
                dealer=args["dealer"],
                complainer=args["complainer"],
                evidence=bytes(args["evidence"]),
                block_number=number,
                configuration=args["configuration"],
            )
    return None


def make_node_record(node: Mapping[str, Any]) -> NodeRecord:
    """Return a node from a page of the registry."""
    return NodeRecord(
        node=node["account"],
        signing_key=node["signingKey"],
        endpoint=node["endpoint"],
        stake_micro_usdc=node["stake"],
        operator=node.get("operator", ""),
        locked_micro_usdc=node["locked"],
    )
