"""Makes presigned URLs: one key, one method, one length, one hour at most.

SigV4 with path addressing only. A PUT's signature covers the exact length, the checksum if it is
known, and ``If-None-Match: *``, so that an object is written once.
"""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from splitup.core import limits
from splitup.core.errors import InvalidInput
from splitup.messages.storage import Grant
from splitup.storage.s3_client import REGION, read_settings
from splitup_oracle.gateway.access import Right

_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")


class Presigner:
    """Issues grants for one bucket, without sending a request.

    It uses botocore's signer directly: boto3's client gives the same URL in three times the time.
    """

    def __init__(self, endpoint_url: str, bucket: str, credentials: Credentials) -> None:
        self._base_url = f"{endpoint_url.rstrip('/')}/{bucket}/"
        self._credentials = credentials

    @staticmethod
    def open(endpoint_url: str, bucket: str, credentials_path: Path) -> Presigner:
        """Read the credentials and return a presigner; raise ConfigurationError."""
        keys = read_settings(endpoint_url, credentials_path)
        return Presigner(endpoint_url, bucket, Credentials(*keys))

    def presign(self, right: Right, *, expires_s: int = 900) -> Grant:
        """Grant a right: to read an object, or to write one of exactly its length, once."""
        method, key, length_bytes, headers = right.method, right.key, right.length_bytes, {}
        if method == "PUT":
            if length_bytes is None or not 0 <= length_bytes <= limits.MAX_UPLOAD_BYTES:
                raise InvalidInput(
                    f"an object has at most {limits.MAX_UPLOAD_BYTES} bytes, not {length_bytes}"
                )
            headers = {"Content-Length": str(length_bytes), "If-None-Match": "*"}
            if right.sha256 is not None:
                if not _DIGEST.match(right.sha256):
                    raise InvalidInput("an object's digest is 64 lower-case hexadecimal digits")
                digest = base64.b64encode(bytes.fromhex(right.sha256)).decode()
                headers["x-amz-checksum-sha256"] = digest
        check_object_key(key)
        if not 1 <= expires_s <= limits.PRESIGN_EXPIRY_S:
            raise InvalidInput(
                f"a presigned URL lives 1 to {limits.PRESIGN_EXPIRY_S} s, not {expires_s}"
            )
        # computed before signing, so that the URL itself does not expire earlier
        expires_at_s = int(time.time()) + expires_s
        url = self._base_url + quote(key, safe="/~")
        request = AWSRequest(method, url, headers)
        S3SigV4QueryAuth(self._credentials, "s3", REGION, expires=expires_s).add_auth(request)
        return Grant(
            method=method,
            key=key,
            url=request.url,
            headers=headers,
            length_bytes=length_bytes,
            expires_at_s=expires_at_s,
        )


def check_object_key(key: str) -> str:
    """Return a key that all S3 servers and proxies interpret alike, or raise InvalidInput.

    Refused: more than 512 bytes, "", "." and ".." as a segment (so also a slash at either end),
    backslashes, control characters, and text that is not UTF-8.
    """
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise InvalidInput("an object key must be UTF-8") from None
    if len(encoded) > limits.OBJECT_KEY_BYTES:
        raise InvalidInput(f"an object key is longer than {limits.OBJECT_KEY_BYTES} bytes")
    if any(not character.isprintable() or character == "\\" for character in key):
        raise InvalidInput("an object key holds a control character or a backslash")
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidInput(f"the object key {key!r} has the segment {segment!r}")
    return key
