"""Run one task: load its weights once, compile once, then step after step with little Python.

A ``TaskProgram`` owns resident buffers for weights, inputs, outputs and intermediate values. A
``State`` holds each state tensor twice, the old and the new value; a step reads one and writes the
other, and they change places only when the step has succeeded. So a failed step leaves the state
as it was, and any number of executions can share one program.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinygrad.device import Buffer, Device, TinyELF
from tinygrad.dtype import dtypes
from tinygrad.helpers import Target
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.uop.ops import sym_infer

from splitup.codec import compute_digest
from splitup.errors import InvalidInput, InvalidModel
from splitup.graph.buffers import (
    make_port_reader,
    make_port_writer,
    make_reader,
    make_writer,
)
from splitup.graph.cost import compute_state_bytes, compute_vram_bytes
from splitup.graph.devices import DeviceReport, select_device
from splitup.graph.ir import Graph, count_rows
from splitup.graph.kernelcache import KernelCache
from splitup.graph.products import BoundProduct, Product
from splitup.graph.rules import check_graph, load_graph
from splitup.graph.schedule import Executable, Place, Role, Schedule, compile_graph
from splitup.graph.threads import KernelThreads, get_kernel_threads
from splitup.tensors import SafeTensor, TensorSpec, parse_safetensors, validate_safetensors

LaunchFunction = Callable[[], Any]


def describe_device(index: int = 0) -> DeviceReport:
    """Return the device, code generator and determinism class of this process."""
    return select_device(index)


class State:
    """The state tensors of one execution on one program, zero at first."""

    __slots__ = ("_buffers", "_launches", "_parity", "_program")

    def __init__(self, program: TaskProgram, buffers: tuple[list[Buffer], list[Buffer]]) -> None:
        self._program = program
        self._buffers = buffers
        self._parity = 0
        self._launches = (
            program._bind(buffers[0], buffers[1]),
            program._bind(buffers[1], buffers[0]),
        )


class TaskProgram:
    """One task, or a whole uncut model, compiled for this process's device."""

    def __init__(
        self,
        graph_bytes: bytes,
        weights: bytes | Path | None,
        *,
        device_index: int = 0,
        threads: int = 1,
        cache: KernelCache | None = None,
    ) -> None:
        """Check, load, compile and run once. Takes seconds of CPU, less with a warm ``cache``.

        ``weights`` is a safetensors file, or its bytes; None for a task without weights. Results
        do not depend on ``threads``. Raises InvalidModel when the graph breaks a rule or the
        weights are not those it names.
        """
        graph = load_graph(graph_bytes)
        self._report = select_device(device_index)
        self._pool = get_kernel_threads(threads)
        self.task_id = compute_digest(graph_bytes)
        self._takes_products = True
        self._start(graph, open_weights(weights), cache)

    @classmethod
    def from_graph(
        cls,
        graph: Graph,
        get_bytes: Callable[[str], memoryview],
        *,
        device_index: int = 0,
        threads: int = 1,
        cache: KernelCache | None = None,
        takes_products: bool = True,
    ) -> TaskProgram:
        """Make a program of a graph in memory; ``get_bytes`` gives each weight's bytes by name.

        Without ``takes_products`` all kernels are tinygrad's, and none are kept: to compare with.
        """
        check_graph(graph)
        program = cls.__new__(cls)
        program._report = select_device(device_index)
        program._pool = get_kernel_threads(threads)
        program.task_id = compute_digest(graph.to_bytes())
        program._takes_products = takes_products
        program._start(graph, get_bytes, cache if takes_products else None)
        return program

    def _start(
        self, graph: Graph, get_bytes: Callable[[str], memoryview], cache: KernelCache | None
    ) -> None:
        values = check_graph(graph)
        self.inputs: tuple[TensorSpec, ...] = graph.inputs
        self.outputs: tuple[TensorSpec, ...] = tuple(
            values[output.node].make_spec(output.name) for output in graph.outputs
        )
        # what the kernels get for their variables; a step writes the numbers of its rows here
        self._rows = {symbol.name: ctypes.c_uint64(1) for symbol in graph.symbols}
        self.states: tuple[TensorSpec, ...] = graph.states
        self.state_bytes = compute_state_bytes(graph)
        self.vram_bytes = compute_vram_bytes(graph, values)
        self.device = self._report.device
        schedule = self._find_schedule(graph, cache)
        self._buffers: dict[Role, list[Buffer]] = {
            "input": self._allocate(schedule.inputs),
            "weight": self._allocate(schedule.weights),
            "value": self._allocate(schedule.values),
        }
        self._state_sizes = schedule.states
        self._load_weights(graph, get_bytes)
        self._writers = [
            make_port_writer(buffer, spec)
            for buffer, spec in zip(self._buffers["input"], graph.inputs, strict=True)
        ]
        self._calls = self._prepare(schedule)
        self._outputs: list[int | Callable[[], bytes]] = []
        for place, spec in zip(schedule.outputs, self.outputs, strict=True):
            argument = self._get_argument(place)
            self._outputs.append(
                argument[1]
                if isinstance(argument, tuple)
                else make_port_reader(argument, spec, self._rows)
            )
        self.run(self.new_state(), [bytes(spec.row_bytes) for spec in self.inputs])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory in use, with one state."""
        buffers = itertools.chain(*self._buffers.values())
        return int(sum(buffer.nbytes for buffer in buffers)) + self.state_bytes

    def new_state(self) -> State:
        """Allocate zeroed state tensors for one execution."""
        pair: tuple[list[Buffer], list[Buffer]] = ([], [])
        for buffers in pair:
            buffers += self._allocate(self._state_sizes)
            for buffer in buffers:
                make_writer(buffer)(bytes(buffer.nbytes))
        return State(self, pair)

    def run(self, state: State, inputs: Sequence[bytes | memoryview]) -> list[bytes]:
        """Compute one step and advance ``state``; returns the bytes of every output.

        Inputs are in the order of ``self.inputs``. Raises InvalidInput when their number or
        length is wrong, or when those of one symbol disagree on their rows; the state is then, as
        after any error, what it was.
        """
        if state._program is not self:
            raise InvalidInput("the state belongs to another program; use this one's new_state()")
        if len(inputs) != len(self.inputs):
            raise InvalidInput(f"the task takes {len(self.inputs)} inputs and got {len(inputs)}")
        rows = count_rows(self.inputs, inputs)
        for spec, data in zip(self.inputs, inputs, strict=True):
            if spec.dtype == "bool" and max(bytes(data)) > 1:
                raise InvalidInput(f"input '{spec.name}' is bool and holds a byte other than 0, 1")
        for name, count in rows.items():
            self._rows[name].value = count
        for write, data in zip(self._writers, inputs, strict=True):
            write(data)
        for launch in state._launches[state._parity]:
            launch()
        new_values = state._buffers[1 - state._parity]
        results = [
            make_reader(new_values[output])() if isinstance(output, int) else output()
            for output in self._outputs
        ]
        state._parity = 1 - state._parity
        return results

    def compute_state_digest(self, state: State) -> str:
        """Return the SHA-256 of all state tensors as they are now, concatenated in order."""
        digest = hashlib.sha256()
        for buffer in state._buffers[state._parity]:
            digest.update(make_reader(buffer)())
        return digest.hexdigest()

    def _load_weights(self, graph: Graph, get_bytes: Callable[[str], memoryview]) -> None:
        for weight, buffer in zip(graph.weights, self._buffers["weight"], strict=True):
            data = get_bytes(weight.name)
            if len(data) != weight.spec.nbytes:
                raise InvalidModel(
                    f"weight '{weight.name}' has {len(data)} bytes; the task wants {weight.spec}"
                )
            if hashlib.sha256(data).hexdigest() != weight.digest:
                raise InvalidModel(
                    f"weight '{weight.name}' has another digest than the task names; "
                    "fetch the weights again"
                )
            if weight.dtype == "bool" and max(bytes(data)) > 1:
                raise InvalidModel(f"weight '{weight.name}' is bool and holds more than 0 and 1")
            make_writer(buffer)(data)

    def _find_schedule(self, graph: Graph, cache: KernelCache | None) -> Schedule:
        key = (self.task_id, self._report.determinism_class, self.device.partition(":")[0])
        schedule = None if cache is None else cache.load(*key)
        self.is_from_cache = schedule is not None
        if schedule is None:
            schedule = compile_graph(graph, self.device, takes_products=self._takes_products)
            if cache is not None:
                cache.store(*key, schedule)
        return schedule

    def _allocate(self, sizes: Sequence[int]) -> list[Buffer]:
        return [Buffer(self.device, size, dtypes.uint8).ensure_allocated() for size in sizes]

    def _prepare(self, schedule: Schedule) -> list[_Call | _ProductCall]:
        """Load the machine code; returns the kernels in order with the buffers they take."""
        runtimes = [_load_executable(self.device, item) for item in schedule.executables]
        calls: list[_Call | _ProductCall] = []
        for launch in schedule.launches:
            arguments = [self._get_argument(place) for place in launch.places]
            if launch.kind == "product":
                product = schedule.products[launch.index]
                calls.append(_ProductCall(self.device, product, arguments, self._pool, self._rows))
            else:
                executable = schedule.executables[launch.index]
                runtime = runtimes[launch.index]
                calls.append(_Call(self.device, executable, runtime, arguments, self._rows))
        return calls

    def _get_argument(self, place: Place) -> Buffer | tuple[int, int]:
        if place.role == "old":
            return 0, place.index
        if place.role == "new":
            return 1, place.index
        buffer = self._buffers[place.role][place.index]
        if place.offset == 0 and place.nbytes == buffer.nbytes:
            return buffer
        return buffer.view(place.nbytes, dtypes.uint8, place.offset).ensure_allocated()

    def _bind(self, old: list[Buffer], new: list[Buffer]) -> list[LaunchFunction]:
        return [call.bind((old, new)) for call in self._calls]


class _Call:
    """One compiled kernel and its buffers; a pair stands for (old or new, state).

    ``rows`` holds what its variables are bound to when it is launched.
    """

    __slots__ = ("arguments", "device", "executable", "rows", "runtime")

    def __init__(
        self,
        device: str,
        executable: Executable,
        runtime: Any,
        arguments: list[Buffer | tuple[int, int]],
        rows: Mapping[str, ctypes.c_uint64],
    ) -> None:
        self.device, self.executable, self.arguments = device, executable, arguments
        self.runtime, self.rows = runtime, rows

    def bind(self, states: tuple[list[Buffer], list[Buffer]]) -> LaunchFunction:
        """Return a function of no arguments that launches the kernel on these state tensors."""
        raw = _resolve(self.device, self.arguments, states)
        executable = self.executable
        bound = [self.rows[name] for name in executable.variables]
        if isinstance(self.runtime, CPUProgram) and executable.global_size[0] == 1:
            # tinygrad's own call builds these arguments anew each time: 5 µs instead of 1
            addresses = [ctypes.c_uint64(buffer.va_addr) for buffer in raw]
            return functools.partial(self.runtime.fxn, *addresses, *bound)
        if not bound:
            return functools.partial(
                self.runtime,
                *raw,
                global_size=executable.global_size,
                local_size=executable.local_size,
            )

        def launch() -> None:
            values = {name: self.rows[name].value for name in executable.variables}
            self.runtime(
                *raw,
                global_size=_infer_sizes(executable.global_size, values),
                local_size=_infer_sizes(executable.local_size, values),
                vals=tuple(values.values()),
            )

        return launch


class _ProductCall:
    """One matrix product, computed by code of our own, and its buffers."""

    __slots__ = ("arguments", "device", "pool", "product", "rows")

    def __init__(
        self,
        device: str,
        product: Product,
        arguments: list[Buffer | tuple[int, int]],
        pool: KernelThreads,
        rows: Mapping[str, ctypes.c_uint64],
    ) -> None:
        self.device, self.product, self.arguments = device, product, arguments
        self.pool, self.rows = pool, rows

    def bind(self, states: tuple[list[Buffer], list[Buffer]]) -> LaunchFunction:
        """Return a function of no arguments that computes the product on these state tensors."""
        raw = _resolve(self.device, self.arguments, states)
        return BoundProduct(self.product, [buffer.va_addr for buffer in raw], self.pool, self.rows)


def _load_executable(device: str, executable: Executable) -> Any:
    """Return tinygrad's runtime object of a kernel."""
    signature = tuple(
        (name, slot, getattr(dtypes, dtype), shape)
        for name, slot, dtype, shape in executable.signature
    )
    target = Target.parse(executable.target)
    return Device[device].runtime(TinyELF(executable.code, executable.name, target, signature))


def _infer_sizes(sizes: Sequence[Any] | None, values: dict[str, int]) -> tuple[Any, ...] | None:
    return None if sizes is None else tuple(sym_infer(size, values) for size in sizes)


def _resolve(
    device: str,
    arguments: Sequence[Buffer | tuple[int, int]],
    states: tuple[list[Buffer], list[Buffer]],
) -> list[Any]:
    """Return the device's own handles of a kernel's buffers."""
    buffers = [states[item[0]][item[1]] if isinstance(item, tuple) else item for item in arguments]
    return [buffer.get_buf(device) for buffer in buffers]


def open_weights(weights: bytes | Path | None) -> Callable[[str], memoryview]:
    """Return a function that gives a weight's bytes by name, from a validated safetensors file."""
    if weights is None:
        return functools.partial(_get_tensor, {}, memoryview(b""))
    if isinstance(weights, Path):
        table = validate_safetensors(weights)
        with weights.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return functools.partial(_get_tensor, table, memoryview(mapped))
    return functools.partial(_get_tensor, parse_safetensors(weights), memoryview(weights))


def _get_tensor(table: dict[str, SafeTensor], view: memoryview, name: str) -> memoryview:
    if (tensor := table.get(name)) is None:
        raise InvalidModel(f"the weights hold no tensor '{name}' that the task names")
    return view[tensor.start : tensor.end]
