"""The synchronous connection: a ``Network`` on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from splitup.client.market.payments import Quote
from splitup.client.market.receipts import Receipt
from splitup.client.network import Network, Usdc
from splitup.client.outcome import Array, Result
from splitup.client.text.encoding import Embeddings
from splitup.client.text.generation import Token
from splitup.core.errors import InvalidInput
from splitup.core.event_loop import new_loop

T = TypeVar("T")


class SyncSplitUp:
    """``SplitUp`` for code without ``await``.

    Use ``with SplitUp.connect_sync() as net``, or ``open()`` and at the end ``close()``. Every
    other method raises InvalidInput while the connection is not open.
    """

    def __init__(self, net: Network) -> None:
        self._net = net
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Open the connection; ``with`` does that by itself."""
        if self._loop is not None:
            raise InvalidInput("the connection is open already; connect again for a second one")
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="splitup", daemon=True)
        self._thread.start()
        try:
            self._run(self._net.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def close(self) -> None:
        """Close the connection; ``with`` does that by itself. A closed one stays closed."""
        if self._loop is None:
            return
        try:
            self._run(self._net.close())
        finally:
            self._stop()

    def execute(self, model: str, inputs: Mapping[str, Array], **options: Any) -> Result:
        """Like ``SplitUp.execute``, with its keyword arguments; ``receipt.wait()`` waits."""
        return self._run(self._net.execute(model, inputs, **options))

    def generate(self, model: str, prompt: str | Sequence[int], **options: Any) -> Iterator[Token]:
        """Like ``SplitUp.generate``, with its keyword arguments."""
        self._get_loop()  # else the error would come with the first token
        return self._generate(self._net.generate(model, prompt, **options))

    def embed(self, model: str, texts: Sequence[str | Sequence[int]], **options: Any) -> Embeddings:
        """Like ``SplitUp.embed``, with its keyword arguments."""
        return self._run(self._net.embed(model, texts, **options))

    def quote(self, model: str, **options: Any) -> Quote:
        """Like ``SplitUp.quote``, with its keyword arguments."""
        return self._run(self._net.quote(model, **options))

    def quote_generation(self, model: str, prompt: str | Sequence[int], **options: Any) -> Quote:
        """Like ``SplitUp.quote_generation``, with its keyword arguments."""
        return self._run(self._net.quote_generation(model, prompt, **options))

    def deposit(self, amount_usdc: Usdc) -> None:
        """Like ``SplitUp.deposit``."""
        self._run(self._net.deposit(amount_usdc))

    def withdraw(self, amount_usdc: Usdc | None = None) -> int:
        """Like ``SplitUp.withdraw``."""
        return self._run(self._net.withdraw(amount_usdc))

    def freeze(self, seconds: float) -> int:
        """Like ``SplitUp.freeze``."""
        return self._run(self._net.freeze(seconds))

    def receipt(self, execution_id: str) -> Receipt:
        """Like ``SplitUp.receipt``."""
        return self._run(self._net.receipt(execution_id))

    def _generate(self, tokens: AsyncGenerator[Token, None]) -> Iterator[Token]:
        try:
            while (token := self._run(_next(tokens))) is not None:
                yield token
        finally:
            self._run(tokens.aclose())

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise InvalidInput(
                "the connection is not open; use: with SplitUp.connect_sync() as net, "
                "or call net.open() first and net.close() at the end"
            )
        return self._loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._get_loop())
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must not leave the work running there
            future.cancel()
            raise

    def _stop(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._loop = self._thread = None


async def _next(tokens: AsyncGenerator[Token, None]) -> Token | None:
    return await anext(tokens, None)
