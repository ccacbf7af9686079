"""Profiles and drawings of small manifests made by hand."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from splitup_deploy.cutting.timing import predict_transfer_ps
from splitup_deploy.showing.drawing import draw_dot, draw_mermaid
from splitup_deploy.showing.profile import Profile, compute_profile
from splitup_deploy.showing.report import describe_model, format_time, render_model

from splitup.graph.manifest import (
    InputSource,
    Manifest,
    OutputPort,
    Port,
    Task,
    TaskInput,
    TaskSource,
)
from splitup.graph.manifest_rules import check_manifest


def make_manifest(edges: list[tuple[int, int]], label: str = "task") -> Manifest:
    """Return tasks 0 … n with these edges, 125 bytes each: a microsecond. The last gives y."""
    count = 1 + max(target for _, target in edges)
    tasks = []
    for index in range(count):
        sources = [source for source, target in edges if target == index]
        inputs = [
            TaskInput(name=f"v{s}", dtype="uint8", shape=(125,), source=TaskSource(task=s, port=0))
            for s in sources
        ] or [TaskInput(name="x", dtype="uint8", shape=(8,), source=InputSource(input="x"))]
        tasks.append(
            Task(
                task_id=f"{index:064x}",
                label=f"{label} {index}",
                inputs=tuple(inputs),
                outputs=(Port(name=f"v{index}", dtype="uint8", shape=(125,)),),
                graph_bytes=100,
                weights_digest="a" * 64,
                weights_bytes=300 * (index + 1),
                state_bytes=0,
                vram_bytes=1000 * (index + 1),
                flops=10_000,
                price_nano_usdc=1,
            )
        )
    manifest = Manifest(
        version=1,
        kind="function",
        tinygrad="0.14.0",
        inputs=(Port(name="x", dtype="uint8", shape=(8,)),),
        outputs=(OutputPort(name="y", dtype="uint8", shape=(125,), task=count - 1, port=0),),
        tasks=tuple(tasks),
        text=None,
    )
    check_manifest(manifest)
    return manifest


DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)]
HOP = predict_transfer_ps(125)


def test_the_critical_path_goes_through_the_slower_branch() -> None:
    profile = compute_profile(make_manifest(DIAMOND), [5, 70, 60, 5])
    assert (profile.critical, profile.latency_ps) == ((0, 1, 3), 80 + 2 * HOP)
    assert profile.levels == (0, 1, 1, 2)
    assert compute_profile(make_manifest(DIAMOND), [5, 60, 70, 5]).critical == (0, 2, 3)
    assert profile.imbalance == pytest.approx(70 / 35 - 1)


@given(st.data())
def test_the_critical_path_is_the_longest_path(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    edges = [(index - 1, index) for index in range(1, count)]
    more = st.tuples(st.integers(0, count - 2), st.integers(1, count - 1))
    edges += [e for e in data.draw(st.lists(more, max_size=6, unique=True)) if e[0] + 1 < e[1]]
    times = data.draw(st.lists(st.integers(0, 9 * HOP), min_size=count, max_size=count))
    profile = compute_profile(make_manifest(edges), times)

    def longest(task: int) -> int:
        sources = [source for source, target in edges if target == task]
        return times[task] + max((longest(source) + HOP for source in sources), default=0)

    assert profile.latency_ps == max(longest(task) for task in range(count))
    path = profile.critical
    assert all(edge in edges for edge in pairwise(path))
    assert sum(times[i] for i in path) + HOP * (len(path) - 1) == profile.latency_ps


def test_times_without_the_compiler_come_from_the_manifest() -> None:
    profile = compute_profile(make_manifest([(0, 1)]))
    assert profile.times_ps == (2000, 2000)  # 10,000 operations take longer than 600 bytes


def test_every_task_gets_the_smallest_card_it_fits() -> None:
    profile = compute_profile(make_manifest(DIAMOND), targets_bytes=[3000, 1500, 2500])
    assert profile.classes_bytes == (1500, 2500, 3000, None)
    assert profile.class_counts == {1500: 1, 2500: 1, 3000: 1, None: 1}
    described = describe_model(profile, "m")
    assert [row["tasks"] for row in described["classes"]] == [1, 1, 1, 1]
    assert described["tasks"][1]["class_bytes"] == 2500
    assert described["critical_path"] == list(profile.critical)
    text = render(profile)
    assert "· 2.5 kB card" in text and "fits no card" in text
    assert "1.5 kB: 1 task, 2.5 kB: 1 task, 3 kB: 1 task, none: 1" in text


def render(profile: Profile) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(render_model(profile, "m"))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_parallel_tasks_hang_from_a_branch() -> None:
    lines = render(compute_profile(make_manifest(DIAMOND), [5, 70, 60, 5])).splitlines()
    starts = [line.partition(" · ")[0] for line in lines if "VRAM ·" in line]
    assert starts == ["┌─● 0 task 0", "├─┬─● 1 task 1", "│ └─○ 2 task 2", "└─● 3 task 3"]
    assert any("← task 1 125 B, task 2 125 B, task 0 125 B" in line for line in lines)


def test_shapes_alone_have_no_id() -> None:
    profile = compute_profile(make_manifest(DIAMOND))
    described = describe_model(profile, None, is_complete=False)
    assert described["model_id"] is None and described["tasks"][0]["task_id"] is None
    console = Console(file=StringIO(), width=120)
    console.print(render_model(profile, "m", is_complete=False))
    assert isinstance(console.file, StringIO)
    assert "preview only: no weights here" in console.file.getvalue()


def test_mermaid() -> None:
    text = draw_mermaid(compute_profile(make_manifest(DIAMOND, 'a "b" <c>'), [5, 70, 60, 5]))
    lines = text.splitlines()
    assert lines[0] == "flowchart TD"
    assert '  t1["1 a #34;b#34; #60;c#62; 1<br>2 kB · 70 ps"]' in lines
    assert '  t0 ==>|"125 B"| t1' in lines and '  t0 -->|"125 B"| t2' in lines
    assert "  in0 -.-> t0" in lines and '  t3 -->|"125 B"| out0' in lines
    assert lines[-1] == "  class t0,t1,t3 critical"


def test_dot() -> None:
    text = draw_dot(compute_profile(make_manifest(DIAMOND, 'a "b" \\'), [5, 70, 60, 5]))
    lines = text.splitlines()
    assert (lines[0], lines[-1]) == ("digraph model {", "}")
    assert '  t1 [label="1 a \\"b\\" \\\\ 1\\n2 kB · 70 ps", penwidth=2]' in lines
    assert '  t0 -> t1 [label="125 B", penwidth=2]' in lines
    assert '  t0 -> t2 [label="125 B"]' in lines and '  in0 -> t0 [label=""]' in lines


@pytest.mark.parametrize(
    ("picoseconds", "text"), [(0, "0 ps"), (5130, "5.13 ns"), (38_480_000_000, "38.5 ms")]
)
def test_times(picoseconds: int, text: str) -> None:
    assert format_time(picoseconds) == text
