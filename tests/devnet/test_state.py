from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitup.cli.verbs import app as user_app
from splitup.core.errors import ConfigurationError, Unavailable
from splitup.core.files import find_holder
from splitup.devnet import network
from splitup.devnet.commands import up_detached
from splitup.devnet.network import Devnet, DevnetOptions
from splitup.devnet.ports import find_free_ports, hold_port, is_port_free
from splitup.devnet.processes import read_tail, spawn
from splitup.devnet.state import (
    DevnetState,
    Lock,
    RunningProcess,
    Runtime,
    is_ready,
    read_runtime,
    write_runtime,
)
from splitup.devnet.status import NetworkHealth, NodeHealth


def test_ports_are_distinct_and_kept(tmp_path: Path) -> None:
    state = DevnetState.create(nodes=3, vram_bytes=10**9)
    ports = [port for _, port in state.named_ports()]
    assert len(set(ports)) == len(ports) == 3 + 4 + 3
    state.save(tmp_path)
    assert DevnetState.load(tmp_path) == state


def test_more_nodes_keep_the_ports_of_the_old_ones() -> None:
    state = DevnetState.create(nodes=2, vram_bytes=1)
    grown = state.resize(4)
    assert grown.node_ports[:2] == state.node_ports
    shrunk = grown.resize(1)
    assert [name for name, _ in shrunk.named_ports()][-1] == "node-0"
    assert shrunk.resize(4).node_ports == grown.node_ports


def test_ports_are_none_that_outgoing_connections_get() -> None:
    start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < max(start, 32_768) for port in find_free_ports(50))


def test_no_port_is_chosen_twice_before_its_server_listens() -> None:
    """A network's parties and its object store choose before any of them has started."""
    [port] = find_free_ports(1)
    assert is_port_free(port) and not hold_port(port)
    code = f"from splitup.devnet.ports import hold_port; print(hold_port({port}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", "nor does another process get it"


@pytest.mark.parametrize("nodes", [0, -1, 65])
def test_impossible_numbers_of_nodes_are_refused(nodes: int) -> None:
    with pytest.raises(ConfigurationError, match="--nodes is"):
        DevnetState.create(nodes=nodes, vram_bytes=1)


@pytest.mark.parametrize("members", [4, 7, 10, 31])
def test_a_committee_may_have_any_3f_plus_1(tmp_path: Path, members: int) -> None:
    state = DevnetState.create(nodes=2, vram_bytes=1, members=members)
    assert state.members == len(set(state.member_ports)) == members
    state.save(tmp_path)
    assert DevnetState.load(tmp_path) == state == state.resize(2)


@pytest.mark.parametrize("members", [1, 3, 5, 6, 9, 34, -2])
def test_committees_of_other_sizes_are_refused(members: int) -> None:
    with pytest.raises(ConfigurationError, match="give 4, 7, 10 … or 31"):
        DevnetState.create(nodes=2, vram_bytes=1, members=members)


async def test_a_network_keeps_its_members(tmp_path: Path) -> None:
    DevnetState.create(nodes=2, vram_bytes=1, members=7).save(tmp_path)
    net = Devnet(DevnetOptions(tmp_path, members=4), print)
    with pytest.raises(ConfigurationError, match="has 7 members, and that is fixed"):
        await net.start()
    assert find_holder(tmp_path) is None


async def test_nodes_keep_their_memory(tmp_path: Path) -> None:
    DevnetState.create(nodes=1, vram_bytes=10**9).save(tmp_path)
    with pytest.raises(ConfigurationError, match=r"have 1 GB of memory .* that is fixed"):
        await Devnet(DevnetOptions(tmp_path, vram_bytes=10**8), print).start()


async def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")  # which names no file

    monkeypatch.setattr(Path, "replace", fill)
    with pytest.raises(Unavailable, match=rf"cannot use {tmp_path}/.*\(No space left on device\)"):
        await Devnet(DevnetOptions(tmp_path), print).start()
    assert find_holder(tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="what was left is found in /proc")
def test_what_was_left_has_freed_its_ports(tmp_path: Path) -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
    code += "block = bytearray(b'x' * 2**28); print(flush=True); sys.stdin.read()"
    for port in find_free_ports(3):
        left = subprocess.Popen(
            [sys.executable, "-c", code, str(port), f"{tmp_path}/node-0/node.toml"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with left:
            assert left.stdout is not None and left.stdout.readline()
            write_runtime(
                tmp_path, Runtime(True, (RunningProcess("node-0", left.pid, "log"),), os.getpid())
            )
            Devnet(DevnetOptions(tmp_path), print)._stop_leftovers()
            assert is_port_free(port)
            assert left.poll() == -signal.SIGKILL


def test_busy_port_is_one_sentence(tmp_path: Path) -> None:
    state = DevnetState.create(nodes=1, vram_bytes=1)
    state.check_ports(tmp_path)
    with socket.create_server(("127.0.0.1", state.gateway_ports[0])):
        assert not is_port_free(state.gateway_ports[0])
        with pytest.raises(
            ConfigurationError, match=r"which this network's gateway-0 uses, is taken"
        ):
            state.check_ports(tmp_path)


def make_health(own: int, joined: int, *, silent_store: str = "") -> NetworkHealth:
    node = NodeHealth("0x1", "http://n:1", 1, own=True, answers=True, in_snapshot=True, tasks=())
    return NetworkHealth(
        block=1,
        has_group_key=True,
        gateways=("a", "b"),
        members=("a", "b", "c", "d"),
        nodes=(node,) * own + (replace(node, own=False),) * joined,
        wanted_nodes=5,
        wanted_members=4,
        silent_store=silent_store,
    )


def test_nodes_that_joined_do_not_make_a_network_ready() -> None:
    health = make_health(own=4, joined=2)
    assert health.describe().endswith(" 4/5 nodes, 2 more joined") and not health.is_ready()
    assert make_health(own=5, joined=0).describe().endswith(" 5/5 nodes")
    assert make_health(own=5, joined=0).is_ready()


def test_a_store_that_does_not_answer_is_named() -> None:
    health = make_health(own=5, joined=0, silent_store="http://127.0.0.1:9")
    assert "store at http://127.0.0.1:9 does not answer" in health.describe()
    assert not health.is_ready() and not health.to_dict()["object_store"]


def test_a_detached_start_says_why_it_failed(tmp_path: Path) -> None:
    state = DevnetState.create(nodes=1, vram_bytes=1)
    state.save(tmp_path)
    log = tmp_path / "logs" / "supervisor.log"
    log.parent.mkdir()
    log.write_text("error: of an earlier start\n")
    with socket.create_server(("127.0.0.1", state.chain_port)):
        with pytest.raises(ConfigurationError, match=rf"^port {state.chain_port}, which .* --dir"):
            up_detached(DevnetOptions(tmp_path), print, print)


def test_a_network_that_is_stopped_while_it_starts_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop_early(*_: Any, **_options: Any) -> None:
        return

    monkeypatch.setattr(network, "run_devnet", stop_early)
    result = CliRunner().invoke(user_app, ["up", "--dir", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (130, "stopped before the network was ready\n")


def test_damaged_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "devnet.json").write_text('{"version": 99}')
    with pytest.raises(ConfigurationError, match="start a new network"):
        DevnetState.load(tmp_path)


def test_only_one_supervisor_at_a_time(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert find_holder(tmp_path) is None
    first.acquire()
    assert find_holder(tmp_path) == os.getpid()
    with pytest.raises(ConfigurationError, match=f"running already .process {os.getpid()}."):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    assert find_holder(tmp_path) is None


def test_a_network_is_not_ready_by_the_notes_of_an_earlier_supervisor(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.acquire()
    write_runtime(tmp_path, Runtime(True, (), os.getpid() + 1))  # it was killed
    assert not is_ready(tmp_path, os.getpid())
    write_runtime(tmp_path, Runtime(True, (), os.getpid()))
    assert is_ready(tmp_path, os.getpid())
    lock.release()
    assert not is_ready(tmp_path, os.getpid())


def test_runtime_survives_and_damage_is_nothing(tmp_path: Path) -> None:
    assert read_runtime(tmp_path) == Runtime(False, ())
    runtime = Runtime(True, (RunningProcess("chain", 5, "/x"),), 7)
    write_runtime(tmp_path, runtime)
    assert read_runtime(tmp_path) == runtime
    (tmp_path / "runtime.json").write_text("{")
    assert read_runtime(tmp_path) == Runtime(False, ())


def test_an_ended_child_tells_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"]
    child = spawn("node-7", command, log=tmp_path / "node.log")
    child.process.wait()
    with pytest.raises(Unavailable, match=r"node-7 ended with exit code 3(.|\n)*out of luck"):
        child.check_running()


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    log = tmp_path / "log"
    child = spawn("deaf", [sys.executable, "-c", code + "signal.pause()"], log=log)
    while "up" not in read_tail(log):
        child.check_running()
    child.stop(timeout_s=0.2)
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from splitup.devnet.processes import spawn; "
        f"c = spawn('c', [sys.executable, '-c', 'import time; time.sleep(60)'], "
        f"log=Path({str(tmp_path / 'log')!r})); print(c.pid, flush=True); time.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    descriptor = os.pidfd_open(pid)
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    try:
        assert select.select([descriptor], [], [], 10)[0], "the child outlived its supervisor"
    finally:
        os.close(descriptor)


def test_a_missing_program_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be started"):
        spawn("x", [tmp_path / "absent"], log=tmp_path / "log")
