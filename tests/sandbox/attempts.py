"""What hostile code in a confined process tries: every attempt says what it reached.

Run unconfined by root, almost all of them succeed: ``python -m tests.sandbox.attempts TARGET``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Target = dict[str, Any]  # what there is to reach; see ``tests.sandbox.conftest``
_ATTEMPTS: dict[str, Callable[[Target], object]] = {}
_MAX_THREADS = 2_000

# Numbers of system calls on x86-64. Called without arguments, or with those given, each gives
# another error than EPERM and ENOSYS where it is allowed.
_CALLS: dict[str, tuple[int, ...]] = {
    "acct": (163, -1),
    "add_key": (248,),
    "bpf": (321,),
    "chroot": (161, -1),
    "clone3": (435,),
    "execveat": (322, -1),
    "fanotify_init": (300,),
    "inotify_init1": (294,),
    "io_uring_setup": (425,),
    "kexec_file_load": (320, -1, -1),
    "keyctl": (250,),
    "memfd_create": (319,),
    "mount": (165,),
    "msgget": (68,),
    "name_to_handle_at": (303, -1),
    "open_by_handle_at": (304, -1),
    "perf_event_open": (298,),
    "personality": (135, 0xFFFFFFFF),
    "pivot_root": (155,),
    "quotactl": (179,),
    "setns": (308, -1),
    "shmget": (29,),
    "socketpair": (53,),
    "swapon": (167,),
    "syslog": (103, 10),
    "umount": (166,),
    "unshare": (272,),
    "userfaultfd": (323,),
}


def attempt(function: Callable[[Target], object]) -> Callable[[Target], object]:
    """Add a function that raises OSError, or returns nothing, if it reaches nothing."""
    _ATTEMPTS[function.__name__] = function
    return function


def try_all(target: Target) -> dict[str, str]:
    """Return what was reached, by attempt."""
    reached = {}
    for name, function in _ATTEMPTS.items():
        try:
            found = function(target)
        except (OSError, subprocess.SubprocessError, RuntimeError):
            continue
        if found:
            reached[name] = str(found)[:100]
    if platform.machine() == "x86_64":
        for name, (number, *arguments) in _CALLS.items():
            if (error := call(number, *arguments)) not in (errno.EPERM, errno.ENOSYS):
                reached[name] = os.strerror(error)
    return reached


def call(number: int, *arguments: int) -> int:
    """Make a system call and return its error's number, 0 for none."""
    numbers = [ctypes.c_long(one) for one in (*arguments, *[0] * (6 - len(arguments)))]
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *numbers)
    return ctypes.get_errno() if result < 0 else 0


# ---- files ---------------------------------------------------------------------------------------


@attempt
def read_secrets(target: Target) -> object:
    return [path for path in target["secrets"] if can(lambda path=path: Path(path).read_bytes())]


@attempt
def list_folders(target: Target) -> object:
    folders = ["/", "/etc", "/proc", "/root", "/home", *target["folders"]]
    return [path for path in folders if can(lambda path=path: os.listdir(path))]


@attempt
def read_the_system_s_files(target: Target) -> object:
    files = ["/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/self/environ", "/proc/version"]
    return [path for path in files if can(lambda path=path: Path(path).read_bytes())]


@attempt
def read_the_daemon_in_proc(target: Target) -> object:
    names = ("mem", "environ", "maps", "cmdline", "status", "fd")
    found = [name for name in names if can(lambda name=name: open_any(target, name))]
    return found


def open_any(target: Target, name: str) -> None:
    os.close(os.open(f"/proc/{target['pid']}/{name}", os.O_RDONLY))


@attempt
def write_files(target: Target) -> object:
    folders = ["/tmp", "/dev/shm", "/var/tmp", str(Path(os.__file__).parent), *target["folders"]]
    return [folder for folder in folders if can(lambda folder=folder: write(Path(folder)))]


def write(folder: Path) -> None:
    path = folder / "planted.kernels"
    path.write_bytes(b"code")
    path.unlink()


@attempt
def change_files(target: Target) -> object:
    changes: list[Callable[[], object]] = [
        lambda: os.truncate(target["secrets"][0], os.path.getsize(target["secrets"][0])),
        lambda: os.chmod(target["secrets"][0], 0o600),
        lambda: os.chmod(1, os.fstat(1).st_mode & 0o777),
        lambda: os.utime(target["secrets"][0]),
        lambda: os.link(target["secrets"][0], "/tmp/linked"),
        lambda: os.symlink("/etc", "/tmp/linked"),
        lambda: os.mkdir("/tmp/made"),
        lambda: os.mkfifo("/tmp/made"),
    ]
    return [number for number, change in enumerate(changes) if can(change)]


# ---- network -------------------------------------------------------------------------------------


@attempt
def connect_by_tcp(target: Target) -> object:
    with socket.create_connection(("127.0.0.1", target["tcp"]), 2):
        return True


@attempt
def send_by_udp(target: Target) -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        return sender.sendto(b"x", ("127.0.0.1", target["udp"]))


@attempt
def connect_to_local_services(target: Target) -> object:
    reached = []
    for address in ("\0" + target["abstract"], target["unix"]):
        with socket.socket(socket.AF_UNIX) as one:
            if can(lambda one=one, address=address: one.connect(address)):
                reached.append(address)
    return reached


@attempt
def make_other_sockets(target: Target) -> object:
    families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, 40)  # vsock
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW)
    return [
        (int(family), int(kind))
        for family in families
        for kind in kinds
        if can(lambda family=family, kind=kind: socket.socket(family, kind).close())
    ]


@attempt
def connect_an_inherited_socket(target: Target) -> object:
    return [
        descriptor
        for descriptor in range(3, 32)
        if can(lambda descriptor=descriptor: reconnect(descriptor, target["unix"]))
    ]


def reconnect(descriptor: int, address: str) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        one.connect(address)


# ---- other processes -----------------------------------------------------------------------------


@attempt
def read_the_daemon_s_memory(target: Target) -> object:
    """The memory at an address holds a secret."""
    copy = ctypes.create_string_buffer(len(target["secret"]))
    parts = [
        (ctypes.c_size_t * 2)(a, len(copy)) for a in (ctypes.addressof(copy), target["address"])
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("process_vm_readv", "process_vm_writev"):
        getattr(libc, name)(target["pid"], parts[0], 1, parts[1], 1, 0)
    return copy.raw.decode(errors="replace") == target["secret"]


@attempt
def trace_the_daemon(target: Target) -> object:
    seize = 0x4206  # PTRACE_SEIZE, which does not stop it
    return ctypes.CDLL(None, use_errno=True).ptrace(seize, target["pid"], 0, 0) == 0


@attempt
def signal_processes(target: Target) -> object:
    return [pid for pid in (target["pid"], 1, 0, -1) if can(lambda pid=pid: os.kill(pid, 0))]


@attempt
def open_the_daemon(target: Target) -> object:
    os.close(os.pidfd_open(target["pid"]))
    return True


@attempt
def change_the_daemon(target: Target) -> object:
    pid = target["pid"]
    changes: list[Callable[[], object]] = [
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)),
        lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)),
    ]
    return [number for number, change in enumerate(changes) if can(change)]


@attempt
def have_the_kernel_signal_the_daemon(target: Target) -> object:
    import fcntl

    fcntl.fcntl(2, fcntl.F_SETOWN, target["pid"])
    return True


@attempt
def start_programs(target: Target) -> object:
    programs = ("/bin/sh", "/usr/bin/env", sys.executable)
    return [path for path in programs if can(lambda path=path: subprocess.run([path, "-c", "1"]))]


@attempt
def fork(target: Target) -> object:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


@attempt
def fill_the_machine_with_threads(target: Target) -> object:
    go = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(_MAX_THREADS):
            thread = threading.Thread(target=go.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        return False
    finally:
        go.set()
        for thread in threads:
            thread.join()
    return True


# ---- privileges ----------------------------------------------------------------------------------


@attempt
def become_root(target: Target) -> object:
    changes = [lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.setgid(0)]
    return [number for number, change in enumerate(changes) if can(change)]


@attempt
def raise_limits(target: Target) -> object:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    names = (resource.RLIMIT_CORE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    return [name for name in names if can(lambda name=name: resource.setrlimit(name, unlimited))]


def can(function: Callable[[], object]) -> bool:
    """Return whether a function ends without an error of the system."""
    try:
        function()
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return True


def make_32_bit_call() -> None:
    """Call the kernel by its 32-bit interface, which has other numbers: getpid is 20."""
    code = bytes.fromhex("53 b8 14 00 00 00 cd 80 5b c3")  # push rbx; mov eax, 20; int 0x80; …
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())


if __name__ == "__main__":
    print(json.dumps(try_all(json.loads(sys.argv[1]))))
