from __future__ import annotations

import hashlib

from splitup_node.execution.kept.digests import StepsBefore

from splitup.core.tensors import NO_STEPS, extend_steps


async def test_a_step_waits_for_the_digests_of_those_before_it() -> None:
    """Large tensors are hashed on threads, and a small one may be ready before them."""
    before, digests = StepsBefore(), [hashlib.sha256(bytes([n])).digest() for n in range(4)]
    late = [before.add(step, digests[step]) for step in (2, 1)]
    assert not any(future.done() for future in late)
    first = before.add(0, digests[0])
    expected = [NO_STEPS]
    for digest in digests:
        expected.append(extend_steps(expected[-1], digest))
    assert [first.result(), late[1].result(), late[0].result()] == expected[:3]
    assert before.add(3, digests[3]).result() == expected[3]
