"""Nothing outlives the process that it works for, however that dies."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from tests.builders import HANG_S

# It never comes back to its socket.
CHILD = """
import os, sys
from splitup.sandbox.lifeline import end_with_peer
end_with_peer(0)
print(os.getpid(), flush=True)
while True: pass
"""
PARENT = f"""
import socket, subprocess, sys, time
ours, theirs = socket.socketpair()
child = [sys.executable, "-c", {CHILD!r}]
process = subprocess.Popen(child, stdin=theirs, start_new_session=True)
theirs.close()
time.sleep({HANG_S})
"""


def test_a_child_ends_in_the_middle_of_work_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert not select.select([child], [], [], 0)[0]
        parent.kill()
        assert select.select([child], [], [], HANG_S)[0]
        os.close(child)
