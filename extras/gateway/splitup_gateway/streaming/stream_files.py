"""Files of streams: what a server told, for the one that is started after it was killed.

A file has a JSON object a line. A line that was not written to its end is not read. Lines go to the
kernel's memory, which outlives the process and not the machine: no token waits for a disk.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from splitup.core import tuning
from splitup.core.errors import ConfigurationError
from splitup.storage.private_files import write_private

_log = logging.getLogger("splitup.serve")

Line = Mapping[str, Any]


class StreamFile:
    """The file of one stream, which this user alone may read.

    One that cannot be written is given up, with a warning; its stream goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0  # 0: not written yet
        self.is_given_up = False

    def append(self, line: Line) -> None:
        """Add a line."""
        self._write(self.path, os.O_APPEND, line)

    def rewrite(self, *lines: Line) -> None:
        """Let these be all lines; whoever reads meanwhile reads the earlier ones."""
        self.size = 0
        made = self.path.with_suffix(".new")
        self._write(made, os.O_CREAT | os.O_TRUNC, *lines)
        if not self.is_given_up:
            made.replace(self.path)

    def _write(self, path: Path, flags: int, *lines: Line) -> None:
        texts = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines)
        data = "".join(f"{text}\n" for text in texts).encode()
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600), "wb") as file:
                file.write(data)
        except OSError as error:
            self.give_up()
            _log.warning(
                "a stream will not outlive this server: %s (%s)", error.strerror, path.parent
            )
        self.size += len(data)

    def read(self) -> list[Any]:
        """Return the lines; raise OSError and ValueError."""
        data = self.path.read_bytes()
        self.size = len(data)
        return [json.loads(line) for line in data.split(b"\n")[:-1]]

    def give_up(self) -> None:
        """Write nothing more; what there is goes, as what follows would be missing."""
        self.is_given_up = True
        self.delete()

    def delete(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)


def read_server_name(folder: Path) -> str:
    """Return the name of whoever has a folder of streams, which the next server there has too.

    Raises ConfigurationError.
    """
    path = folder.with_name(f"{folder.name}.name")
    try:
        if not path.exists() or not path.read_text(encoding="ascii"):
            write_private(path, secrets.token_hex(16))
        return path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the file {path} cannot be used: {error}") from None


def list_files(folder: Path) -> Iterator[tuple[StreamFile, float]]:
    """Yield the files, the oldest first, and for how many seconds each is kept; remove others.

    Creates the folder; raises ConfigurationError.
    """
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder of streams {folder} cannot be used: {error.strerror or error}"
        ) from None
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
        rest_s = tuning.STREAM_KEEP_S + path.stat().st_mtime - time.time()
        if path.suffix or rest_s <= 0:
            path.unlink()
        else:
            yield StreamFile(path), min(rest_s, tuning.STREAM_KEEP_S)
