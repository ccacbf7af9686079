from __future__ import annotations

import hashlib

from splitup.core.tensors import StepsDigest


def test_steps_are_committed_to_by_their_digests_and_where_they_end() -> None:
    whole, parts = StepsDigest(), StepsDigest()
    whole.add_tensor(b"ab")
    parts.add_tensor(b"a")
    parts.add_tensor(b"b")
    assert whole.hexdigest() != parts.hexdigest()
    known = StepsDigest()
    known.add(hashlib.sha256(b"ab").digest())
    assert known.hexdigest() == whole.hexdigest()
    assert StepsDigest().hexdigest() == hashlib.sha256().hexdigest()
