from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core import limits
from splitup.core.codec import encode_canonical
from splitup.core.errors import BadSignature, InvalidInput, PeerFault, Refused, Unavailable
from splitup.crypto.jws import Claims, ReplayCache, sign_jws, verify_jws
from splitup.crypto.keys import Identity, generate_identity

IDENTITY = Identity.from_private_key(b"\x11" * 32)
OTHER = Identity.from_private_key(b"\x22" * 32)
NOW = 1_800_000_000
TYP = "splitup-grants+jws"


def make(now_s: int = NOW, **changes: Any) -> str:
    arguments: dict[str, Any] = {"typ": TYP, "audience": "gateway", "body": {"a": 1}}
    return sign_jws(IDENTITY, now_s=now_s, **(arguments | changes))


def check(token: str, now_s: int = NOW, **changes: Any) -> Claims:
    arguments: dict[str, Any] = {"typ": TYP, "audience": "gateway"}
    return verify_jws(token, now_s=now_s, **(arguments | changes))


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def forge(header: dict[str, Any], payload: bytes, signer: Identity = IDENTITY) -> str:
    """A token whose signature is right although its content is not."""
    signing_input = encode(encode_canonical(header)) + "." + encode(payload)
    return signing_input + "." + encode(signer.sign_raw(signing_input.encode()))


HEADER = {"alg": "EdDSA", "kid": IDENTITY.signing_key_hex, "typ": TYP}
CLAIMS = {
    "aud": "gateway",
    "body": {},
    "exp": NOW + 30,
    "iat": NOW,
    "iss": IDENTITY.signing_key_hex,
    "jti": "0" * 32,
}


def test_a_token_says_what_was_signed() -> None:
    claims = check(make(), key=IDENTITY.signing_key_hex)
    assert claims.issuer == IDENTITY.signing_key_hex
    assert claims.body == {"a": 1} and claims.expires_at_s == NOW + 30
    assert check(make()).token_id != check(make()).token_id


def test_the_signature_is_that_of_rfc_8037() -> None:
    # Appendix A.4: key, signing input and signature of the RFC's example.
    from splitup.crypto.keys import verify_raw

    key = base64.urlsafe_b64decode("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo=")
    signing_input = b"eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc"
    signature = base64.urlsafe_b64decode(
        "hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg=="
    )
    verify_raw("0x" + key.hex(), signing_input, signature)


def test_header_holds_algorithm_type_and_key() -> None:
    header = make().split(".")[0]
    assert json.loads(base64.urlsafe_b64decode(header + "==")) == HEADER


@pytest.mark.parametrize(
    "header",
    [
        HEADER | {"alg": "none"},
        HEADER | {"alg": "HS256"},
        HEADER | {"typ": "JWT"},
        HEADER | {"kid": OTHER.signing_key_hex},
        HEADER | {"jwk": {}},
        HEADER | {"crit": ["exp"]},
        {"alg": "EdDSA"},
    ],
)
def test_another_header_is_refused_although_signed(header: dict[str, Any]) -> None:
    check(forge(HEADER, encode_canonical(CLAIMS)))
    with pytest.raises(PeerFault, match="header"):
        check(forge(header, encode_canonical(CLAIMS)))


@pytest.mark.parametrize(
    "change",
    [
        {"aud": "other"},
        {"exp": NOW + limits.JWS_TTL_S + 1},
        {"exp": NOW},
        {"exp": True},
        {"body": []},
        {"jti": "x" * 32},
        {"jti": "0" * 31},
        {"extra": 1},
        {"iat": NOW + limits.CLOCK_SKEW_S + 1, "exp": NOW + limits.CLOCK_SKEW_S + 2},
        {"iat": NOW - 60 - limits.CLOCK_SKEW_S, "exp": NOW - limits.CLOCK_SKEW_S},
    ],
)
def test_bad_claims_are_refused_although_signed(change: dict[str, Any]) -> None:
    with pytest.raises(PeerFault):
        check(forge(HEADER, encode_canonical(CLAIMS | change)))


def test_a_payload_with_another_spelling_is_refused() -> None:
    with pytest.raises(PeerFault, match="canonical"):
        check(forge(HEADER, json.dumps(CLAIMS).encode()))


def test_a15_type_audience_key_and_time_are_bound() -> None:
    token = make()
    for changes in ({"typ": "splitup-other+jws"}, {"audience": "node"}):
        with pytest.raises(PeerFault):
            check(token, **changes)
    with pytest.raises(BadSignature):
        check(token, key=OTHER.signing_key_hex)
    check(token, now_s=NOW - limits.CLOCK_SKEW_S)
    check(token, now_s=NOW + 29 + limits.CLOCK_SKEW_S)
    for now_s in (NOW - limits.CLOCK_SKEW_S - 1, NOW + 30 + limits.CLOCK_SKEW_S):
        with pytest.raises(PeerFault):
            check(token, now_s=now_s)


def test_a_signature_by_another_key_is_refused() -> None:
    with pytest.raises(BadSignature):
        check(forge(HEADER, encode_canonical(CLAIMS), signer=OTHER))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_character_of_a_token_counts(data: st.DataObject) -> None:
    token = make()
    place = data.draw(st.integers(0, len(token) - 1))
    character = data.draw(
        st.characters(max_codepoint=127).filter(lambda value: value != token[place])
    )
    with pytest.raises(PeerFault):
        check(token[:place] + character + token[place + 1 :])


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_is_a_peers_fault(token: str) -> None:
    with pytest.raises(PeerFault):
        check(token)


@pytest.mark.parametrize(
    "token", ["", "..", "a.b", "a.b.c.d", "A" * (limits.MAX_JWS_BYTES + 1), "a.b." + "A" * 86]
)
def test_odd_shapes_are_a_peers_fault(token: str) -> None:
    with pytest.raises(PeerFault):
        check(token)


@pytest.mark.parametrize("ttl_s", [0, limits.JWS_TTL_S + 1])
def test_a_token_lives_a_minute_at_most(ttl_s: int) -> None:
    with pytest.raises(InvalidInput):
        make(ttl_s=ttl_s)


def test_a_token_is_used_once() -> None:
    cache = ReplayCache()
    claims = check(make())
    cache.add(claims, NOW)
    with pytest.raises(PeerFault, match="before"):
        cache.add(claims, NOW + 29 + limits.CLOCK_SKEW_S)
    cache.add(check(make()), NOW)


def test_the_cache_forgets_only_what_no_longer_verifies() -> None:
    cache = ReplayCache(max_entries=2)
    old, new = check(make()), check(make(now_s=NOW + 20), now_s=NOW + 20)
    cache.add(old, NOW)
    cache.add(new, NOW + 20)
    with pytest.raises(Unavailable):
        cache.add(check(make()), NOW + 20)
    assert len(cache) == 2
    cache.add(check(make(now_s=NOW + 60), now_s=NOW + 60), NOW + 30 + limits.CLOCK_SKEW_S)
    assert len(cache) == 2  # `old` is gone, and would be refused as expired


def make_of(identity: Identity) -> Claims:
    token = sign_jws(identity, typ=TYP, audience="gateway", body={}, now_s=NOW)
    return verify_jws(token, typ=TYP, audience="gateway", now_s=NOW)


def test_a_token_whose_key_is_not_authorised_is_not_remembered() -> None:
    cache = ReplayCache(max_entries=2)
    claims = make_of(generate_identity())
    with pytest.raises(Refused), cache.once(claims, NOW):
        with pytest.raises(PeerFault, match="before"), cache.once(claims, NOW):
            pass  # it is used once at a time all the same
        raise Refused("a stranger", status=403)
    assert len(cache) == 0
    with cache.once(claims, NOW):
        pass
    assert len(cache) == 1


def test_s11_a_full_cache_refuses_the_key_that_filled_it() -> None:
    cache, greedy, modest = ReplayCache(max_entries=10), generate_identity(), generate_identity()
    used = [make_of(greedy) for _ in range(10)]
    for claims in used:
        cache.add(claims, NOW)
    for _ in range(4):
        cache.add(make_of(modest), NOW)
    assert len(cache) == 5  # the greedy key has one entry, for all its tokens
    for claims in (used[0], make_of(greedy)):
        with pytest.raises((PeerFault, Unavailable)):
            cache.add(claims, NOW)
    later = NOW + 31 + limits.CLOCK_SKEW_S  # all tokens have expired
    token = sign_jws(greedy, typ=TYP, audience="gateway", body={}, now_s=later)
    cache.add(verify_jws(token, typ=TYP, audience="gateway", now_s=later), later)
    assert len(cache) == 1


def test_stray_bits_do_not_make_a_second_spelling() -> None:
    token = make()
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet.index(token[-1])
    assert last % 16 == 0  # 64 bytes leave four unused bits in the last character
    with pytest.raises(PeerFault, match="stray bits"):
        check(token[:-1] + alphabet[last + 1])


def test_a_truth_value_is_no_time() -> None:
    claims = CLAIMS | {"iat": True, "exp": 30}
    with pytest.raises(PeerFault, match="'iat' has the wrong type"):
        check(forge(HEADER, encode_canonical(claims)), now_s=1)
