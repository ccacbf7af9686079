"""Errors as clients of the OpenAI API read them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from splitup.core.errors import (
    ChainRejected,
    ChainUnavailable,
    ExecutionFailed,
    InvalidInput,
    InvalidModel,
    PeerFault,
    Refused,
    SplitUpError,
    StorageUnavailable,
    Throttled,
)

_log = logging.getLogger("splitup.serve")


class ApiError(SplitUpError):
    """An error in OpenAI's form; ``param`` names the field at fault, if one is."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def describe(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


@contextlib.contextmanager
def name_field(param: str, code: str | None = None, lead: str = "") -> Iterator[None]:
    """Raise InvalidInput as an ApiError that names the field at fault, after words that lead in."""
    try:
        yield
    except InvalidModel:
        raise  # no field's fault
    except InvalidInput as error:
        raise ApiError(f"{lead}{error}", param=param, code=code) from None


def translate(error: SplitUpError) -> ApiError:
    """Return an error in OpenAI's form, whose clients repeat 429 and 5xx and nothing else.

    What names endpoints, nodes or this account is logged, and not told to clients.
    """
    match error:
        case ApiError():
            return error
        case Throttled():
            wait = {"Retry-After": str(error.retry_s or 2)}
            return ApiError(str(error), status=429, kind="rate_limit_error", headers=wait)
        case Refused():
            return ApiError(str(error), status=error.status)
        case InvalidInput():
            return ApiError(str(error))
        case ExecutionFailed():
            _log.warning("%s", error)
            told = "the nodes did not finish the answer"
            return ApiError(told, status=502, kind="upstream_error")
        case ChainUnavailable() | StorageUnavailable() | ChainRejected() | PeerFault():
            _log.warning("%s", error)
            told = "the network does not answer now; try again in a few seconds"
        case _:
            told = str(error)
    wait = {"Retry-After": "5"}
    return ApiError(told, status=503, kind="service_unavailable", headers=wait)
