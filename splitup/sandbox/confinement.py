"""Take from a process all that computing does not need, before it sees a stranger's byte.

    files             Landlock: libraries, and the device's; all else arrives as open descriptors
    network           seccomp: no socket is made; a network namespace of its own besides
    other processes   seccomp: no ptrace, no signal, no process; another user, or a user namespace
    privileges        no capability, no new one; seccomp: none of the calls that only systems need

What a system lacks is returned as sentences, for ``splitup doctor`` and ``splitup-node status``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from splitup.core.limits import MIB
from splitup.sandbox import access, identity, landlock, system_calls
from splitup.sandbox.serving import Answer, serve

_MAX_FILE_BYTES: Final = 64 * MIB  # of its log


def confine(device: str | None = None, *, forks: bool = False) -> tuple[str, ...]:
    """Confine this process for good; returns a sentence for everything that the system lacks.

    ``device`` is tinygrad's device that the process will open, "" any, None if it opens none. The
    driver of a GPU may write into the folder TMPDIR. With ``forks`` it may fork, to compile
    (``splitup.backend.compiler.compile_process``). To be called before any thread is started.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return (
            f"{sys.platform} has neither Landlock nor seccomp: models compute with all rights of "
            "the user who runs them; use Linux for models of strangers",
        )
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"confine() is called after {threads - 1} threads were started")
    needs = None if device is None else access.Device.find(device)
    uses_driver = needs is not None and needs.writes_files
    if not uses_driver:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    try:
        calls = system_calls.make_filter(
            forks=forks,
            starts_programs=needs is not None and needs.compiler is not None,
            uses_driver=uses_driver,
        )
    except RuntimeError:
        calls = None
    identity.forbid_new_privileges()
    identity.die_first()
    lacks = _change_identity_and_files(needs, has_filter=calls is not None)
    if calls is None:
        lacks.append("libseccomp is missing: models may use the network; apt install libseccomp2")
    else:
        try:
            calls.load()
        except OSError as error:
            lacks.append(f"the kernel has no seccomp ({error}): models may use the network")
    return tuple(lacks)


def serve_confined(
    answer: Callable[[Mapping[str, Any], Sequence[memoryview]], Answer],
    device: str | None = None,
    *,
    forks: bool = False,
    memory_bytes: int | None = None,
) -> None:
    """Confine this process as ``confine`` does, and answer its parent's questions.

    ``memory_bytes`` bounds its addresses.
    """
    confine(device, forks=forks)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    serve(answer)


def _change_identity_and_files(needs: access.Device | None, *, has_filter: bool) -> list[str]:
    lacks = []
    os.chdir("/")  # libraries look for files in the current folder, which may be private
    is_root = os.geteuid() == 0
    has_namespaces = identity.leave_namespaces()
    files = access.find_files(needs)
    is_landlocked = landlock.find_version() > 0
    if is_landlocked:
        landlock.restrict(files)
    else:
        lacks.append(
            "the kernel has no Landlock: models read what the node's user may read; use Linux 5.13 "
            "or newer with 'landlock' among its security modules (CONFIG_LSM, or lsm= at boot)"
        )
    # libraries may lie where root alone may read them, such as /root
    keeps_reading = is_root and not access.are_readable_by_all(access.find_libraries())
    if is_root and ((is_landlocked and has_filter) or not keeps_reading):
        groups, scratch = ([], None) if needs is None else (needs.list_groups(), needs.scratch)
        is_own_user = identity.leave_root(groups, scratch, keeps_reading=keeps_reading)
    else:
        is_own_user = not is_root and has_namespaces
    identity.drop_capabilities(keeps_reading=keeps_reading and is_own_user)
    if is_own_user:
        identity.limit_threads()
        if needs is not None and needs.drivers:
            identity.show_own_files()
    else:
        lacks.append(
            "models compute as the user who runs them, since the system gives the process no user "
            "and no user namespace of its own"
        )
    return lacks


def main() -> None:
    """Print, as JSON, what this system lacks: ``python -m splitup.sandbox.confinement``."""
    print(json.dumps(confine(os.environ.get("DEV", ""))))


if __name__ == "__main__":
    main()
