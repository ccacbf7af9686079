from __future__ import annotations

import hashlib

from splitup.core import limits
from splitup.core.tensors import NO_STEPS, StepsDigest, extend_steps


def test_steps_are_committed_to_by_their_digests_and_where_they_end() -> None:
    whole, parts = StepsDigest(), StepsDigest()
    whole.add_tensor(b"ab")
    parts.add_tensor(b"a")
    parts.add_tensor(b"b")
    assert whole.hexdigest() != parts.hexdigest()
    known = StepsDigest()
    known.add(hashlib.sha256(b"ab").digest())
    assert known.hexdigest() == whole.hexdigest()
    one = hashlib.sha256(bytes(32) + hashlib.sha256(b"ab").digest())
    assert whole.value == extend_steps(NO_STEPS, hashlib.sha256(b"ab").digest()) == one.digest()


def test_the_last_digests_are_kept_and_of_earlier_ones_every_sixteenth() -> None:
    digest, values = StepsDigest(), [NO_STEPS.hex()]
    for step in range(200):
        digest.add_tensor(bytes([step]))
        values.append(digest.hexdigest())
    kept = {steps for steps in range(201) if digest.find(steps) is not None}
    assert kept == {*range(200 - limits.UNPAID_STEPS, 201), *range(16, 201, limits.INTERIM_STEPS)}
    assert all(digest.find(steps) == values[steps] for steps in kept)
    digest.forget(150)
    assert min(steps for steps in range(1, 201) if digest.find(steps)) == 150
