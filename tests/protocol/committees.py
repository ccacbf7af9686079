"""Committees with fixed members, and the keys that a real key generation would give them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from splitup.crypto import dkg, quorum
from splitup.crypto.keys import Identity
from splitup.protocol.committee.certificates import CommitteeView, MemberView
from splitup.protocol.committee.key_generation import make_ceremony
from tests.builders import address

CHAIN_ID = 31337
COMMITTEE = address(0xC0)


def make_identity(number: int) -> Identity:
    return Identity.from_private_key(number.to_bytes(32, "big"))


@cache
def make_committee(size: int = 4) -> tuple[tuple[Identity, ...], CommitteeView]:
    members = sorted((make_identity(1000 + i) for i in range(size)), key=lambda m: m.address)
    return tuple(members), make_view(members)


def make_view(identities: Sequence[Identity], configuration: int = 1) -> CommitteeView:
    members = sorted(identities, key=lambda m: m.address)
    return CommitteeView(
        configuration=configuration,
        members=tuple(
            MemberView(m.address, m.signing_key_hex, f"http://127.0.0.1:{7000 + i}")
            for i, m in enumerate(members)
        ),
        quorum=quorum.compute_quorum_size(len(members)),
        group_key="",
        domain=quorum.Domain(CHAIN_ID, COMMITTEE),
    )


@cache
def make_keys(size: int = 4) -> tuple[dkg.GroupKey, tuple[bytes, ...]]:
    """A real key generation with fixed entropy."""
    members, view = make_committee(size)
    ceremony = make_ceremony(view)
    dealings = {i: dkg.make_dealing(ceremony, i, bytes([i + 1]) * 32) for i in range(size)}
    group = dkg.compute_group(ceremony, dealings)
    shares = []
    for place, identity in enumerate(members):
        opened = {
            dealer: dkg.open_and_verify_share(ceremony, dealing, place, identity)
            for dealer, dealing in dealings.items()
        }
        shares.append(dkg.compute_secret_share(ceremony, group, place, opened))
    return group, tuple(shares)
