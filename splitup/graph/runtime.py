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
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinygrad.device import Buffer
from tinygrad.engine.realize import compile_linear, get_call_arg_uops, get_runtime
from tinygrad.helpers import Context
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.schedule import create_linear_with_vars
from tinygrad.schedule.memory import memory_plan_rewrite
from tinygrad.tensor import transform_to_call
from tinygrad.uop.ops import Ops, UOp

from splitup.codec import compute_digest
from splitup.errors import InvalidInput, InvalidModel
from splitup.graph.bridge import Lowered, get_tinygrad_dtype, write_graph
from splitup.graph.cost import compute_state_bytes, compute_vram_bytes
from splitup.graph.devices import DeviceReport, select_device
from splitup.graph.ir import Graph
from splitup.graph.products import BoundProduct, Product, find_product, is_supported, split_products
from splitup.graph.rules import check_graph, load_graph
from splitup.graph.threads import KernelThreads
from splitup.tensors import SafeTensor, TensorSpec, parse_safetensors, validate_safetensors

Launch = Callable[[], Any]


def describe_device() -> DeviceReport:
    """Return the device, code generator and determinism class of this process."""
    return select_device()


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

    def __init__(self, graph_bytes: bytes, weights: bytes | Path | None, threads: int = 1) -> None:
        """Check, load, compile and run once. Takes seconds of CPU.

        ``weights`` is a safetensors file, or its bytes; None for a task without weights. Results
        do not depend on ``threads``. Raises InvalidModel when the graph breaks a rule or the
        weights are not those it names.
        """
        graph = load_graph(graph_bytes)
        self._pool = KernelThreads(threads)
        self.task_id = compute_digest(graph_bytes)
        self._start(graph, open_weights(weights))

    @classmethod
    def from_graph(
        cls, graph: Graph, get_bytes: Callable[[str], memoryview], threads: int = 1
    ) -> TaskProgram:
        """Make a program of a graph in memory; ``get_bytes`` gives each weight's bytes by name."""
        check_graph(graph)
        program = cls.__new__(cls)
        program._pool = KernelThreads(threads)
        program.task_id = compute_digest(graph.to_bytes())
        program._start(graph, get_bytes)
        return program

    def _start(self, graph: Graph, get_bytes: Callable[[str], memoryview]) -> None:
        values = check_graph(graph)
        self.inputs: tuple[TensorSpec, ...] = graph.inputs
        self.outputs: tuple[TensorSpec, ...] = tuple(
            TensorSpec(output.name, values[output.node].dtype, values[output.node].shape)
            for output in graph.outputs
        )
        self.states: tuple[TensorSpec, ...] = graph.states
        self.state_bytes = compute_state_bytes(graph)
        self.vram_bytes = compute_vram_bytes(graph, values)
        self.device = select_device().device
        lowered = write_graph(graph, self.device)
        self._resident: dict[UOp, Buffer] = {}
        self._load_weights(graph, lowered, get_bytes)
        self._writers = [_make_writer(self._allocate(uop)) for uop in lowered.inputs]
        self._calls = self._compile(lowered)
        self._outputs = [
            lowered.updates.index(uop)
            if uop in lowered.updates
            else _make_reader(self._allocate(uop))
            for uop in lowered.outputs
        ]
        self.run(self.new_state(), [bytes(spec.nbytes) for spec in self.inputs])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory in use, with one state."""
        buffers = {id(buffer.base): buffer.base.nbytes for buffer in self._resident.values()}
        return int(sum(buffers.values())) + self.state_bytes

    def new_state(self) -> State:
        """Allocate zeroed state tensors for one execution."""
        pair: tuple[list[Buffer], list[Buffer]] = ([], [])
        for buffers in pair:
            for spec in self.states:
                dtype = get_tinygrad_dtype(spec.dtype)
                size = spec.nbytes // dtype.itemsize
                buffers.append(buffer := Buffer(self.device, size, dtype).allocate())
                _make_writer(buffer)(bytes(spec.nbytes))
        return State(self, pair)

    def run(self, state: State, inputs: Sequence[bytes | memoryview]) -> list[bytes]:
        """Compute one step and advance ``state``; returns the bytes of every output.

        Inputs are in the order of ``self.inputs``. Raises InvalidInput when their number or
        length is wrong; the state is then, as after any error, what it was.
        """
        if state._program is not self:
            raise InvalidInput("the state belongs to another program; use this one's new_state()")
        if len(inputs) != len(self.inputs):
            raise InvalidInput(f"the task takes {len(self.inputs)} inputs and got {len(inputs)}")
        for spec, data in zip(self.inputs, inputs, strict=True):
            if len(data) != spec.nbytes:
                raise InvalidInput(
                    f"input '{spec.name}' has {len(data)} bytes; {spec} has {spec.nbytes}"
                )
            if spec.dtype == "bool" and max(bytes(data)) > 1:
                raise InvalidInput(f"input '{spec.name}' is bool and holds a byte other than 0, 1")
        for write, data in zip(self._writers, inputs, strict=True):
            write(data)
        for launch in state._launches[state._parity]:
            launch()
        new_values = state._buffers[1 - state._parity]
        results = [
            _make_reader(new_values[output])() if isinstance(output, int) else output()
            for output in self._outputs
        ]
        state._parity = 1 - state._parity
        return results

    def _allocate(self, uop: UOp, buffer: Buffer | None = None) -> Buffer:
        if uop not in self._resident:
            self._resident[uop] = (
                buffer or Buffer(self.device, uop.max_numel(), uop.dtype)
            ).ensure_allocated()
        return self._resident[uop]

    def _load_weights(
        self, graph: Graph, lowered: Lowered, get_bytes: Callable[[str], memoryview]
    ) -> None:
        for weight, uop in zip(graph.weights, lowered.weights, strict=True):
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
            _make_writer(self._allocate(uop))(data)

    def _compile(self, lowered: Lowered) -> list[_Call | _ProductCall]:
        """Schedule and compile; returns the kernels in order with the buffers they take."""
        held = {*lowered.inputs, *lowered.weights, *lowered.states}
        held |= {*lowered.outputs, *lowered.updates}
        with Context(BEAM=0, TRACK_MATCH_STATS=0):
            call, _ = transform_to_call(UOp.sink(*lowered.roots))
            linear, variables = create_linear_with_vars(call)
            takes_over = self.device == "CPU" and is_supported()
            linear = split_products(linear) if takes_over else linear
            linear = memory_plan_rewrite(linear, held)
            products = [find_product(item.src[0]) if takes_over else None for item in linear.src]
            rest = tuple(
                item for item, product in zip(linear.src, products, strict=True) if product is None
            )
            compiled = iter(compile_linear(linear.replace(src=rest), beam=0).src)
        if variables:
            raise InvalidModel("the graph left variables open")  # rules allow integer shapes only
        olds = {uop: index for index, uop in enumerate(lowered.states)}
        news = {uop: index for index, uop in enumerate(lowered.updates)}
        return [
            self._prepare(next(compiled) if product is None else item, olds, news, product)
            for item, product in zip(linear.src, products, strict=True)
        ]

    def _prepare(
        self, call: UOp, olds: dict[UOp, int], news: dict[UOp, int], product: Product | None
    ) -> _Call | _ProductCall:
        program = call.src[0]
        if product is None and program.op is not Ops.PROGRAM:
            raise InvalidModel(f"tinygrad scheduled {program.op.name} where a kernel belongs")
        arguments: list[Buffer | tuple[int, int]] = []
        operands = get_call_arg_uops(call)
        for position in program.arg.globals if product is None else product.slots:
            uop = operands[position]
            if uop in olds:
                arguments.append((0, olds[uop]))
            elif uop in news:
                arguments.append((1, news[uop]))
            elif uop.op is Ops.BUFFER:
                arguments.append(self._allocate(uop))
            else:  # a view into the arena that the memory planner laid out
                arguments.append(self._allocate(uop, uop.buffer))
        if product is None:
            return _Call(self.device, program, arguments)
        return _ProductCall(self.device, product, arguments, self._pool)

    def _bind(self, old: list[Buffer], new: list[Buffer]) -> list[Launch]:
        return [call.bind((old, new)) for call in self._calls]


class _Call:
    """One compiled kernel and its buffers; a pair stands for (old or new, state)."""

    __slots__ = ("arguments", "device", "program", "runtime")

    def __init__(
        self, device: str, program: UOp, arguments: list[Buffer | tuple[int, int]]
    ) -> None:
        self.device, self.program, self.arguments = device, program, arguments
        self.runtime = get_runtime(device, program)

    def bind(self, states: tuple[list[Buffer], list[Buffer]]) -> Launch:
        """Return a function of no arguments that launches the kernel on these state tensors."""
        raw = _resolve(self.device, self.arguments, states)
        sizes, local = self.program.arg.launch_dims({})
        if isinstance(self.runtime, CPUProgram) and sizes[0] == 1 and not self.program.arg.vars:
            # tinygrad's own call builds these arguments anew each time: 5 µs instead of 1
            addresses = [ctypes.c_uint64(buffer.va_addr) for buffer in raw]
            return functools.partial(self.runtime.fxn, *addresses)
        return functools.partial(
            self.runtime,
            *raw,
            global_size=sizes,
            local_size=local,
            vals=self.program.arg.vals({}),
        )


class _ProductCall:
    """One matrix product, computed by code of our own, and its buffers."""

    __slots__ = ("arguments", "device", "pool", "product")

    def __init__(
        self,
        device: str,
        product: Product,
        arguments: list[Buffer | tuple[int, int]],
        pool: KernelThreads,
    ) -> None:
        self.device, self.product, self.arguments, self.pool = device, product, arguments, pool

    def bind(self, states: tuple[list[Buffer], list[Buffer]]) -> Launch:
        """Return a function of no arguments that computes the product on these state tensors."""
        raw = _resolve(self.device, self.arguments, states)
        return BoundProduct(self.product, [buffer.va_addr for buffer in raw], self.pool)


def _resolve(
    device: str,
    arguments: Sequence[Buffer | tuple[int, int]],
    states: tuple[list[Buffer], list[Buffer]],
) -> list[Any]:
    """Return the device's own handles of a kernel's buffers."""
    buffers = [states[item[0]][item[1]] if isinstance(item, tuple) else item for item in arguments]
    return [buffer.get_buf(device) for buffer in buffers]


def _make_writer(buffer: Buffer) -> Callable[[bytes | memoryview], None]:
    """Return a function that fills the buffer; on the CPU, where kernels run in step, by a view."""
    if buffer.device == "CPU":
        view = buffer.as_memoryview(force_zero_copy=True).cast("B")
        return functools.partial(view.__setitem__, slice(None))

    def write(data: bytes | memoryview) -> None:
        buffer.allocator._copyin(buffer._buf, memoryview(bytearray(data)))

    return write


def _make_reader(buffer: Buffer) -> Callable[[], bytes]:
    """Return a function that waits for the device and copies the buffer's bytes out."""
    if buffer.device == "CPU":
        view: memoryview = buffer.as_memoryview(force_zero_copy=True).cast("B")
        return view.tobytes
    return lambda: bytes(buffer.as_memoryview())


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
