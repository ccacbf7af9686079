"""Clients that have what they want, and see to it that nobody can commit (S53, S60, S61)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from splitup.client.connection import SplitUp
from splitup.client.execution import session as session_module
from splitup.client.execution.session import Session
from splitup.client.outcome import Array
from splitup.core.tensors import TensorSpec, array_to_bytes
from splitup.decode.step import make_arrays, make_causal_step
from splitup.messages.base import CLIENT
from splitup.messages.completions import Takeover
from splitup.messages.frames import FrameKind
from splitup.net.signed_frames import make_message_frame, seal_frame
from splitup.protocol.execution.takeovers import sign_takeover
from splitup.storage.log_store import LogWriter
from tests.e2e.conftest import CHUNK, MODEL, Network

STEPS = 3  # they take less time than a log needs to be stored


def give_all_away(session: Session, *, choose: int) -> None:
    """Name another candidate of every task: the next one, or the last one."""
    for task, candidates in enumerate(session.plan.tasks):
        place = candidates.index(session.executors[task]) + 1
        if choose == -1:
            place = len(candidates) - 1
        if place >= len(candidates):
            continue
        takeover = Takeover(
            execution_id=session.execution_id, task=task, candidate=place, first_step=STEPS
        )
        signed = sign_takeover(session._identity, takeover)
        frame = make_message_frame(FrameKind.TAKEOVER, session.execution_id, CLIENT, 0, signed)
        sealed = seal_frame(session._identity, frame)
        session._inputs.send_all(sealed, set(session.plan.executors()))


def send_what_fails(session: Session) -> None:
    """Send inputs that disagree on their number of rows, as no client should."""
    arrays = make_arrays(make_causal_step([3], STEPS), CHUNK)
    arrays["tokens"] = np.array([3, 4], np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "check_inputs", encode_inputs)
        session.submit(arrays)


def encode_inputs(specs: Sequence[TensorSpec], arrays: dict[str, Array]) -> list[bytes]:
    """Return the bytes of every input, unchecked."""
    return [array_to_bytes(spec, arrays[spec.name]) for spec in specs]


# In small: tests/node/execution/test_takeover.py and kept/test_claims.py (nodes), and
# tests/protocol/settlement/test_given_away.py (members)
@pytest.mark.long
@pytest.mark.parametrize(
    "harm",
    [partial(give_all_away, choose=1), partial(give_all_away, choose=-1), send_what_fails],
    ids=["next", "last", "fails"],
)
async def test_s53_s60_s61_a_client_pays_for_what_it_has(
    network: Network, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Session], None]
) -> None:
    """It never ends, and nothing that it sent is in the store: nobody can go on in its place."""

    def store_nothing(self: LogWriter, task: int, port: int, entry: object) -> None:
        """Keep the inputs from those who would compute them again."""

    async with SplitUp.connect(network.config) as net:
        async with net.session(MODEL, steps=2 * STEPS, deadline_s=20) as session:
            monkeypatch.setattr(LogWriter, "append", store_nothing)
            for place in range(STEPS):
                await session.step(make_arrays(make_causal_step([place + 3], place), CHUNK))
            harm(session)
            session._ended = True  # it says nothing more
            receipt = await net.receipt(session.execution_id)
            evidence = await net.evidence(receipt)
    assert (receipt.status, receipt.steps) == ("settled", STEPS) and not receipt.slashes
    due: Counter[str] = Counter()
    for task, node in zip(session.manifest.tasks, session.plan.executors(), strict=True):
        due[node] += task.pay_micro_usdc(STEPS)
    paid = {payment.account: payment.amount_micro_usdc for payment in receipt.payments}
    assert all(paid[node] >= amount for node, amount in due.items())
    assert dict(evidence.draw.commitments).keys() >= due.keys()
    if harm is send_what_fails:
        logs = (log.read_text() for log in (network.directory / "logs").glob("node-*.log"))
        assert f"{session.execution_id} failed at task" in "".join(logs)
    locked = session.plan.request.max_price_micro_usdc
    assert receipt.refunded_micro_usdc <= locked - due.total()
