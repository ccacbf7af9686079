"""What requests of several APIs share: the form that the answer is to have, texts and images.

Fields and names are OpenAI's; the format "grammar" has those of the grammars of custom tools. An
image is a file as a data URL (RFC 2397). Other URLs are refused: the server would fetch what
strangers name, with its own rights.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from splitup.client.text.grammar import Grammar
from splitup.core.records import LaxRecord
from splitup_gateway.errors import ApiError

MAX_IMAGES: Final = 16  # of a request
_SHOWN: Final = 40  # characters of a URL in an error

Detail = Literal["auto", "low", "high"]  # a model reads all images in one size
# a line break and its indentation at most: a model could go on with white space for ever
_WHITESPACE: Final = r" |\n {0,32}"


TokenId = Annotated[int, Field(strict=True)]  # True is none


class RequestFields(LaxRecord):
    """A part of a request: a field that is not listed is an error.

    ``harmless`` are names of fields that would change nothing here: they are left out unread.
    """

    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    @model_validator(mode="before")
    @classmethod
    def _leave_out_harmless(cls, value: Any) -> Any:
        if type(value) is not dict or cls.harmless.isdisjoint(value):
            return value
        return {name: each for name, each in value.items() if name not in cls.harmless}


class TextFormat(RequestFields):
    """Any text."""

    type: Literal["text"]

    def make_grammar(self) -> None:
        """Return None: every text will do."""


class JsonObjectFormat(RequestFields):
    """Any JSON object."""

    type: Literal["json_object"]

    def make_grammar(self) -> Grammar:
        """Return the grammar of all JSON objects."""
        return make_schema_grammar({"type": "object"}, strict=True)


class GrammarFormat(RequestFields):
    """A text of a language: a grammar in Lark's syntax, or a regular expression."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]

    def make_grammar(self) -> Grammar:
        """Return the grammar as it is."""
        return Grammar(self.syntax, self.definition)


class NamedSchema(RequestFields):
    """A JSON schema. Unless it is strict, keywords that are not supported are passed over."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def make_grammar(self) -> Grammar:
        """Return the grammar of the schema's values."""
        schema = {"type": "object"} if self.schema_ is None else self.schema_
        return make_schema_grammar(schema, strict=bool(self.strict))


class JsonSchemaFormat(RequestFields):
    """JSON by a schema, as chats name it."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def make_grammar(self) -> Grammar:
        """Return the grammar of the schema's values."""
        return self.json_schema.make_grammar()


class FlatJsonSchemaFormat(NamedSchema):
    """JSON by a schema, as responses name it."""

    type: Literal["json_schema"]


AnswerFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | GrammarFormat, Field(discriminator="type")
]
FlatAnswerFormat = Annotated[
    TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | GrammarFormat,
    Field(discriminator="type"),
]


def make_schema_grammar(schema: Mapping[str, Any], *, strict: bool) -> Grammar:
    """Return the grammar of a schema's values."""
    return Grammar("json_schema", write_schema(schema, strict=strict))


def write_schema(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Return a schema as llguidance reads it."""
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
    return json.dumps({**schema, "x-guidance": options})


# ---- parts of messages -------------------------------------------------------------------------


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
