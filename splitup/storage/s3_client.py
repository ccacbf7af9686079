"""A boto3 client of an S3 server, and the file of its credentials.

SigV4 with path addressing; boto3 would otherwise fall back to SigV2, which signs no headers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.errors import ConfigurationError
from splitup.crypto.keystore import read_secret_file

REGION: Final = "us-east-1"  # part of the signature; servers other than AWS ignore its meaning
_CREDENTIAL: Final = re.compile(r"[\x21-\x7e]{1,128}\Z")


def create_client(endpoint_url: str, credentials_path: Path) -> Any:
    """Return a boto3 S3 client; see ``read_settings`` for the credentials file."""
    import boto3  # at use: the address and the keys of a store are read by programs without one
    from botocore.config import Config

    access_key, secret_key = read_settings(endpoint_url, credentials_path)
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=REGION,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",  # otherwise boto3 signs a CRC32, too
            response_checksum_validation="when_required",
            connect_timeout=5,
            read_timeout=10,
            retries={"max_attempts": 2, "mode": "standard"},
        ),
    )


def read_settings(endpoint_url: str, path: Path) -> tuple[str, str]:
    """Check the endpoint and return access key and secret key.

    The credentials file is JSON with access_key and secret_key, readable by its owner only (0600).
    Raises ConfigurationError.
    """
    if urlsplit(endpoint_url).scheme not in ("http", "https"):
        raise ConfigurationError("the S3 endpoint must start with http:// or https://")
    data = read_secret_file(path, what="S3 credentials file", max_bytes=4 * limits.KIB)
    try:
        value = parse_json(data)
        access_key, secret_key = value["access_key"], value["secret_key"]
        if len(value) != 2 or not all(_CREDENTIAL.match(item) for item in value.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigurationError(
            f"the S3 credentials file {path} must hold one JSON object with the strings "
            "access_key and secret_key"
        ) from None
    return access_key, secret_key
