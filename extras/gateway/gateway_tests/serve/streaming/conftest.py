"""The streams of a server without a folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from splitup_gateway.streaming.streams import Streams


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    opened = Streams()
    yield opened
    await opened.close()
