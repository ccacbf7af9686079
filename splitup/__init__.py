"""SplitUp: a marketplace that runs models too large for one GPU on the GPUs of many.

    async with SplitUp.connect() as net:
        result = await net.execute("model", {"x": array})

The names below load on first use: a node's worker that needs only tensors does not pay for the
client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitup.client.connection import SplitUp
    from splitup.client.market.receipts import Receipt
    from splitup.client.outcome import Result, TraceEvent
    from splitup.config import NetworkConfig
    from splitup.core.errors import ExecutionFailed, SplitUpError
    from splitup.decode.speculation.lookahead import LookaheadOptions

_HOMES = {
    "ExecutionFailed": "splitup.core.errors",
    "LookaheadOptions": "splitup.decode.speculation.lookahead",
    "NetworkConfig": "splitup.config",
    "Receipt": "splitup.client.market.receipts",
    "Result": "splitup.client.outcome",
    "SplitUp": "splitup.client.connection",
    "SplitUpError": "splitup.core.errors",
    "TraceEvent": "splitup.client.outcome",
}

__all__ = [
    "ExecutionFailed",
    "LookaheadOptions",
    "NetworkConfig",
    "Receipt",
    "Result",
    "SplitUp",
    "SplitUpError",
    "TraceEvent",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitup' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
