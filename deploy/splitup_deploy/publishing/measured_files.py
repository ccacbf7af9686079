"""Files in which one command writes what it measured, and from which ``register`` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from splitup.core import limits
from splitup.core.errors import InvalidInput

M = TypeVar("M", bound=BaseModel)


def load_measured(path: Path, kind: type[M], name: str, command: str) -> M:
    """Read a file, such as a "tolerance file", that ``command`` writes. Raises InvalidInput."""
    try:
        if path.stat().st_size > limits.MAX_MANIFEST_BYTES:
            raise InvalidInput(f"'{path}' is too large for a {name}")
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot read '{path}': {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(
            f"'{path}' is no {name} ('{place}': {first['msg']}); make one with: {command}"
        ) from None
