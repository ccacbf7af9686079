"""A TCP proxy that keeps every byte that clients send, and reads the messages in them."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_HEAD_END = b"\r\n\r\n"
_CONTROL = 8  # opcodes from here on close a connection or keep it open


@dataclass
class Recorder:
    """What clients sent, by connection; ``refused`` closes connections whose first bytes match.

    ``before`` is called when a client has sent something, before the server gets it.
    """

    url: str = ""
    target: str = ""  # the server's own URL, where nothing is recorded
    refused: bytes | None = None
    before: Callable[[], None] | None = None
    sent: list[bytearray] = field(default_factory=list)

    def list_heads(self) -> list[bytes]:
        """Return the heads of all HTTP requests that were sent without a body."""
        heads = []
        for data in self.sent:
            head, _, _ = bytes(data).partition(b"Upgrade: websocket")
            heads += [one for one in head.split(_HEAD_END) if one]
        return heads

    def list_frames(self) -> list[bytes]:
        """Return the payloads of all WebSocket frames (RFC 6455, 5.2) with data, unmasked."""
        frames = []
        for data in self.sent:
            if b"Upgrade: websocket" in data:
                frames += _read_frames(bytes(data).partition(_HEAD_END)[2])
        return [payload for opcode, payload in frames if opcode < _CONTROL]

    def read_all(self) -> bytes:
        """Return all that was sent, and the frames' payloads."""
        return b"\n".join([*map(bytes, self.sent), *self.list_frames()])


def _read_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 6:
        length, place = data[1] & 127, 2
        if length >= 126:
            size = 2 if length == 126 else 8
            length, place = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
        assert data[1] & 128, "a browser masks what it sends"
        mask, start = data[place : place + 4], place + 4
        payload = data[start : start + length]
        keys = (mask * (len(payload) // 4 + 1))[: len(payload)]
        whole = int.from_bytes(payload, "big") ^ int.from_bytes(keys, "big")
        yield data[0] & 15, whole.to_bytes(len(payload), "big")
        data = data[start + length :]


@contextlib.contextmanager
def run_recorder(target: str) -> Iterator[Recorder]:
    """Listen on a free port and pass everything on to ``target``, a URL."""
    found = re.fullmatch(r"http://([^:/]+):(\d+)", target)
    assert found
    address = (found[1], int(found[2]))
    recorder = Recorder(target=target)
    open_sockets: set[socket.socket] = set()
    threads: list[threading.Thread] = []

    def start(function: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments)
        thread.start()
        threads.append(thread)
        return thread

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was shut down
            while True:
                start(serve, server.accept()[0])

    def serve(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            open_sockets.add(client)
            first = client.recv(1 << 16)
            if recorder.refused is not None and recorder.refused in first:
                return
            kept = bytearray(first)
            recorder.sent.append(kept)
            with socket.create_connection(address) as upstream:
                open_sockets.add(upstream)
                upstream.sendall(first)
                back = start(pump, upstream, client, None)
                pump(client, upstream, kept)
                back.join()

    def pump(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if kept is not None:
                    kept += data
                    if recorder.before is not None:
                        recorder.before()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as server:
        recorder.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        start(accept, server)
        try:
            yield recorder
        finally:
            for one in (server, *open_sockets):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
