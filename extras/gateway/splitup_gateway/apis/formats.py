"""The form that an answer is to have: ``response_format``, or ``text.format`` of a response.

Fields and names are OpenAI's; the format "grammar" has those of the grammars of custom tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from splitup.client.text.grammar import Grammar
from splitup.core.records import LaxRecord

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
