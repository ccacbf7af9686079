"""What a confined process can do: compute. What it tries is in ``tests.sandbox.attempts``."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from splitup.sandbox import access, confinement, landlock, system_calls
from splitup.sandbox.child import make_command
from tests.sandbox.attempts import Target
from tests.sandbox.target import check_reached

ROOT = Path(__file__).parents[2]
CONFINED = """
import json, sys
from splitup.sandbox import access, identity, landlock
from splitup.sandbox.confinement import confine
from tests.sandbox import attempts
{before}
lacks = "; ".join(confine({device!r}))
{after}
print(json.dumps([lacks, attempts.try_all(json.loads(sys.argv[1]))]))
"""
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine")


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def run_confined(
    target: Target, device: str | None, before: str = "", after: str = ""
) -> list[Any]:
    done = run(CONFINED.format(device=device, before=before, after=after), json.dumps(target))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_linux
def test_s10_hostile_code_reaches_nothing(target: Target) -> None:
    for device in (None, "CPU:X86"):
        lacks, reached = run_confined(target, device)
        check_reached(reached, lacks)


@needs_linux
def test_the_attempts_reach_nearly_everything_without_a_sandbox(target: Target) -> None:
    """Otherwise the test above would prove nothing."""
    code = "import json, sys; from tests.sandbox import attempts;"
    done = run(
        code + "print(json.dumps(attempts.try_all(json.loads(sys.argv[1]))))", json.dumps(target)
    )
    reached = json.loads(done.stdout.splitlines()[-1])
    assert {
        *("read_secrets", "list_folders", "read_the_daemon_in_proc", "write_files", "change_files"),
        *("connect_by_tcp", "send_by_udp", "connect_to_local_services", "make_other_sockets"),
        *("signal_processes", "open_the_daemon", "start_programs", "fork", "raise_limits"),
    } - {"raise_limits" if os.geteuid() else ""} <= reached.keys()
    if os.geteuid() == 0:
        assert {"read_the_daemon_s_memory", "trace_the_daemon", "become_root"} <= reached.keys()


@needs_linux
def test_each_layer_is_missed_when_it_is_away(target: Target) -> None:
    """Landlock alone keeps files, seccomp alone the network: both are needed."""
    without_landlock = "landlock.restrict = lambda allowed: None"
    _, reached = run_confined(target, "CPU:X86", before=without_landlock)
    assert "read_the_system_s_files" in reached and "connect_by_tcp" not in reached
    without_seccomp = "import pyseccomp; pyseccomp.SyscallFilter.load = lambda self: None"
    _, reached = run_confined(target, "CPU:X86", before=without_seccomp)
    assert "make_other_sockets" in reached and "read_secrets" not in reached


@needs_linux
def test_cuda_reads_the_least_address_names_its_threads_and_waits_for_children() -> None:
    """Without the first two its driver fails with error 304: seen on an H100, driver 580."""
    code = """
import socket, threading
from pathlib import Path
from splitup.sandbox import access
from splitup.sandbox.confinement import confine
access._DRIVERS = {"CUDA": (*access._NVIDIA, "/dev/null")}  # as if it were a card
confine("CUDA")

def name_thread():
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    comm.write_text("cuda-EvtHandlr")
    names.append(comm.read_text())

names = []
thread = threading.Thread(target=name_thread)
thread.start(); thread.join()
assert names == ["cuda-EvtHandlr\\n"], names
assert int(Path("/proc/sys/vm/mmap_min_addr").read_text()) >= 0
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0cuda"); listener.listen()
for refused in (
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    lambda: listener.connect("\\0elsewhere"),
    lambda: Path("/proc/sys/kernel/hostname").read_text(),
    lambda: Path("/proc/self/comm").write_text("x"),
):
    try:
        refused()
    except PermissionError:
        continue
    raise AssertionError(refused)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


@needs_linux
def test_s10_with_a_card_hostile_code_reaches_what_its_driver_needs_alone(target: Target) -> None:
    """Its own environment, files as large as it likes in its own folder, and memory with a name."""
    card = 'access._DRIVERS = {"CUDA": (*access._NVIDIA, "/dev/null")}'
    lacks, reached = run_confined(target, "CUDA", before=card)
    if reached.get("read_the_system_s_files") == "['/proc/self/environ']":
        del reached["read_the_system_s_files"]
    if reached.get("raise_limits") == f"[{int(resource.RLIMIT_FSIZE)}]":
        del reached["raise_limits"]
    reached.pop("memfd_create", None)
    check_reached(reached, lacks)


@pytest.mark.long  # in small: cli/test_app.py of doctor
@needs_linux
def test_a_system_that_lacks_something_says_so(target: Target) -> None:
    lacks, _ = run_confined(
        target, None, before="landlock.find_version = lambda: 0", after="attempts._ATTEMPTS.clear()"
    )
    assert "the kernel has no Landlock: models read what the node's user may read" in lacks
    lacks, _ = run_confined(
        target, None, before="import ctypes.util; ctypes.util.find_library = lambda name: None"
    )
    assert "apt install libseccomp2" in lacks
    lacks, _ = run_confined(
        target,
        None,
        before="identity.leave_namespaces = lambda: False; identity.leave_root = "
        "lambda *_, **__: False",
    )
    assert "models compute as the user who runs them" in lacks


def test_another_system_says_that_it_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    (sentence,) = confinement.confine()
    assert "darwin has neither Landlock nor seccomp" in sentence


@needs_linux
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls of 32-bit programs on x86-64")
def test_s10_a_system_call_of_the_32_bit_interface_ends_the_process() -> None:
    code = (
        "from splitup.sandbox.confinement import confine; from tests.sandbox import attempts; "
        "confine(); attempts.make_32_bit_call()"
    )
    assert run(code).returncode == -signal.SIGSYS


@needs_linux
def test_threads_that_run_already_would_escape() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    with pytest.raises(RuntimeError, match="threads were started"):
        confinement.confine()
    go.set()
    thread.join()


@needs_linux
def test_doctor_s_question_is_answered_in_json() -> None:
    done = subprocess.run(
        make_command("splitup.sandbox.confinement"), capture_output=True, text=True, check=True
    )
    assert isinstance(json.loads(done.stdout), list)


def test_neither_the_current_folder_nor_the_home_folder_counts_as_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    libraries = access.find_libraries()
    for folder in (tmp_path, Path.home(), Path("/"), ROOT):
        assert not any(folder.is_relative_to(library) for library in libraries)
    assert ROOT / "splitup" in libraries


def test_libraries_that_only_root_may_read_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    assert access.are_readable_by_all([Path("/usr/lib")])
    for mode in (0o700, 0o711, 0o755):
        folder.chmod(mode)
        parents = all(parent.stat().st_mode & 0o001 for parent in folder.parents)
        assert access.are_readable_by_all([folder]) == (parents and mode == 0o755)


def test_a_device_s_files_are_those_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"/dev/nvidia*": ["/dev/nvidia0", "/dev/nvidiactl"], "/dev/kfd": ["/dev/kfd"]}
    monkeypatch.setattr(
        access,
        "_expand",
        lambda patterns: [Path(path) for one in patterns for path in there.get(one, [])],
    )
    assert access.Device.find("CPU:X86").drivers == ()
    assert access.Device.find("CUDA:1").drivers == (Path("/dev/nvidia0"), Path("/dev/nvidiactl"))
    assert access.Device.find("AMD").drivers == (Path("/dev/kfd"),)
    for name in ("", "CL", "WEBGPU"):
        assert len(access.Device.find(name).drivers) == 3  # any that this machine has
    files = access.find_files(access.Device.find("AMD"))
    assert files[Path("/dev/kfd")] == landlock.FileRight.DEVICE


def test_opencl_on_the_processor_may_write_files_and_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_expand", lambda patterns: [])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    found = access.Device.find("CL")
    assert (found.compiler, found.writes_files) == (Path("/usr/bin/ld"), True)
    assert not access.Device.find("WEBGPU").writes_files


@needs_linux
def test_a_compiler_is_the_one_program_that_may_be_started(target: Target) -> None:
    """Where tinygrad's kernels need clang, it starts, and is as confined as its parent."""
    before = "import os; os.environ['CC'] = '/usr/bin/env'"
    after = (
        "import subprocess; subprocess.run(['/usr/bin/env'], check=True, capture_output=True); "
        "done = subprocess.run(['/usr/bin/env', '/bin/sh', '-c', '1'], capture_output=True); "
        "assert done.returncode == 126, done"
    )
    lacks, reached = run_confined(target, "CPU:CLANG", before=before, after=after)
    check_reached(
        {name: what for name, what in reached.items() if name not in ("start_programs", "fork")},
        lacks,
    )


def test_every_system_call_of_the_list_is_known() -> None:
    pyseccomp = pytest.importorskip("pyseccomp")
    for name in (*system_calls._BASE, *system_calls._PROGRAMS, *system_calls._DRIVERS):
        assert pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) != -1, name


def test_a_confined_process_does_not_stand_in_its_parents_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries look at the current folder, which the process's own user may not enter."""
    monkeypatch.chdir(tmp_path)
    code = "import os; from splitup.sandbox.confinement import confine; confine()"
    code += "; os.stat('.'); print(os.getcwd())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "/\n"), done.stderr
