"""``SplitUp``: how a program connects to the network, with ``await`` and without."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from splitup.client.network import Network
from splitup.client.sync import SyncSplitUp
from splitup.config import NetworkConfig


class SplitUp(Network):
    """A connection as one user. Use ``async with SplitUp.connect(config) as net``."""

    @classmethod
    def connect(cls, config: NetworkConfig | Path | str | None = None) -> Self:
        """Return a connection that opens on ``async with``.

        ``config`` is a NetworkConfig, or the path of a ``network.json`` or of the directory that
        holds one; without it ``$SPLITUP_HOME`` and ``./.splitup`` are tried. Raises
        ConfigurationError.
        """
        if not isinstance(config, NetworkConfig):
            config = NetworkConfig.load(None if config is None else Path(config))
        return cls(config, config.load_user())

    @classmethod
    def connect_sync(cls, config: NetworkConfig | Path | str | None = None) -> SyncSplitUp:
        """Return the same connection for code without ``await``; it opens on ``with``."""
        return SyncSplitUp(cls.connect(config))
