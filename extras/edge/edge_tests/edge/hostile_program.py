"""In the place of a process that runs an exported model: does what the file's last line says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from splitup.sandbox.serving import Answer, serve

INFO = (
    b'{"version":1,"layers":1,"kv_heads":1,"head_dim":2,"max_len":8,"windows":[0],'
    b'"dtype":"float32","methods":{"forward":1},'
    b'"text":{"vocab":4,"context":8,"eos_ids":[],"tokenizer_digest":"%s","tokenizer_bytes":2}}'
    % (b"00" * 32)
)


class _Program:
    def answer(self, question: Mapping[str, Any], buffers: Sequence[memoryview]) -> Answer:
        if "file" in question:
            with os.fdopen(question["file"], "rb") as file:
                self._does = file.read().rpartition(b"\n")[2].decode()
            if self._does == "die":
                os.abort()
            infos = {
                "no info": b"[1",
                "long steps": INFO.replace(b'"forward":1', b'"forward":1000000'),
                "many tokens": INFO.replace(b'"vocab":4', b'"vocab":2000000000'),
            }
            info = infos.get(self._does, INFO)
            return {}, [b"{}"] if self._does == "one part" else [b"{}", info]
        if self._does == "die at a step":
            os.abort()
        size = {"few": 12, "many": 20}.get(self._does, 16)
        return {}, [bytes(size)]


if __name__ == "__main__":
    serve(_Program().answer)
