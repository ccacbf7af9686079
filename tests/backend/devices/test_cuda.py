"""Launches on CUDA, by a driver that notes what it is asked. They were run on a card by hand."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

from tinygrad.dtype import dtypes

from splitup.backend.compiler.launch_sizes import LaunchTerms
from splitup.backend.devices.cuda import CudaLaunch, CudaStep

CONTEXT = 7


class Driver:
    """Records calls; a graph holds the arguments that its launches had when it was made."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.nodes: list[Any] = []

    def cuCtxSetCurrent(self, context: int) -> int:
        assert context == CONTEXT
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *sizes, stream, parameters, extra = rest
        assert (stream, parameters) == (None, None)
        self.calls.append((tuple(size.value for size in sizes), read_arguments(extra)))
        return 0

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        self.nodes = []
        return 0

    def cuGraphAddKernelNode(
        self, node: Any, graph: Any, before: Any, count: Any, given: Any
    ) -> int:
        assert count.value == (1 if self.nodes else 0) and (before is None) == (not self.nodes)
        found = given._obj
        sizes = (found.gridDimX, found.gridDimY, found.gridDimZ)
        sizes += (found.blockDimX, found.blockDimY, found.blockDimZ, found.sharedMemBytes)
        self.nodes.append((sizes, read_arguments(found.extra)))
        return 0

    def cuGraphInstantiate_v2(self, made: Any, *rest: Any) -> int:
        made._obj.value = 1 + len(self.calls)
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    def cuGraphLaunch(self, graph: Any, stream: None) -> int:
        self.calls.append(("graph", *self.nodes))
        return 0

    def cuGraphExecDestroy(self, graph: Any) -> int:
        self.calls.append("destroyed")
        return 0


def read_arguments(extra: Any) -> bytes:
    assert (extra[0], extra[2], extra[4]) == (1, 2, None)
    length = ctypes.c_size_t.from_address(extra[3]).value
    return ctypes.string_at(extra[1], length)


def make_launch(driver: Driver, rows: ctypes.c_uint64, *, is_tiled: bool = False) -> CudaLaunch:
    """Return a launch with two buffers and a number of rows, a group of 32 threads for each row."""
    kernel = SimpleNamespace(
        dev=SimpleNamespace(context=CONTEXT),
        prg=None,
        smem=0,
        signature=(
            ("x", 0, dtypes.float32, (4,)),
            ("y", 1, dtypes.float32, (4,)),
            (None, 2, dtypes.int32, ()),
        ),
    )
    regions = [ctypes.c_uint64(0x1000), ctypes.c_uint64(0x2000)]
    tiled = (kernel, ((("SHR", ("ADD", "T", 7), 3), 5), (64,))) if is_tiled else None
    return CudaLaunch(driver, kernel, LaunchTerms(regions, {"T": rows}, ("T", 5), (32,)), tiled)


def encode(rows: int) -> bytes:
    words = (0x1000).to_bytes(8, "little") + (0x2000).to_bytes(8, "little")
    return words + rows.to_bytes(4, "little")


def test_a_launch_has_its_buffers_and_as_many_groups_as_there_are_rows() -> None:
    driver, rows = Driver(), ctypes.c_uint64(3)
    launch = make_launch(driver, rows)
    launch()
    rows.value = 8
    launch()
    assert driver.calls == [
        ((3, 5, 1, 32, 1, 1, 0), encode(3)),
        ((8, 5, 1, 32, 1, 1, 0), encode(8)),
    ]


def test_a_launch_of_several_rows_has_as_many_groups_as_there_are_tiles() -> None:
    driver, rows = Driver(), ctypes.c_uint64(1)
    launch = make_launch(driver, rows, is_tiled=True)
    for count in (1, 9):
        rows.value = count
        launch()
    assert driver.calls == [
        ((1, 5, 1, 32, 1, 1, 0), encode(1)),
        ((2, 5, 1, 64, 1, 1, 0), encode(9)),
    ]


def test_rows_that_come_again_are_one_call_with_the_arguments_of_these_rows() -> None:
    driver, rows = Driver(), ctypes.c_uint64(1)
    step = CudaStep([make_launch(driver, rows), make_launch(driver, rows)])
    alone = ((1, 5, 1, 32, 1, 1, 0), encode(1))
    step()  # one by one
    step()  # again, and then the graph is made
    assert driver.calls == [alone] * 4
    step()
    assert driver.calls[4:] == [("graph", alone, alone)]
    rows.value = 2
    step()
    assert driver.calls[5:] == [((2, 5, 1, 32, 1, 1, 0), encode(2))] * 2
    rows.value = 1
    step()
    assert driver.calls[7:] == [("graph", alone, alone)]
    del step
    gc.collect()
    assert driver.calls[8:] == ["destroyed"]


def test_of_many_numbers_of_rows_only_the_first_have_graphs() -> None:
    driver, rows = Driver(), ctypes.c_uint64(1)
    step = CudaStep([make_launch(driver, rows)])
    for _ in range(3):
        for count in range(1, 9):
            rows.value = count
            step()
    graphs = [call for call in driver.calls if call[0] == "graph"]
    assert len(graphs) == 4 and len(driver.calls) == 24
