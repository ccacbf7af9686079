"""The contracts' events in the machines' words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitup.chain.deployment import Deployment
from splitup.chain.events import ChainEvent
from splitup.protocol.events import (
    ComplaintPosted,
    CompletionCommitted,
    DealingPosted,
    Event,
    ExecutionEnded,
    NodeRecord,
    PlanAccepted,
    RequestSeen,
    SnapshotAccepted,
)
from splitup.wire import Request


def make_request(event: ChainEvent, deployment: Deployment) -> Request:
    """Return an execution as its event RequestNodeSelections states it."""
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
    )


def make_event(event: ChainEvent, deployment: Deployment, configuration: int) -> Event | None:
    """Return what the member's machine should know of an event, or None."""
    args = event.args
    match event.name:
        case "RequestNodeSelections":
            return RequestSeen(make_request(event, deployment))
        case "PlanAccepted":
            return PlanAccepted(args["executionId"], args["planRoot"])
        case "CompletionCommitted":
            return CompletionCommitted(
                execution_id=args["executionId"],
                node=args["node"],
                steps=args["steps"],
                root=args["root"],
                block_hash=event.block_hash,
            )
        case "Settled" | "Refunded":
            return ExecutionEnded(args["executionId"])
        case "SnapshotAccepted" if args["configuration"] == configuration:
            return SnapshotAccepted(args["sequence"], args["root"])
    return None


def make_board_event(
    event: ChainEvent, configuration: int
) -> DealingPosted | ComplaintPosted | None:
    """Return an event of the key generation of this configuration, or None."""
    args = event.args
    if args.get("configuration") != configuration:
        return None
    match event.name:
        case "DealingPosted":
            return DealingPosted(args["dealer"], bytes(args["dealing"]), event.block_number)
        case "ComplaintPosted":
            return ComplaintPosted(
                dealer=args["dealer"],
                complainer=args["complainer"],
                evidence=bytes(args["evidence"]),
                block_number=event.block_number,
            )
    return None


def make_node_record(node: Mapping[str, Any]) -> NodeRecord:
    """Return a node of the registry's page."""
    return NodeRecord(
        node=node["account"],
        signing_key=node["signingKey"],
        endpoint=node["endpoint"],
        stake_micro_usdc=node["stake"],
    )
