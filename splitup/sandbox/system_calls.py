"""seccomp: a process gives up, for good, all system calls but those that computing needs.

A call that is not listed fails with EPERM; so does one with other arguments than those listed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

_CLONE_THREAD: Final = 0x00010000
_NEW_NAMESPACES: Final = 0x7E020080  # all flags CLONE_NEW… that ``clone`` takes
_FCNTL: Final = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, …CLOEXEC
_IOCTL: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # of terminals and descriptors
_CUDA_SOCKET: Final = (1, 0x80005)  # AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC: nobody can be reached
_PRCTL: Final = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA

_MEMORY: Final = (
    *("brk", "madvise", "mlock", "mmap", "mprotect", "mremap", "msync", "munlock", "munmap"),
    *("mincore",),
)
_FILES: Final = (
    *("access", "close", "close_range", "dup", "dup2", "dup3", "faccessat", "faccessat2"),
    *("fadvise64", "fstat", "fstatfs", "getcwd", "getdents64", "lseek", "lstat", "newfstatat"),
    *("open", "openat", "pipe", "pipe2", "poll", "ppoll", "pread64", "preadv", "pselect6"),
    *("pwrite64", "pwritev", "read", "readlink", "readlinkat", "readv", "select", "stat"),
    *("statfs", "statx", "write", "writev"),
)
_INHERITED_SOCKETS: Final = (  # nothing here makes, binds or connects one
    *("getpeername", "getsockname", "getsockopt", "recvfrom", "recvmsg", "sendmsg", "sendto"),
    *("setsockopt", "shutdown"),
)
_THREADS: Final = (
    *("arch_prctl", "exit", "exit_group", "futex", "get_robust_list", "getcpu", "gettid"),
    *("membarrier", "restart_syscall", "rseq", "sched_getaffinity", "sched_getparam"),
    *("sched_getscheduler", "sched_yield", "set_robust_list"),
    *("set_tid_address", "getpriority"),
)
_SIGNALS: Final = (
    *("pause", "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend"),
    *("rt_sigtimedwait", "sigaltstack", "alarm", "getitimer", "setitimer"),
)
_QUESTIONS: Final = (
    *("clock_getres", "clock_gettime", "clock_nanosleep", "getegid", "geteuid", "getgid"),
    *("getgroups", "getpgid", "getpgrp", "getpid", "getppid", "getrandom", "getresgid"),
    *("getresuid", "getrlimit", "getrusage", "getsid", "gettimeofday", "getuid", "nanosleep"),
    *("sysinfo", "time", "times", "uname"),
)
_BASE: Final = _MEMORY + _FILES + _INHERITED_SOCKETS + _THREADS + _SIGNALS + _QUESTIONS
_FORKS: Final = ("fork", "wait4", "waitid")
_PROGRAMS: Final = ("chdir", "chmod", "execve", "umask", "vfork")
_DRIVERS: Final = (  # of GPUs
    *("epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_wait", "eventfd2", "fdatasync"),
    *("fsync", "ftruncate"),
    # CUDA's driver opens a socket for the processes that it forks; whether it works without one was
    # not tried on a card. Nothing connects, and only local addresses exist for it.
    *("accept4", "bind", "listen"),
    *("get_mempolicy", "ioctl", "mbind", "memfd_create", "mkdir", "mkdirat", "mlock2", "rename"),
    *("rmdir", "sched_get_priority_max", "sched_get_priority_min", "set_mempolicy", "unlink"),
    *("unlinkat",),
)


def make_filter(*, forks: bool, starts_programs: bool, uses_driver: bool) -> Any:
    """Return a filter of system calls, in force for this process after ``load()``.

    With ``forks`` the process may fork, with ``starts_programs`` start other programs as well; all
    stay as restricted as it is. With ``uses_driver`` it may make the calls of a GPU's driver.
    Raises RuntimeError where the library libseccomp is missing; ``load`` raises OSError where the
    kernel has no seccomp.
    """
    import pyseccomp  # type: ignore[import-untyped]  # Linux only; searches for its library

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    # Kernels before 5.16 would otherwise slow all code in the process down against Spectre 4.
    rules.set_attr(pyseccomp.Attr.CTL_SSB, 1)
    names = [*_BASE]
    if uses_driver:
        names += _DRIVERS
    if forks or starts_programs:
        names += _FORKS
    if starts_programs:
        names += _PROGRAMS
    for name in names:
        _allow(pyseccomp, rules, name, [])
    own = os.getpid()
    arguments: dict[str, Sequence[Mapping[int, int]]] = {
        "fcntl": [{1: command} for command in _FCNTL],
        "ioctl": [] if uses_driver else [{1: command} for command in _IOCTL],
        "socket": [dict(enumerate(_CUDA_SOCKET))] if uses_driver else [],
        "prctl": [{0: option} for option in _PRCTL],
        "prlimit64": [{0: 0}],  # of this process itself
        "kill": [{0: own}],
        "setpriority": [{0: os.PRIO_PROCESS, 1: 0}],
        "tgkill": [{0: own}],
    }
    for name, choices in arguments.items():
        for choice in choices:
            equal = [pyseccomp.Arg(place, pyseccomp.EQ, value) for place, value in choice.items()]
            _allow(pyseccomp, rules, name, equal)
    mask, value = (_NEW_NAMESPACES, 0) if forks or starts_programs else (_CLONE_THREAD,) * 2
    flags = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, mask, value)
    _allow(pyseccomp, rules, "clone", [flags])
    # its flags lie in memory, where no filter reads them; C libraries then use ``clone``
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    return rules


def _allow(pyseccomp: Any, rules: Any, name: str, arguments: Sequence[Any]) -> None:
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    if number >= 0:  # negative: this architecture does not have it
        rules.add_rule(pyseccomp.ALLOW, number, *arguments)
