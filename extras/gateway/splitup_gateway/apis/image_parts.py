"""Images in requests: parts of a message's content that carry a file as a data URL (RFC 2397).

Other URLs are refused: the server would fetch what strangers name, with its own rights.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Final, Literal

from splitup_gateway.apis.formats import RequestFields
from splitup_gateway.errors import ApiError

MAX_IMAGES: Final = 16  # of a request
_SHOWN: Final = 40  # characters of a URL in an error

Detail = Literal["auto", "low", "high"]  # a model reads all images in one size


class TextPart(RequestFields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ImageSource(RequestFields):
    """Where an image is."""

    url: str
    detail: Detail | None = None


class ImagePart(RequestFields):
    """An image in a chat."""

    type: Literal["image_url"]
    image_url: ImageSource


Content = str | Sequence[TextPart | ImagePart]


def list_images(contents: Sequence[Content | None]) -> tuple[bytes, ...]:
    """Return the files of all images of a conversation; raise ApiError for what is no data URL."""
    parts = [part for content in contents if not isinstance(content, str) for part in content or ()]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    if len(urls) > MAX_IMAGES:
        raise ApiError(f"a request has at most {MAX_IMAGES} images", param="image_url")
    return tuple(map(_read_data_url, urls))


def join_content(content: Content) -> str | list[dict[str, Any]]:
    """Return a message's content as chat templates expect it: a text, or parts if it has images."""
    if isinstance(content, str):
        return content
    made: list[dict[str, Any]] = [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in content
    ]
    if {"type": "image"} in made:
        return made
    return "".join(part["text"] for part in made)


def _read_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        raise ApiError(
            f"'{url:.{_SHOWN}}' is no data URL, and this server fetches nothing; send the image "
            "itself, as data:image/png;base64,…",
            param="image_url",
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(f"an image is not base64: {error}", param="image_url") from None
