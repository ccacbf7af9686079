"""Objects that are made of what strangers send: the first error ends the work, whatever follows.

pydantic collects an error for every bad entry of a list and every unknown key, and who asks for the
first one has paid for all: 1.6 s and 300 MB for 400 KiB of wrong entries. So in a record the checks
of lists, tuples, sets and dicts stop at their first error, and of all unknown keys one is reported:
the errors of an object are at most as many as the fields of its class and of those within it.
"""

from __future__ import annotations

import functools
from typing import Any, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from splitup.core.errors import InvalidInput

_SEQUENCES = ("tuple", "set", "frozenset")  # for which JSON has lists


def _stop_early(schema: Any) -> None:
    """Let all collections in a schema of pydantic stop at their first error."""
    if isinstance(schema, list):
        for part in schema:
            _stop_early(part)
    if not isinstance(schema, dict):
        return
    if (kind := schema.get("type")) in ("list", "dict", *_SEQUENCES):
        schema["fail_fast"] = True
        if kind in _SEQUENCES:
            schema["strict"] = False
    for name, part in schema.items():
        if name not in ("default", "metadata"):
            _stop_early(part)


class LaxRecord(BaseModel):
    """Base of objects whose fields may be given in another type, such as 1 for 1.0."""

    # a class is built when the first object is: no program uses all messages
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Leave out all unknown keys but the first, which is the error that pydantic finds."""
        if type(value) is not dict or value.keys() <= (known := _find_names(cls)):
            return value
        kept = {name: value[name] for name in known if name in value}
        unknown = next(name for name in value if name not in known)
        return {**kept, unknown: value[unknown]}


class Record(LaxRecord):
    """Base of objects of strict types; only a list may stand for a tuple, as it has to in JSON."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def read(cls, value: Any) -> Self:
        """Return the object of a decoded JSON value; raise InvalidInput that names a field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            place, problem = find_error(error)
            raise InvalidInput(f"{cls.__name__}.{place} is invalid: {problem}") from None


def find_error(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first field at fault, and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(str(part) for part in first["loc"]) or "(root)", first["msg"]


@functools.cache
def _find_names(kind: type[BaseModel]) -> frozenset[str]:
    names: set[str] = set()
    for name, info in kind.model_fields.items():
        match info.validation_alias:
            case AliasChoices(choices=choices):
                names.update(str(choice) for choice in choices)
            case alias:
                names.add(alias if isinstance(alias, str) else name)
    return frozenset(names)
