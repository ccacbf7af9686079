"""Rights to log objects: only for current executors, and only for objects that can exist."""

from __future__ import annotations

import pytest
from splitup_oracle.gateway.access import Right, compute_log_rights
from splitup_oracle.gateway.quota import LogQuota, UploadQuota

from splitup.core import limits
from splitup.core.errors import Refused
from splitup.crypto.keys import Identity
from splitup.messages.base import CLIENT
from splitup.messages.completions import Takeover
from splitup.messages.plans import Plan, PlanCertificate, PlanNode
from splitup.messages.storage import LogName, LogRequest, LogWrite
from splitup.protocol.execution.takeovers import ExecutorMap, sign_takeover
from tests.builders import address, make_chain_manifest, make_request

MANIFEST = make_chain_manifest(3)
STEPS = 4
CLIENT_IDENTITY = Identity.from_private_key(bytes([7] * 32))
# node n+1 runs task n; node 4 may take task 1 over; node 5 only task 2
PLAN = Plan(
    request=make_request(STEPS).model_copy(
        update={"model_id": MANIFEST.model_id, "client_key": CLIENT_IDENTITY.signing_key_hex}
    ),
    seed="0x" + "77" * 32,
    tasks=((address(1),), (address(2), address(4)), (address(3), address(5))),
    nodes=tuple(
        PlanNode(node=address(n), signing_key=f"0x{n:064x}", endpoint="http://127.0.0.1:9")
        for n in range(1, 6)
    ),
)
CERTIFICATE = PlanCertificate(plan=PLAN, seed_signature="0x", signatures=())


def write(task: int, **changes: object) -> LogWrite:
    values = {"task": task, "port": 0, "number": 0, "apart": False, "length_bytes": 300}
    return LogWrite(**{**values, "sha256": "a" * 64, **changes})  # type: ignore[arg-type]


def read(task: int, node: str) -> LogName:
    return LogName(task=task, port=0, node=node, number=0, apart=False)


def make_executor_map(*replaced: int) -> ExecutorMap:
    """Tasks whose first fallback took over."""
    executor_map = ExecutorMap(PLAN)
    for task in replaced:
        takeover = Takeover(
            execution_id=PLAN.request.execution_id, task=task, candidate=1, first_step=0
        )
        executor_map.apply(sign_takeover(CLIENT_IDENTITY, takeover))
    return executor_map


def ask(
    node: int,
    *,
    writes: tuple[LogWrite, ...] = (),
    reads: tuple[LogName, ...] = (),
    replaced: tuple[int, ...] = (),
) -> list[str]:
    request = LogRequest(certificate=CERTIFICATE, writes=writes, reads=reads)
    key = PLAN.request.client_key if node == 0 else f"0x{node:064x}"
    rights = compute_log_rights(PLAN, MANIFEST, key, request, make_executor_map(*replaced))
    return [f"{right.method} {right.key.split('/', 2)[2]}" for right in rights]


def test_newcomer_writes_below_its_own_prefix_and_reads_whoever_ran_the_task_before() -> None:
    mine = (write(1),)
    assert ask(4, writes=mine, reads=(read(0, address(1)),), replaced=(1,)) == [
        f"PUT t0001.0/{address(4)}/00000",
        f"GET t0000.0/{address(1)}/00000",
    ]
    assert ask(5, reads=(read(1, address(2)), read(1, address(4))), replaced=(2,)) == [
        f"GET t0001.0/{address(2)}/00000",
        f"GET t0001.0/{address(4)}/00000",
    ]


def test_everybody_reads_the_own_log_and_nobody_elses_of_its_task() -> None:
    assert ask(2, reads=(read(1, address(2)),)) == [f"GET t0001.0/{address(2)}/00000"]
    client = PLAN.request.client
    assert ask(0, reads=(read(CLIENT, client),)) == [f"GET input.0/{client}/00000"]
    with pytest.raises(Refused, match="does not read"):
        ask(4, reads=(read(CLIENT, client),), replaced=(1,))
    with pytest.raises(Refused, match="does not read"):
        ask(4, reads=(read(1, address(2)),), replaced=(1,))


def test_a_takeover_begins_the_rights_of_a_node_and_leaves_the_replaced_one_its_log() -> None:
    mine, inputs = (write(1),), (read(0, address(1)),)
    for node, replaced in ((2, ()), (4, (1,))):
        assert ask(node, writes=mine, reads=inputs, replaced=replaced)
    with pytest.raises(Refused, match="does not run task 1"):
        ask(4, writes=mine)
    for node, replaced in ((4, ()), (2, (1,)), (2, (1, 2))):
        with pytest.raises(Refused, match="does not read"):
            ask(node, reads=inputs, replaced=replaced)


def test_s61_a_replaced_node_may_store_what_it_has_computed() -> None:
    """A client that takes a task away with its last output would have it for nothing."""
    for replaced in ((1,), (1, 2)):
        assert ask(2, writes=(write(1),), replaced=replaced) == [f"PUT t0001.0/{address(2)}/00000"]


@pytest.mark.parametrize(
    ("node", "request_", "message"),
    [
        (4, {"writes": (write(2),)}, "does not run task 2"),
        (4, {"writes": (write(CLIENT),)}, "does not run"),
        (4, {"reads": (read(1, address(2)),)}, "does not read port 0 of task 1"),
        (5, {"reads": (read(1, address(1)),)}, "writes no log of task 1"),
        (0, {"reads": (read(1, address(2)),)}, "does not read"),
        (4, {"writes": (write(1, port=1),)}, "has no log object 0"),
        (4, {"writes": (write(1, number=STEPS),)}, f"has no log object {STEPS}"),
        (4, {"writes": (write(1, apart=True),)}, "at most 0 bytes"),
        (4, {"writes": (write(1, length_bytes=2**20),)}, "at most"),
    ],
)
def test_a10_what_the_plan_does_not_give_is_refused(
    node: int, request_: dict[str, tuple[LogWrite, ...]], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        ask(node, replaced=(1, 2), **request_)  # type: ignore[arg-type]


def test_a10_a_log_takes_no_more_of_the_store_than_its_steps_can() -> None:
    manifest = make_chain_manifest(3)
    quota = LogQuota()
    largest = (limits.LOG_STEP_BYTES + 4) * STEPS // 3

    def take(number: int) -> None:
        request = LogRequest(
            certificate=CERTIFICATE,
            writes=(write(1, number=number, length_bytes=largest),),
            reads=(),
        )
        rights = compute_log_rights(PLAN, manifest, f"0x{4:064x}", request, make_executor_map(1))
        quota.take(rights, PLAN, manifest)

    for number in (0, 1, 2, 2, 1):  # asking again costs nothing
        take(number)
    with pytest.raises(Refused, match="bytes already"):
        take(3)
    take(2)


def test_uploads_of_an_account_are_bounded_by_the_day() -> None:
    quota = UploadQuota(1_000)
    right = Right("PUT", "blobs/x", 400, "x")
    quota.take("a", [right, right], 0)
    with pytest.raises(Refused, match="200 that are left today") as refusal:
        quota.take("a", [right], 86_399)
    assert refusal.value.status == 429
    quota.take("b", [right], 86_399)  # another account
    quota.take("a", [right], 86_400)  # another day
