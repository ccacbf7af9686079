"""The synchronous face: the same connection on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from splitup.client.connection import DEFAULT_DEADLINE_S, SplitUp, Usdc
from splitup.client.generation import Token
from splitup.client.outcome import Array, Receipt, Result
from splitup.config import NetworkConfig
from splitup.core.event_loop import new_loop

T = TypeVar("T")


class SyncSplitUp:
    """``SplitUp`` for code without ``await``. Use ``with SplitUp.connect_sync() as net``."""

    def __init__(self, config: NetworkConfig | Path | str | None = None) -> None:
        self._net = SplitUp.connect(config)
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="splitup", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._net.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._run(self._net.close())
        finally:
            self._stop()

    def execute(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        max_price_usdc: Usdc | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Result:
        """Like ``SplitUp.execute``; ``result.receipt.wait()`` gives the receipt."""
        return self._run(
            self._net.execute(model, inputs, max_price_usdc=max_price_usdc, deadline_s=deadline_s)
        )

    def generate(self, model: str, prompt: str | Sequence[int], **options: Any) -> Iterator[Token]:
        """Like ``SplitUp.generate``, with its keyword arguments."""
        tokens = self._net.generate(model, prompt, **options)
        try:
            while (token := self._run(_next(tokens))) is not None:
                yield token
        finally:
            self._run(tokens.aclose())

    def deposit(self, amount_usdc: Usdc) -> None:
        """Like ``SplitUp.deposit``."""
        self._run(self._net.deposit(amount_usdc))

    def freeze(self, seconds: float) -> int:
        """Like ``SplitUp.freeze``."""
        return self._run(self._net.freeze(seconds))

    def receipt(self, execution_id: str) -> Receipt:
        """Like ``SplitUp.receipt``."""
        return self._run(self._net.receipt(execution_id))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must not leave the work running there
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(tokens: AsyncGenerator[Token, None]) -> Token | None:
    return await anext(tokens, None)
