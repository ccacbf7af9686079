from __future__ import annotations

import hashlib

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
