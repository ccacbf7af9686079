"""The HTTP interface of an adapter host: its clients are strangers, bodies are in SEAL's form."""

from __future__ import annotations

from typing import Any, Final

from splitup.core import tuning
from splitup.messages.api import PING, Route
from splitup.messages.base import Message
from splitup_private.adapters.messages import AdapterList, AdapterSession

ADAPTERS: Final = Route[Message]("GET", "/v1/adapters", "client", reply=AdapterList)
ADAPTER_KEYS: Final = Route[Message](
    "POST",
    "/v1/adapters/{adapter}/session",
    "client",
    reply=AdapterSession,
    timeout_s=tuning.RUN_TIMEOUT_S,
)
ADAPTER_QUERY: Final = Route[Message]("POST", "/v1/adapter-sessions/{session}", "client")
ADAPTER_END: Final = Route[Message]("POST", "/v1/adapter-sessions/{session}/end", "client")

ROUTES: Final[tuple[Route[Any], ...]] = (PING, ADAPTERS, ADAPTER_KEYS, ADAPTER_QUERY, ADAPTER_END)
