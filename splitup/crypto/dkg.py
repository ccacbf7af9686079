"""Distributed generation of the committee's BLS key (joint Feldman), as pure functions.

    every member: make_dealing ──► bulletin board ◄── everybody reads the same list
    every member: open_and_verify_share of each; make_complaint where it fails ──► board
    everybody:    dealers without a valid complaint qualify; compute_group, compute_secret_share

All members agree because they read one board (the chain, or a set that the chain has fixed) and
because ``is_complaint_valid`` judges a complaint from public bytes alone. The board must record who
posted what: dealings and complaints carry no signature of their own.

*Resharing* moves the same secret to other members: the dealers are the members before, each deals
its own share (so a dealing's first commitment must be that member's public key), and the new
polynomial is interpolated from the first t qualified dealings. The group key stays the same; old
shares cannot be combined with new ones.

A dealer who waits for the others' commitments can bias some bits of the group key (Gennaro et al.
2007). That does not weaken BLS signatures (Bacho–Loss 2022), the only use of the key.

Source: Pedersen 1991; Gennaro, Jarecki, Krawczyk, Rabin 2007, section 4; for resharing Desmedt,
Jajodia 1997, with Feldman commitments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from py_arkworks_bls12381 import G2Point, Scalar

from splitup.core import limits
from splitup.core.codec import compute_digest, decode_canonical, encode_canonical
from splitup.core.errors import InvalidInput, PeerFault
from splitup.crypto import bls
from splitup.crypto.keys import Identity, check_public_key, derive_key
from splitup.crypto.sealed_message import (
    OPENING_BYTES,
    OVERHEAD_BYTES,
    Opening,
    compute_ephemeral,
    open_sealed,
    open_with_point,
    prove_opening,
    seal,
    verify_opening,
)

ENTROPY_BYTES: Final = 32
_BYTES32: Final = re.compile(r"0x[0-9a-f]{64}\Z")
_SEALED: Final = re.compile(rf"0x[0-9a-f]{{{2 * (bls.SCALAR_BYTES + OVERHEAD_BYTES)}}}\Z")
_OPENING: Final = re.compile(rf"0x[0-9a-f]{{{2 * OPENING_BYTES}}}\Z")
_MAX_BYTES: Final = limits.MAX_COMMITTEE * limits.KIB


@dataclass(frozen=True)
class Ceremony:
    """One run: its id (bytes32) and the members' signing keys; indices are places in this list.

    With ``previous`` it is a resharing: the dealers are the holders of that key, by their index.
    """

    ceremony_id: str
    members: tuple[str, ...]
    previous: GroupKey | None = None

    def __post_init__(self) -> None:
        if not _BYTES32.match(self.ceremony_id):
            raise InvalidInput("a ceremony's id is '0x' and 64 lower-case hexadecimal digits")
        bls.compute_threshold(len(self.members))
        if len(set(self.members)) != len(self.members):
            raise InvalidInput("a ceremony lists one member twice")
        for member in self.members:
            check_public_key(member)

    @cached_property
    def threshold(self) -> int:
        """t = 2f+1 shares can sign; 2f of them reveal nothing."""
        return bls.compute_threshold(len(self.members))

    @property
    def dealer_count(self) -> int:
        return len(self.previous.member_keys) if self.previous else len(self.members)

    @property
    def dealings_needed(self) -> int:
        """The number of qualified dealings that make a key: the threshold of the dealers."""
        return self.previous.threshold if self.previous else self.threshold

    @cached_property
    def digest(self) -> bytes:
        """Binds derived secrets and sealed texts to the id, the members and the previous key."""
        value: dict[str, Any] = {"id": self.ceremony_id, "members": list(self.members)}
        if self.previous:
            value["previous"] = list(self.previous.member_keys)
        return bytes.fromhex(compute_digest(encode_canonical(value)))


@dataclass(frozen=True, slots=True)
class Dealing:
    """What one dealer posts: t commitments (G2), an ephemeral key, one sealed share per member."""

    ceremony_id: str
    dealer: int
    commitments: tuple[str, ...]
    ephemeral: str
    sealed: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        return encode_canonical(
            {
                "ceremony_id": self.ceremony_id,
                "commitments": list(self.commitments),
                "dealer": self.dealer,
                "ephemeral": self.ephemeral,
                "sealed": list(self.sealed),
            }
        )

    @staticmethod
    def from_bytes(data: bytes, ceremony: Ceremony) -> Dealing:
        """Parse and check everything that needs no secret; raise PeerFault.

        Every commitment is a point of the prime-order subgroup and not the identity. An honest
        dealer's coefficient is zero with probability 2^-255.
        """
        names = {"ceremony_id", "commitments", "dealer", "ephemeral", "sealed"}
        value = _parse_object(data, names, "dealing")
        dealing = Dealing(
            ceremony_id=_check_id(value["ceremony_id"], ceremony),
            dealer=_check_index(value["dealer"], ceremony.dealer_count),
            commitments=_check_strings(value["commitments"], ceremony.threshold, "commitments"),
            ephemeral=_check_strings([value["ephemeral"]], 1, "ephemeral key")[0],
            sealed=_check_strings(value["sealed"], len(ceremony.members), "sealed shares"),
        )
        if not all(_SEALED.match(share) for share in dealing.sealed):
            raise PeerFault("a dealing holds a sealed share of the wrong length or spelling")
        check_public_key(dealing.ephemeral)
        for commitment in dealing.commitments:
            bls.parse_public_key(commitment)
        previous = ceremony.previous
        if previous and dealing.commitments[0] != previous.member_keys[dealing.dealer]:
            raise PeerFault(f"dealer {dealing.dealer} does not deal its own share")
        return dealing


@dataclass(frozen=True, slots=True)
class Complaint:
    """Evidence by ``member`` that its share from ``dealer`` is bad; reveals that share alone."""

    ceremony_id: str
    dealer: int
    member: int
    opening: Opening

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        return encode_canonical(
            {
                "ceremony_id": self.ceremony_id,
                "dealer": self.dealer,
                "member": self.member,
                "opening": "0x" + self.opening.to_bytes().hex(),
            }
        )

    @staticmethod
    def from_bytes(data: bytes, ceremony: Ceremony) -> Complaint:
        """Parse; raise PeerFault. ``is_complaint_valid`` decides whether it is true."""
        value = _parse_object(data, {"ceremony_id", "dealer", "member", "opening"}, "complaint")
        opening = value["opening"]
        if not isinstance(opening, str) or not _OPENING.match(opening):
            raise PeerFault("a complaint's opening has the wrong length or spelling")
        return Complaint(
            ceremony_id=_check_id(value["ceremony_id"], ceremony),
            dealer=_check_index(value["dealer"], ceremony.dealer_count),
            member=_check_index(value["member"], len(ceremony.members)),
            opening=Opening.from_bytes(bytes.fromhex(opening[2:])),
        )


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The result, the same for all: the group's key and every member's, by index."""

    ceremony_id: str
    threshold: int
    public_key: str
    member_keys: tuple[str, ...]
    qualified: tuple[int, ...]


def make_dealing(ceremony: Ceremony, dealer: int, entropy: bytes) -> Dealing:
    """Deal shares of a secret polynomial of degree t−1.

    ``entropy``: 32 secret random bytes, kept by the caller before anything is sent, so that a
    restart posts the same dealing. Equal arguments give equal bytes.
    """
    return _deal(ceremony, dealer, entropy, None)


def make_resharing(ceremony: Ceremony, dealer: int, share: bytes, entropy: bytes) -> Dealing:
    """Deal our ``share`` of the previous key (32 bytes) to the ceremony's members.

    ``dealer`` is our index among the previous members; ``entropy`` as in ``make_dealing``. Raises
    InvalidInput when the share is not the one that the previous key gives this dealer.
    """
    previous = ceremony.previous
    if previous is None or bls.compute_public_key(share) != previous.member_keys[dealer]:
        raise InvalidInput(f"this is not the share that the previous key gives member {dealer}")
    return _deal(ceremony, dealer, entropy, int.from_bytes(share))


def _deal(ceremony: Ceremony, dealer: int, entropy: bytes, constant: int | None) -> Dealing:
    _check_index(dealer, ceremony.dealer_count)
    if len(entropy) != ENTROPY_BYTES:
        raise InvalidInput(f"a dealing needs {ENTROPY_BYTES} bytes of entropy, not {len(entropy)}")
    binding = ceremony.digest + bytes([dealer])
    coefficients = [
        _derive_scalar(entropy, b"splitup/dkg/coefficient/v1" + binding + bytes([degree]))
        for degree in range(ceremony.threshold)
    ]
    if constant is not None:
        coefficients[0] = constant
    scalar, ephemeral = compute_ephemeral(
        derive_key(entropy, b"splitup/dkg/ephemeral/v1" + binding, 64)
    )
    sealed = tuple(
        "0x" + seal(scalar, ephemeral, key, binding, _evaluate(coefficients, member)).hex()
        for member, key in enumerate(ceremony.members)
    )
    commitments = tuple(
        bls.compute_public_key(value.to_bytes(bls.SCALAR_BYTES)) for value in coefficients
    )
    return Dealing(ceremony.ceremony_id, dealer, commitments, ephemeral, sealed)


def open_and_verify_share(
    ceremony: Ceremony, dealing: Dealing, member: int, identity: Identity
) -> bytes:
    """Return our 32-byte share of a dealing; raise PeerFault when a complaint is due."""
    _check_own(ceremony, member, identity)
    binding = ceremony.digest + bytes([dealing.dealer])
    share = open_sealed(identity, dealing.ephemeral, binding, _sealed_for(dealing, member))
    _check_share(dealing, member, share)
    return share


def make_complaint(
    ceremony: Ceremony, dealing: Dealing, member: int, identity: Identity
) -> Complaint:
    """Return public evidence against a dealing whose share did not open or verify."""
    _check_own(ceremony, member, identity)
    binding = ceremony.digest + bytes([dealing.dealer])
    opening = prove_opening(identity, dealing.ephemeral, binding)
    return Complaint(ceremony.ceremony_id, dealing.dealer, member, opening)


def is_complaint_valid(ceremony: Ceremony, dealing: Dealing, complaint: Complaint) -> bool:
    """Judge a complaint from public bytes: True means a faulty dealer, False a false complaint."""
    if complaint.dealer != dealing.dealer or complaint.ceremony_id != dealing.ceremony_id:
        return False
    binding = ceremony.digest + bytes([dealing.dealer])
    receiver = ceremony.members[complaint.member]
    try:
        verify_opening(complaint.opening, dealing.ephemeral, receiver, binding)
    except PeerFault:
        return False
    try:
        share = open_with_point(
            complaint.opening.point,
            dealing.ephemeral,
            receiver,
            binding,
            _sealed_for(dealing, complaint.member),
        )
        _check_share(dealing, complaint.member, share)
    except PeerFault:
        return True
    return False


def compute_group(ceremony: Ceremony, dealings: Mapping[int, Dealing]) -> GroupKey:
    """Sum the qualified dealings (by dealer). Raises InvalidInput with fewer than t of them.

    With t = 2f+1 at least f+1 are honest, so no f members know the secret. A resharing weighs the
    first t dealings so that they add up to the old secret; the others are not needed.
    """
    needed = ceremony.dealings_needed
    if len(dealings) < needed:
        raise InvalidInput(
            f"key generation needs {needed} qualified dealers, there are "
            f"{len(dealings)}; start it again with more members reachable"
        )
    if ceremony.previous:
        dealings = {dealer: dealings[dealer] for dealer in sorted(dealings)[:needed]}
    weights = _compute_weights(ceremony, sorted(dealings))
    totals = [G2Point.identity() for _ in range(ceremony.threshold)]
    for dealer, weight in weights.items():
        dealing = dealings[dealer]
        if dealing.dealer != dealer or dealing.ceremony_id != ceremony.ceremony_id:
            raise InvalidInput(f"the dealing listed for member {dealer} is another one")
        for degree, commitment in enumerate(dealing.commitments):
            point = bls.parse_public_key(commitment)
            totals[degree] = totals[degree] + (point if weight is None else point * weight)
    member_keys = tuple(
        bls.encode_point(_evaluate_in_exponent(totals, member))
        for member in range(len(ceremony.members))
    )
    group = GroupKey(
        ceremony_id=ceremony.ceremony_id,
        threshold=ceremony.threshold,
        public_key=bls.encode_point(totals[0]),
        member_keys=member_keys,
        qualified=tuple(sorted(dealings)),
    )
    for key in (group.public_key, *group.member_keys):
        bls.parse_public_key(key)  # a sum may be the identity although no term is
    if ceremony.previous and group.public_key != ceremony.previous.public_key:
        raise InvalidInput("the dealings do not add up to the previous group key")
    return group


def compute_secret_share(
    ceremony: Ceremony, group: GroupKey, member: int, shares: Mapping[int, bytes]
) -> bytes:
    """Return our 32-byte share of the group's secret from those of all qualified dealers."""
    if tuple(sorted(shares)) != group.qualified:
        raise InvalidInput("the shares are not exactly those of the group's qualified dealers")
    total = 0
    for dealer, weight in _compute_weights(ceremony, group.qualified).items():
        factor = 1 if weight is None else int.from_bytes(weight.to_be_bytes())
        total = (total + int.from_bytes(shares[dealer]) * factor) % bls.GROUP_ORDER
    secret = total.to_bytes(bls.SCALAR_BYTES)
    if bls.compute_public_key(secret) != group.member_keys[member]:
        raise InvalidInput(f"the shares do not add up to the key of member {member}")
    return secret


def _compute_weights(ceremony: Ceremony, dealers: Sequence[int]) -> dict[int, Any]:
    """Return the weight of each dealing: None for one, or its Lagrange coefficient at zero."""
    if ceremony.previous is None:
        return dict.fromkeys(dealers)
    coefficients = bls.compute_lagrange([dealer + 1 for dealer in dealers], 0)
    return dict(zip(dealers, coefficients, strict=True))


def _check_own(ceremony: Ceremony, member: int, identity: Identity) -> None:
    _check_index(member, len(ceremony.members))
    if ceremony.members[member] != identity.signing_key_hex:
        raise InvalidInput(f"member {member} of the ceremony has another signing key than ours")


def _check_share(dealing: Dealing, member: int, share: bytes) -> None:
    points = [bls.parse_public_key(commitment) for commitment in dealing.commitments]
    try:
        key = bls.compute_public_key(share)
    except InvalidInput:
        raise PeerFault(f"dealer {dealing.dealer} sealed a share that is no scalar") from None
    if key != bls.encode_point(_evaluate_in_exponent(points, member)):
        raise PeerFault(f"dealer {dealing.dealer} sealed a share that contradicts its commitments")


def _sealed_for(dealing: Dealing, member: int) -> bytes:
    return bytes.fromhex(dealing.sealed[member][2:])


def _derive_scalar(entropy: bytes, info: bytes) -> int:
    # 64 bytes reduced modulo a 255-bit order: the bias is below 2^-256.
    return int.from_bytes(derive_key(entropy, info, 64)) % bls.GROUP_ORDER


def _evaluate(coefficients: list[int], member: int) -> bytes:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * (member + 1) + coefficient) % bls.GROUP_ORDER
    return value.to_bytes(bls.SCALAR_BYTES)


def _evaluate_in_exponent(points: list[Any], member: int) -> Any:
    x = Scalar(member + 1)
    value = G2Point.identity()
    for point in reversed(points):
        value = value * x + point
    return value


def _parse_object(data: bytes, names: set[str], what: str) -> dict[str, Any]:
    try:
        value = decode_canonical(data, max_bytes=_MAX_BYTES)
    except InvalidInput as error:
        raise PeerFault(f"a {what} is malformed: {error}", evidence=data[:_MAX_BYTES]) from None
    if not isinstance(value, dict) or value.keys() != names:
        raise PeerFault(f"a {what} does not hold exactly {', '.join(sorted(names))}")
    return value


def _check_id(value: Any, ceremony: Ceremony) -> str:
    if value != ceremony.ceremony_id:
        raise PeerFault("a message belongs to another key generation")
    return ceremony.ceremony_id


def _check_index(value: Any, count: int) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise PeerFault(f"a member's index is 0 to {count - 1}")
    return value


def _check_strings(value: Any, count: int, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) != count:
        raise PeerFault(f"a message must hold {count} {what}")
    if not all(isinstance(item, str) for item in value):
        raise PeerFault(f"a message's {what} must be strings")
    return tuple(value)
