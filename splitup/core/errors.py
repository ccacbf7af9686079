"""Every error SplitUp raises on purpose.

    SplitUpError
    ├── InvalidInput            an input cannot be used; says what to change
    │   ├── InvalidModel        a model file, graph, task or manifest breaks a rule
    │   └── ConfigurationError  a configuration file, key file or passphrase is missing or wrong
    ├── PeerFault               another party broke the protocol; carries evidence
    │   └── BadSignature        a signature does not verify
    ├── Refused                 a server refused a request; carries the HTTP status
    ├── Unavailable             the environment failed; trying again later may help
    │   ├── ChainUnavailable    the RPC endpoint does not answer, or is another deployment's
    │   ├── StorageUnavailable  the S3 endpoint or the gateway does not answer
    │   ├── Implausible         a node's output cannot be right, such as NaN for a logit
    │   ├── TooSlow             this machine did not finish within the time it spends on such work
    │   └── Throttled           a server limits our request rate; do not try another server
    ├── ChainRejected           a transaction reverted; names the contract's error
    └── ExecutionFailed         an execution ended without a result; names task, node and refund

A message says what happened, to which object, and what to do about it. ``assert`` never
checks input.
"""

from __future__ import annotations

import os
from http import HTTPStatus
from urllib.parse import urlsplit


class SplitUpError(Exception):
    """Root of the tree. ``str(error)`` is one sentence, to be shown in a terminal."""


class InvalidInput(SplitUpError):
    """An input cannot be used; the message names it and says what to change."""


class InvalidModel(InvalidInput):
    """A model file, graph, task or manifest breaks a rule of the format."""


class ConfigurationError(InvalidInput):
    """A configuration file, key file, passphrase or flag is missing or wrong."""


class PeerFault(SplitUpError):
    """Another party broke the protocol. ``peer`` names it, ``evidence`` holds its signed bytes."""

    def __init__(self, message: str, *, peer: str = "", evidence: bytes = b"") -> None:
        super().__init__(message)
        self.peer = peer
        self.evidence = evidence


class BadSignature(PeerFault):
    """A signature does not verify under the key it claims."""


class Refused(SplitUpError):
    """A server refused a request, as the protocol allows.

    ``status`` is the HTTP status; the message is the server's own sentence. Servers raise it to
    answer with that status, clients when they get such an answer.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Return whether the same call is refused for ever: what it is about is over (410)."""
        return self.status == HTTPStatus.GONE


class Unavailable(SplitUpError):
    """The environment failed; the same call may succeed later."""


class Implausible(Unavailable):
    """A node's output cannot be right; other nodes may give another one."""


class TooSlow(Unavailable):
    """Work took more time than this machine spends on it at once: slow, and not wrong."""


class Throttled(Unavailable):
    """A server answered 429: too many requests. ``retry_s``: when to come back, None if unknown."""

    def __init__(self, message: str, *, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class ChainUnavailable(Unavailable):
    """The chain's RPC endpoint does not answer, or serves another chain or deployment."""


class StorageUnavailable(Unavailable):
    """The S3 endpoint or the storage gateway does not answer."""


class ChainRejected(SplitUpError):
    """A transaction or call reverted. ``error_name`` is the contract's custom error, decoded."""

    def __init__(self, message: str, *, error_name: str = "") -> None:
        super().__init__(message)
        self.error_name = error_name


class ExecutionFailed(SplitUpError):
    """An execution ended without a complete result.

    ``task`` and ``node`` name where it failed ("" when no single one did); ``refunded_micro_usdc``
    is what the chain has given back, or None while the deadline has not passed.
    """

    def __init__(
        self,
        message: str,
        *,
        execution_id: str,
        task: str = "",
        node: str = "",
        refunded_micro_usdc: int | None = None,
    ) -> None:
        super().__init__(message)
        self.execution_id = execution_id
        self.task = task
        self.node = node
        self.refunded_micro_usdc = refunded_micro_usdc


def describe(error: BaseException) -> str:
    """Return what somebody else's exception says, its type's name where it says nothing.

    Of a connection that could not be opened it is the system's reason alone: aiohttp and asyncio
    repeat the address beside it, which our messages name already.
    """
    reason = getattr(error, "os_error", None)
    if isinstance(reason, OSError):
        said = reason.strerror or str(reason)
        if reason.errno is not None and said.startswith("Connect call failed"):
            return os.strerror(reason.errno)
        return said
    return str(error) or type(error).__name__


def name_server(url: str) -> str:
    """Return a URL's scheme, host and port: its user, path and query may be secrets.

    Raises ValueError for what is no URL.
    """
    found = urlsplit(url)
    return f"{found.scheme}://{found.netloc.rpartition('@')[2]}"
