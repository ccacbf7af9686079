"""The audit log: one JSON line per answer or refusal, without URLs, of limited size on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from splitup.core import tuning
from splitup.core.errors import Unavailable


class AuditLog:
    """Appends lines to ``path``; a full file becomes ``path.1``, and the oldest is deleted."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = tuning.AUDIT_FILE_BYTES,
        files: int = tuning.AUDIT_FILES,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._descriptor = _open(path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def append(self, fields: dict[str, Any]) -> None:
        """Write one line; raise Unavailable when the disk does not take it.

        Nothing is granted that cannot be logged. A line is a single write in append mode, so that
        lines do not mix.
        """
        line = (json.dumps(fields) + "\n").encode()
        try:
            if os.fstat(self._descriptor).st_size + len(line) > self._max_bytes:
                self._rotate()
            if os.write(self._descriptor, line) != len(line):
                raise OSError("short write")
        except OSError as error:
            raise Unavailable(
                f"the gateway cannot write its audit log ({error.strerror or error})"
            ) from None

    def _rotate(self) -> None:
        names = [self._path, *(Path(f"{self._path}.{i}") for i in range(1, self._files))]
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                newer.replace(older)
        descriptor = _open(self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
