"""Nodes with real keys, and a plan that gives each of them one task of a chain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from splitup.client.market.plan_requests import Wanted
from splitup.core.tensors import NO_STEPS
from splitup.crypto.keys import Identity, generate_identity
from splitup.graph.manifest import Manifest
from splitup.messages.frames import Frame, Seal
from splitup.messages.plans import Plan, PlanNode
from splitup.net.signed_frames import seal_frame
from splitup.protocol.committee.certificates import CommitteeView
from tests.builders import decode_frame, make_chain_manifest, make_request, make_tensor_frame


@dataclass(frozen=True)
class Parties:
    client: Identity
    nodes: tuple[Identity, ...]  # by task
    manifest: Manifest
    plan: Plan

    @property
    def execution_id(self) -> str:
        return self.plan.request.execution_id

    def make_output(
        self, step: int, data: bytes, signer: int = -1, before: bytes = NO_STEPS
    ) -> tuple[Frame, Seal]:
        """Return the last task's output, decoded, as signed by node ``signer``."""
        last = len(self.nodes) - 1
        frame = make_tensor_frame(self.execution_id, last, 0, step, data, before=before)
        return decode_frame(seal_frame(self.nodes[signer], frame))


def make_parties(
    tasks: int = 2, *, steps: int = 4, endpoint: str = "http://127.0.0.1:1"
) -> Parties:
    client = generate_identity()
    nodes = tuple(generate_identity() for _ in range(tasks))
    request = make_request(steps).model_copy(
        update={"client": client.address, "client_key": client.signing_key_hex}
    )
    directory = sorted(
        (PlanNode(node=n.address, signing_key=n.signing_key_hex, endpoint=endpoint) for n in nodes),
        key=lambda entry: entry.node,
    )
    plan = Plan(
        request=request,
        seed="0x" + "77" * 32,
        tasks=tuple((node.address,) for node in nodes),
        nodes=tuple(directory),
    )
    return Parties(client, nodes, make_chain_manifest(tasks), plan)


def make_wanted(plan: Plan) -> Wanted:
    """What a client asked for that was given this plan."""
    return Wanted(plan.request, len(plan.tasks))


def always(committee: CommitteeView) -> Callable[[], Awaitable[CommitteeView]]:
    async def fetch() -> CommitteeView:
        return committee

    return fetch
