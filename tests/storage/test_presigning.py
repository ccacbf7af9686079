from __future__ import annotations

import datetime
import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import botocore.auth
import pytest
from hypothesis import given
from hypothesis import strategies as st
from splitup_oracle.gateway.access import Right
from splitup_oracle.gateway.presigning import Presigner, check_object_key

from splitup.core import limits
from splitup.core.errors import ConfigurationError, InvalidInput
from splitup.crypto.keystore import write_secret_file
from splitup.storage.s3_client import create_client


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    path = tmp_path / "s3.json"
    pair = {"access_key": "AKEXAMPLE", "secret_key": "not-in-any-url"}
    write_secret_file(path, json.dumps(pair).encode(), what="file")
    return path


@pytest.fixture
def offline(credentials: Path) -> Presigner:
    return Presigner.open("http://127.0.0.1:9", "bucket", credentials)


def test_a11_urls_are_sigv4_with_path_addressing(offline: Presigner) -> None:
    put = offline.presign(Right("PUT", "e/1/x", 7, "0" * 64))
    parts, query = urlsplit(put.url), parse_qs(urlsplit(put.url).query)
    assert parts.netloc == "127.0.0.1:9" and parts.path == "/bucket/e/1/x"
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"] and query["X-Amz-Expires"] == ["900"]
    signed = set(query["X-Amz-SignedHeaders"][0].split(";"))
    assert signed == {"host", *(name.lower() for name in put.headers)}
    assert put.headers["Content-Length"] == "7" and put.headers["If-None-Match"] == "*"
    assert "not-in-any-url" not in put.url
    get = offline.presign(Right("GET", "e/1/x", None))
    assert parse_qs(urlsplit(get.url).query)["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    assert get.method == "GET" and get.headers == {}


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "https://s3.example/under/"])
@pytest.mark.parametrize("key", ["e/0xab/t1.0/2", "a b/c+d~é=&?#%41*'", "models/" + "x" * 200])
def test_urls_are_those_that_boto3_gives(
    credentials: Path, key: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: at)
    client, signer = (
        create_client(endpoint, credentials),
        Presigner.open(endpoint, "b", credentials),
    )
    where = {"Bucket": "b", "Key": key}
    get = signer.presign(Right("GET", key, None), expires_s=60)
    assert get.url == client.generate_presigned_url("get_object", Params=where, ExpiresIn=60)
    put = signer.presign(Right("PUT", key, 7, "0" * 64))
    checksum = put.headers["x-amz-checksum-sha256"]
    what = where | {"ContentLength": 7, "IfNoneMatch": "*", "ChecksumSHA256": checksum}
    assert put.url == client.generate_presigned_url("put_object", Params=what, ExpiresIn=900)


@pytest.mark.parametrize("expires_s", [0, -1, limits.PRESIGN_EXPIRY_S + 1, 7 * 24 * 3600])
def test_a11_long_and_empty_lives_are_refused(offline: Presigner, expires_s: int) -> None:
    with pytest.raises(InvalidInput, match="lives"):
        offline.presign(Right("GET", "k", None), expires_s=expires_s)
    with pytest.raises(InvalidInput, match="lives"):
        offline.presign(Right("PUT", "k", 1), expires_s=expires_s)


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "../a",
    "a/../b",
    "a/..",
    "./a",
    "a/.",
    "a\nb",
    "a\x00b",
    "a\x7fb",
    "a\u2028b",
    "a\u202eb",
    "a\\..\\b",
    "\ud800",
    "a" * (limits.OBJECT_KEY_BYTES + 1),
    "é" * (limits.OBJECT_KEY_BYTES // 2 + 1),
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a11_bad_keys_are_refused(offline: Presigner, key: str) -> None:
    with pytest.raises(InvalidInput):
        offline.presign(Right("GET", key, None))
    with pytest.raises(InvalidInput):
        offline.presign(Right("PUT", key, 1))


@given(st.lists(st.sampled_from(["a", ".", "..", "", "b.c", "\t"]), min_size=1, max_size=5))
def test_a11_a_key_is_good_when_all_its_segments_are(segments: list[str]) -> None:
    key = "/".join(segments)
    if set(segments) <= {"a", "b.c"}:
        assert check_object_key(key) == key
    else:
        with pytest.raises(InvalidInput):
            check_object_key(key)


@pytest.mark.parametrize("length_bytes", [-1, limits.MAX_UPLOAD_BYTES + 1])
def test_odd_lengths_and_digests_are_refused(offline: Presigner, length_bytes: int) -> None:
    with pytest.raises(InvalidInput):
        offline.presign(Right("PUT", "k", length_bytes))
    with pytest.raises(InvalidInput):
        offline.presign(Right("PUT", "k", 1, "0" * 63))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"access_key":"a"}',
        b'{"access_key":"a","secret_key":""}',
        b'{"access_key":"a","secret_key":1}',
        b'{"access_key":"a","secret_key":"b","c":"d"}',
    ],
)
def test_bad_credentials_are_one_sentence(tmp_path: Path, content: bytes) -> None:
    write_secret_file(tmp_path / "c", content, what="file")
    with pytest.raises(ConfigurationError, match="access_key and secret_key"):
        Presigner.open("http://127.0.0.1:9", "bucket", tmp_path / "c")


def test_a12_readable_credentials_are_refused(credentials: Path) -> None:
    credentials.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        Presigner.open("http://127.0.0.1:9", "bucket", credentials)


def test_an_endpoint_without_scheme_is_refused(credentials: Path) -> None:
    with pytest.raises(ConfigurationError, match="http://"):
        Presigner.open("localhost:1", "bucket", credentials)


def test_a12_a_grant_does_not_print_its_url(offline: Presigner) -> None:
    grant = offline.presign(Right("GET", "k", None))
    assert "Signature" in grant.url and "Signature" not in repr(grant) + str(grant)
