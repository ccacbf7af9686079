"""JSON-RPC to an Ethereum node: requests, their retries, and their two kinds of failure.

Requests use web3's provider without its middleware: errors are returned as data, and CCIP-Read
(EIP-3668: an answer makes the caller fetch a URL that the contract chose) cannot happen.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Self

from aiohttp import ClientSession, TCPConnector
from web3 import AsyncHTTPProvider
from web3.types import RPCEndpoint

from splitup.core import tuning
from splitup.core.errors import ChainUnavailable, ConfigurationError


class RpcError(ChainUnavailable):
    """The node answered with an error. ``data`` is the revert data ("0x…") of a refused call."""

    def __init__(self, url: str, method: str, message: str, data: str | None) -> None:
        super().__init__(f"the chain at {url} refused {method}: {message}; try again later")
        self.message = message
        self.data = data

    @property
    def is_revert(self) -> bool:
        """Whether the contract refused the call, not the RPC node."""
        return self.data is not None or "revert" in self.message.lower()


class Rpc:
    """A connection to one RPC endpoint (http or https)."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"the RPC endpoint {url!r} does not begin with http(s)://")
        self.url = url
        self.requests = 0  # that were sent, repeated ones included
        self._provider = AsyncHTTPProvider(url, exception_retry_configuration=None)
        self._session: ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, *params: Any, tries: int = tuning.RPC_TRIES) -> Any:
        """Return the result of one call.

        Transport failures are repeated with growing, jittered pauses, which is safe: every method
        in use here is idempotent, signed transactions included. Raises RpcError, ChainUnavailable.
        """
        if self._session is None:
            self._open_session()
        for attempt in range(tries):
            try:
                self.requests += 1
                async with asyncio.timeout(tuning.RPC_TIMEOUT_S):
                    response = await self._provider.make_request(RPCEndpoint(method), params)
                break
            except TimeoutError:
                failure = f"nothing within {tuning.RPC_TIMEOUT_S:g} s"
            except Exception as error:  # each HTTP library has its own; all mean: no answer
                failure = f"{type(error).__name__}: {error}".rstrip(": ")
            if attempt + 1 < tries:
                await asyncio.sleep(tuning.RPC_BACKOFF_S * 2**attempt * random.uniform(0.5, 1))
        else:
            raise ChainUnavailable(
                f"the chain at {self.url} does not answer ({failure}); "
                "start your network with: splitup up, or correct the RPC endpoint"
            )
        if "error" not in response:
            return response.get("result")
        problem: Any = response["error"]
        if not isinstance(problem, dict):
            raise RpcError(self.url, method, str(problem), None)
        data = problem.get("data")
        if isinstance(data, dict):  # some nodes wrap it once more
            data = data.get("data") or data.get("result")
        raise RpcError(
            self.url,
            method,
            str(problem.get("message", "unknown error")),
            data if isinstance(data, str) and data.startswith("0x") else None,
        )

    def _open_session(self) -> None:
        """Give web3 one session that keeps its connections; web3's own opens one for every call.

        This also avoids web3's cache of sessions: a process-wide lock guards it, taken in a thread,
        and a call that is cancelled while it waits would never release that lock.
        """
        session = ClientSession(raise_for_status=True, connector=TCPConnector())

        async def get_session(*_: object, **__: object) -> ClientSession:
            return session

        manager = self._provider._request_session_manager
        manager.async_cache_and_return_session = get_session  # type: ignore[method-assign]
        self._session = session
