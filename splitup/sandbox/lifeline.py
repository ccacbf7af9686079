"""The end of a process whose parent has gone, even in the middle of its work.

The kernel's own signal (PR_SET_PDEATHSIG) would come when the thread ends that started the process,
and is lost with a change of identity. The parent's end of a socket closes with the parent.
"""

from __future__ import annotations

import os
import select
import threading
from typing import Final

_STACK_BYTES: Final = 256 * 1024


def end_with_peer(socket: int) -> None:
    """Let this process end when the socket's peer closes; a fork of it does not.

    Call it after the confinement, which holds for the threads that are started later. The socket
    stays open under this number.
    """
    previous = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=_wait, args=(socket,), name="lifeline", daemon=True).start()
    finally:
        threading.stack_size(previous)


def _wait(socket: int) -> None:
    poll = select.poll()
    poll.register(socket, select.POLLRDHUP)
    poll.poll()
    os._exit(0)
