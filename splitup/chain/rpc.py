"""JSON-RPC to an Ethereum node: requests, their retries, and their two kinds of failure.

Plain requests, as web3's provider makes them without its middleware: errors are returned as data,
and CCIP-Read (EIP-3668: an answer makes the caller fetch a URL that the contract chose) cannot
happen. Importing web3 costs 1.5 s of CPU time at every start, 0.5 s of it for pairings.

The path of an endpoint's URL, its query or its user may be the key of whoever pays the provider:
errors and logs name the endpoint by its host alone.

What an endpoint answers is read up to a length, and checked (``splitup.chain.rpc_results``): one
that is broken, or lies, is an endpoint that does not answer, whatever it says.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiohttp import (
    ClientConnectorError,
    ClientResponseError,
    ClientSession,
    InvalidURL,
)

from splitup.chain.rpc_results import check_result
from splitup.core import limits, tuning
from splitup.core.background import Closing
from splitup.core.codec import parse_json
from splitup.core.errors import ChainUnavailable, ConfigurationError, describe, name_server
from splitup.core.http_session import open_session
from splitup.core.silence import SilenceAlarm

_log = logging.getLogger("splitup.chain")
# The methods in use that may be repeated when an answer is lost: they read, or they send signed
# bytes, which are executed once, under their nonce.
_IDEMPOTENT: Final = {
    *("eth_blockNumber", "eth_call", "eth_chainId", "eth_estimateGas", "eth_gasPrice"),
    *("eth_getBalance", "eth_getBlockByHash", "eth_getBlockByNumber", "eth_getCode", "eth_getLogs"),
    *("eth_getTransactionByHash", "eth_getTransactionCount", "eth_getTransactionReceipt"),
    *("eth_maxPriorityFeePerGas", "eth_sendRawTransaction"),
}
_MAX_SAID: Final = 500  # characters of an error that are repeated


class RpcError(ChainUnavailable):
    """The node answered with an error. ``data`` is the revert data ("0x…") of a refused call."""

    def __init__(self, place: str, method: str, message: str, data: str | None) -> None:
        super().__init__(f"the chain at {place} refused {method}: {message}; try again later")
        self.message = message
        self.data = data

    @property
    def is_revert(self) -> bool:
        """Whether the contract refused the call, not the RPC node."""
        return self.data is not None or "revert" in self.message.lower()


class Rpc(Closing):
    """A connection to one RPC endpoint (http or https)."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError("the RPC endpoint does not begin with http:// or https://")
        self._url = url
        try:
            self.place = name_server(url)  # for errors and logs
        except ValueError:
            message = "the URL of the RPC endpoint is not valid; correct it"
            raise ConfigurationError(message) from None
        self.requests = 0  # that were sent, repeated ones included
        self._session: ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, *params: Any, tries: int = tuning.RPC_TRIES) -> Any:
        """Return the result of one call.

        An idempotent method whose answer was lost is tried again, after growing, jittered pauses;
        any other one has a single try. Raises RpcError, ChainUnavailable.
        """
        response = await self._ask([(method, params)], tries if method in _IDEMPOTENT else 1)
        return self._read(method, response)

    async def request_all(self, *calls: tuple[str, Sequence[Any]]) -> list[Any]:
        """Return the results of several reading calls, which one backend answers.

        An endpoint may have many backends, of which some lag behind; one batch (JSON-RPC 2.0,
        section 6) goes to one of them. Raises RpcError also where batches are not answered.
        """
        answer = await self._ask(calls, tuning.RPC_TRIES)
        if not isinstance(answer, list):
            self._read("a batch of calls", answer)  # says why, where it does
            answer = []
        if len(answer) != len(calls):
            raise RpcError(self.place, "a batch of calls", "it answers no batches", None)
        by_id = {entry.get("id"): entry for entry in answer if isinstance(entry, dict)}
        return [
            self._read(method, by_id.get(place, {"error": "no answer"}))
            for place, (method, _) in enumerate(calls)
        ]

    async def _ask(self, calls: Sequence[tuple[str, Sequence[Any]]], tries: int) -> Any:
        """Return the JSON of an answer; raise ChainUnavailable after so many tries.

        An endpoint that answers nothing at all is asked ``tuning.RPC_SILENCES`` times.
        """
        silences = 0
        for attempt in range(tries):
            try:
                with SilenceAlarm(self._warn):
                    async with asyncio.timeout(tuning.RPC_TIMEOUT_S):
                        return await self._post(calls)
            except TimeoutError:
                failure = f"nothing within {tuning.RPC_TIMEOUT_S:g} s"
                silences += 1
                if silences == tuning.RPC_SILENCES:
                    break
            except RpcError:
                raise
            except Exception as error:  # whatever it is, there is no answer
                failure = _describe(error)
            if attempt + 1 < tries:
                await asyncio.sleep(tuning.RPC_BACKOFF_S * 2**attempt * random.uniform(0.5, 1))
        raise ChainUnavailable(
            f"the chain at {self.place} does not answer ({failure}); "
            "start your network with: splitup up, or correct the RPC endpoint"
        )

    def _warn(self) -> None:
        _log.warning("the chain at %s has not answered for %g s", self.place, tuning.QUIET_S)

    def _read(self, method: str, response: Mapping[str, Any]) -> Any:
        """Return the result of one call; raise RpcError."""
        if "error" not in response:
            return response.get("result")
        problem: Any = response["error"]
        if not isinstance(problem, dict):
            raise RpcError(self.place, method, f"{problem!s:.{_MAX_SAID}}", None)
        data = problem.get("data")
        if isinstance(data, dict):  # some nodes wrap it once more
            data = data.get("data") or data.get("result")
        raise RpcError(
            self.place,
            method,
            str(problem.get("message", "unknown error"))[:_MAX_SAID],
            data if isinstance(data, str) and data.startswith("0x") else None,
        )

    async def _post(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> Any:
        if self._session is None:
            self._session = open_session(raise_for_status=True)
        self.requests += len(calls)
        numbered = [
            {"jsonrpc": "2.0", "id": place, "method": method, "params": params}
            for place, (method, params) in enumerate(calls)
        ]
        asked = numbered if len(calls) > 1 else numbered[0]
        text = bytearray()
        async with self._session.post(self._url, json=asked) as response:
            async for part in response.content.iter_any():
                text += part
                if len(text) > limits.MAX_RPC_ANSWER_BYTES:  # ranges of blocks become smaller
                    most = f"an answer of more than {limits.MAX_RPC_ANSWER_BYTES} bytes"
                    raise RpcError(self.place, calls[0][0], most, None)
        answer = parse_json(text, max_values=len(text) + 1)
        if not isinstance(answer, dict if len(calls) == 1 else (dict, list)):
            raise ValueError("the answer is not a JSON object")
        for entry in answer if isinstance(answer, list) else [answer]:
            _check_answer(calls, entry)
        return answer


def _check_answer(calls: Sequence[tuple[str, Sequence[Any]]], entry: Any) -> None:
    """Raise ValueError for what is no answer to one of the calls."""
    if not isinstance(entry, dict):
        raise ValueError("an answer is not a JSON object")
    place = entry.get("id") if len(calls) > 1 else 0
    if "error" not in entry and type(place) is int and 0 <= place < len(calls):
        check_result(calls[place][0], entry.get("result"))


def _describe(error: Exception) -> str:
    """Return what failed; what aiohttp says of an answer or a URL holds the whole URL."""
    if isinstance(error, ClientResponseError):
        return f"HTTP {error.status} {error.message}".rstrip()
    if isinstance(error, InvalidURL):
        return "its URL is not valid"
    if isinstance(error, ClientConnectorError):
        return describe(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")
