"""Run one task: load its weights and compile once, then run steps with little Python.

A ``TaskProgram`` owns the buffers of weights, inputs, outputs and intermediate values. A ``State``
holds each state tensor twice, the old and the new value: a step reads one and writes the other, and
they are swapped only when the step has succeeded. So a failed step leaves the state as it was, and
any number of executions can share one program. A step may write only those rows of a KV cache that
differ (``splitup.cpu.cache_writes``), so no other code may write into a state's tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from tinygrad.device import Buffer, Device, LRUAllocator
from tinygrad.dtype import dtypes

from splitup.backend.buffers import (
    DRIVER_TURN,
    Ports,
    PreparedStep,
    Rows,
    check_bools,
    make_reader,
    make_writer,
)
from splitup.backend.compiler.compile_process import compile_apart
from splitup.backend.compiler.schedule import Place, Role, Schedule, compile_once
from splitup.backend.compiler.schedule_bytes import decode_schedule
from splitup.backend.devices.device_choice import DeviceReport, select_device
from splitup.backend.joins import find_join
from splitup.backend.launching import (
    Argument,
    Bound,
    Call,
    ExecutableCall,
    NativeCall,
    RowViews,
    States,
    Tiled,
    encode_records,
    join_launches,
    launch_records,
    load_executable,
)
from splitup.backend.merging import MergedSteps, StepLaunches
from splitup.backend.weights import load_weights, open_weights
from splitup.core import tuning
from splitup.core.codec import MAX_SAFE_INTEGER, compute_digest
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import TensorSpec
from splitup.cpu.cache_writes import Copies
from splitup.cpu.native_kernels import count_threads
from splitup.graph.cost import check_memory, compute_state_bytes, compute_vram_bytes
from splitup.graph.gates import check_gate
from splitup.graph.memory import round_up
from splitup.graph.rules import CheckedGraph, load_graph

_PROBE_BYTES: Final = 256
_FOREIGN_STATE: Final = "the state belongs to another program; use this one's new_state()"


def describe_device(index: int = 0) -> DeviceReport:
    """Return the device, code generator and determinism class of this process."""
    return select_device(index)


class DeviceProbe:
    """A little of a device's memory, to find out whether the device still answers."""

    def __init__(self, index: int = 0) -> None:
        device = select_device(index).device
        with DRIVER_TURN:
            buffer = Buffer(device, _PROBE_BYTES, dtypes.uint8).ensure_allocated()
        self._write, self._read = make_writer(buffer), make_reader(buffer)

    def find_loss(self) -> str:
        """Return why the device is of no more use, "" if it keeps what it is given."""
        sent = os.urandom(_PROBE_BYTES)
        try:
            self._write(sent)
            if self._read() == sent:
                return ""
            return "the device does not keep what is written into its memory"
        except Exception as error:  # tinygrad raises anything
            reason = f"{type(error).__name__}: {error!s:.200}"
            return f"the device does not answer any more ({reason})"


def free_memory(index: int = 0) -> None:
    """Return the memory of deleted programs and states to the device."""
    gc.collect()  # programs and their bound kernels refer to each other
    allocator = Device[select_device(index).device].allocator
    if isinstance(allocator, LRUAllocator):  # it keeps freed buffers for later allocations
        allocator.free_cache()


class State:
    """The state tensors of one execution on one program, zero at first."""

    __slots__ = (
        *("_apart", "_buffers", "_copies", "_launches", "_merged", "_parity", "_program"),
        *("_records", "_views"),
    )

    def __init__(self, program: TaskProgram, buffers: tuple[list[Buffer], list[Buffer]]) -> None:
        self._program: TaskProgram | None = program
        self._buffers = buffers
        self._parity = 0
        self._copies = Copies(len(buffers[0]))
        bound = [program._bind(States(buffers, self._copies, parity)) for parity in (0, 1)]
        self._launches = tuple(join_launches(row, program._threads) for row in bound)
        self._apart = tuple([one.launch for one in row] for row in bound)  # one by one, in a batch
        self._records = tuple(program._encode_apart(row) for row in bound)
        self._views = tuple(RowViews([cell for one in row for cell in one.cells]) for row in bound)
        self._merged: StepLaunches | None = None  # made when it is needed

    def _clear(self) -> None:
        """Make all of it zeros again; each state is a cache that native code writes by rows."""
        assert self._program is not None
        for index, spec in enumerate(self._program.states):
            for copy, rows in enumerate(self._copies.pop_ends(index)):
                view = self._buffers[copy][index].as_memoryview(force_zero_copy=True).cast("B")
                used = rows * (spec.nbytes // spec.shape[0])
                view[:used] = bytes(used)


class TaskProgram:
    """One task, or a whole uncut model, compiled for this process's device."""

    def __init__(
        self,
        graph_bytes: bytes,
        weights: bytes | Path | BinaryIO | None,
        *,
        device_index: int = 0,
        threads: int = 1,
        kernels: bytes | None = None,
        memory_bytes: int | None = None,
        gate: int | None = None,
        is_foreign: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Check, load, compile and run once. Takes seconds of CPU, less with its ``kernels``.

        ``weights`` is a safetensors file, or its bytes; None for a task without weights.
        ``kernels`` are what ``splitup.backend.compiler.compile_process`` made of this graph:
        machine code, which is run. Results do not depend on ``threads``. The manifest says which
        memory the task needs, and which input shuts it: ``memory_bytes`` and ``gate``. A task that
        ``is_foreign``, made by somebody else, is compiled in a process of its own; others in this
        process, which shares kernels with those before it. ``on_progress`` is called after each
        part of the work. Raises InvalidModel when the graph breaks a rule or what is said of it,
        and when the weights are not those it names; TooSlow when it takes too long to compile here.
        """
        self._report = select_device(device_index)
        self._threads = threads
        self.task_id = compute_digest(graph_bytes)
        self.device = self._report.device
        load = functools.partial(load_checked, graph_bytes, self.device, memory_bytes, gate)
        graph = None if is_foreign else load()
        if kernels is not None:
            schedule = decode_schedule(kernels)
        elif graph is not None:
            schedule = compile_once(graph, self.device)
        else:
            schedule = compile_apart(load, self.device)
        self._start(graph or load(), schedule, open_weights(weights), on_progress=on_progress)

    @classmethod
    def from_graph(
        cls,
        graph: CheckedGraph,
        get_bytes: Callable[[str], memoryview],
        *,
        device_index: int = 0,
        threads: int = 1,
        uses_native_code: bool = True,
        kernels: bytes | None = None,
    ) -> TaskProgram:
        """Make a program of a graph in memory; ``get_bytes`` gives each weight's bytes by name.

        Without its ``kernels`` it is compiled in this process, and shares kernels with those before
        it. Without ``uses_native_code`` all kernels are tinygrad's: to compare with.
        """
        program = cls.__new__(cls)
        program._report = select_device(device_index)
        program._threads = threads
        program.task_id = compute_digest(graph.to_bytes())
        program.device = program._report.device
        if kernels is not None:
            schedule = decode_schedule(kernels)
        else:
            schedule = compile_once(graph, program.device, uses_native_code=uses_native_code)
        program._start(graph, schedule, get_bytes)
        return program

    def _start(
        self,
        graph: CheckedGraph,
        schedule: Schedule,
        get_bytes: Callable[[str], memoryview],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.inputs: tuple[TensorSpec, ...] = graph.inputs
        self.outputs: tuple[TensorSpec, ...] = tuple(
            graph.values[output.node].make_spec(output.name) for output in graph.outputs
        )
        # the values of the kernels' variables; a step writes the numbers of its rows here
        self._rows = {symbol.name: ctypes.c_uint64(1) for symbol in graph.symbols}
        self._total = {symbol.name: ctypes.c_uint64(1) for symbol in graph.symbols}  # of a batch
        self.states: tuple[TensorSpec, ...] = graph.states
        self.state_bytes = compute_state_bytes(graph)
        self.vram_bytes = compute_vram_bytes(graph)
        self._turn = contextlib.nullcontext() if self.device == "CPU" else DRIVER_TURN
        _check_schedule(schedule, self.vram_bytes)
        self._buffers: dict[Role, list[Buffer]] = {
            "input": self._allocate(schedule.inputs),
            "weight": self._allocate(schedule.weights),
            "value": self._allocate(schedule.values),
        }
        self._state_sizes = schedule.states
        load_weights(graph.weights, get_bytes, self._buffers["weight"], on_progress)
        self._calls = self._prepare(schedule)
        on_progress()
        nothing = States(([], []), Copies(0), 0)
        self._shared = [
            call.bind(nothing)._replace(cells=[]) if launch.is_shared else None  # never moved
            for call, launch in zip(self._calls, schedule.launches, strict=True)
        ]
        self._shared_records = [
            None if one is None else encode_records(one, self._threads) for one in self._shared
        ]
        self._own: dict[tuple[int, Place], Buffer] = {}
        self._spare: list[State] = []
        updated = {call.updated for call in self._calls if isinstance(call, NativeCall)} - {None}
        self._takes_back = len(updated) == len(schedule.states)
        self._most_rows = {symbol.name: symbol.maximum for symbol in graph.symbols}
        self._join = find_join(graph)
        self._step: PreparedStep | None = None  # of the last step, whose rows are set
        self._ports = Ports(
            list(zip(graph.inputs, self._buffers["input"], strict=True)),
            [
                (spec, item[1] if isinstance(item := self._get_argument(place), tuple) else item)
                for place, spec in zip(schedule.outputs, self.outputs, strict=True)
            ],
        )
        self.width = self._compute_width(schedule)
        self._merging = self._find_merging(schedule)
        state, row = self.new_state(), [bytes(spec.row_bytes) for spec in self.inputs]
        started_s = time.perf_counter()
        self.run(state, row)
        # an upper estimate: many rows share the weights that one row reads
        self.longest_s = (time.perf_counter() - started_s) * math.prod(self._most_rows.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory in use, with one state."""
        buffers = itertools.chain(*self._buffers.values())
        return int(sum(buffer.nbytes for buffer in buffers)) + self.state_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of states that are kept for later executions."""
        return len(self._spare) * self.state_bytes

    def free_spare(self) -> None:
        """Drop the states that are kept for later executions."""
        self._spare.clear()

    def take_back(self, state: State) -> None:
        """Keep a state that is no longer used for the next execution.

        A new state costs as much as several steps: allocating its memory and binding all kernels to
        it. A state is kept only where few rows have to be zeroed for that.
        """
        is_ours = state._program is self and state not in self._spare
        if is_ours and self._takes_back and len(self._spare) < tuning.SPARE_STATES:
            state._clear()
            self._spare.append(state)

    def new_state(self) -> State:
        """Return zeroed state tensors for one execution."""
        if self._spare:
            return self._spare.pop()
        return State(self, self._allocate_states())

    def _allocate_states(self) -> tuple[list[Buffer], list[Buffer]]:
        pair: tuple[list[Buffer], list[Buffer]] = ([], [])
        for buffers in pair:
            buffers += self._allocate(self._state_sizes)
            for buffer in buffers:
                make_writer(buffer)(bytes(buffer.nbytes))
        return pair

    def run(self, state: State, inputs: Sequence[bytes | memoryview]) -> list[bytes]:
        """Compute one step and advance ``state``; returns the bytes of every output.

        Inputs are in the order of ``self.inputs``. Raises InvalidInput when their number or
        length is wrong, or when those of one symbol disagree on their rows; the state is then, as
        after any error, what it was.
        """
        step, parity = self._step, state._parity
        if step is None or step.lengths != tuple(map(len, inputs)):
            step = self._ports.prepare(inputs)
            if self._join is not None:  # such a program never sets self._step
                self.check(state, inputs)
                return [self._join.run(inputs)]
            _set_words(self._rows, step.rows)
            _set_words(self._total, step.rows)
            self._step = step
        if state._program is not self:
            raise InvalidInput(_FOREIGN_STATE)
        with self._turn:
            step.write(inputs)
            if state._views[parity].is_moved:
                state._views[parity].move(0, {}, self._find_own)
            for launch in state._launches[parity]:
                launch()
            outputs = step.read(state._buffers[1 - parity])
        state._parity = 1 - parity
        return outputs

    def check(self, state: State, inputs: Sequence[bytes | memoryview]) -> Rows:
        """Return the rows of a step by symbol; raises InvalidInput as ``run`` does."""
        if state._program is not self:
            raise InvalidInput(_FOREIGN_STATE)
        step = self._ports.prepare(inputs)
        for name, index in step.bools:
            check_bools(name, inputs[index])
        return step.rows

    def fits(self, steps: Sequence[Rows]) -> bool:
        """Return whether steps with these rows, each of another state, can run in one batch."""
        return len(steps) <= self.width and all(
            sum(rows.get(symbol, 0) for rows in steps) <= most
            for symbol, most in self._most_rows.items()
        )

    def run_together(
        self, steps: Sequence[tuple[State, Sequence[bytes | memoryview]]]
    ) -> list[list[bytes]]:
        """Compute one step of each of several states in one batch, which reads weights once.

        Every step gives the bytes that it gives alone. Raises InvalidInput, and leaves all states
        as they were, when ``run`` would for one of the steps, when they do not fit one batch, or
        when two steps have the same state.
        """
        rows = [self.check(*step) for step in steps]
        if not self.fits(rows) or len({id(state) for state, _ in steps}) < len(steps):
            raise InvalidInput(f"these {len(steps)} steps cannot run together; run them singly")
        firsts, total = _stack_rows(rows)
        prepared = [
            self._ports.prepare(inputs, tuple(first.items()))
            for (_, inputs), first in zip(steps, firsts, strict=True)
        ]
        for slot, ((state, inputs), first) in enumerate(zip(steps, firsts, strict=True)):
            state._views[state._parity].move(slot, first, self._find_own)
            prepared[slot].write(inputs)
        self._step = None  # the next one sets its own rows
        _set_words(self._total, total)
        self._launch_together([state for state, _ in steps], rows)
        results = [
            step.read(state._buffers[1 - state._parity])
            for (state, _), step in zip(steps, prepared, strict=True)
        ]
        for state, _ in steps:
            state._parity = 1 - state._parity
        return results

    @property
    def merges(self) -> bool:
        """Return whether consecutive steps of a state can be computed in one pass."""
        return self._merging is not None

    def run_in_order(
        self, state: State, steps: Sequence[Sequence[bytes | memoryview]]
    ) -> list[list[bytes]]:
        """Compute consecutive steps of one state in one pass, which reads weights once.

        Outputs and state are the bytes that the steps give one after the other. Raises
        InvalidInput, and leaves the state as it was, for inputs that ``run`` refuses and for more
        rows than one step may have. After any other error the state is of no more use.
        """
        if self._merging is None or len(steps) < 2:
            return [self.run(state, inputs) for inputs in steps]
        rows = [self.check(state, inputs) for inputs in steps]
        firsts, total = _stack_rows(rows)
        if any(total[symbol] > most for symbol, most in self._most_rows.items()):
            raise InvalidInput(f"these {len(steps)} steps have more rows than a step may have")
        if state._merged is None:
            copies = [States(state._buffers, state._copies, parity) for parity in (0, 1)]
            bound = self._bind(copies[0]), self._bind(copies[1])
            state._merged = StepLaunches(self._merging.blocks, bound, self._threads)
        self._step = None  # the next one sets its own rows
        parity = state._parity
        order = [state._merged.blocks[(parity + place) % 2] for place in range(len(steps))]
        prepared = [
            self._ports.prepare(inputs, tuple(first.items()))
            for inputs, first in zip(steps, firsts, strict=True)
        ]
        for one, inputs in zip(prepared, steps, strict=True):
            one.write(inputs)
        state._program = None  # until all has gone well
        words = self._rows, self._total
        self._merging.run(order, list(zip(rows, firsts, strict=True)), total, words)
        state._program, state._parity = self, (parity + len(steps)) % 2
        return [one.read([]) for one in prepared]

    def _find_merging(self, schedule: Schedule) -> MergedSteps | None:
        """Return how consecutive steps run in one pass, None if they have to run one by one."""
        is_ours = self.device == "CPU" and all(call.is_movable for call in self._calls)
        has_rows = all(spec.rows for spec in (*self.inputs, *self.outputs))
        if not (is_ours and has_rows and schedule.blocks and self._join is None):
            return None
        if self._ports.reads_states:
            return None

        def get_address(place: Place) -> int:
            buffer = self._get_argument(place)
            assert isinstance(buffer, Buffer)  # no state crosses a block's border
            return int(buffer.get_buf(self.device).va_addr)

        most_steps = min(self._most_rows.values())
        merging = MergedSteps(schedule.blocks, most_steps, self._most_rows, get_address)
        return merging if merging.is_small else None

    def _launch_together(self, states: Sequence[State], rows: Sequence[Rows]) -> None:
        """Run each kernel for all states before the next one, which may overwrite its operands."""
        is_even = all(one == rows[0] for one in rows)  # the usual case: one row each
        _set_words(self._rows, rows[0])
        apart = [state._records[state._parity] for state in states]
        if is_even and all(apart):
            # a layer has dozens of kernels, and a launch from Python takes a microsecond
            records: list[tuple[bytes, ...]] = []
            for position, record in enumerate(self._shared_records):
                records += [one[position] for one in apart] if record is None else [record]
            launch_records(records)
            return
        launches = [state._apart[state._parity] for state in states]
        for position, shared in enumerate(self._shared):
            if shared is not None:
                shared.launch()
                continue
            for one, count in zip(launches, rows, strict=True):
                if not is_even:
                    _set_words(self._rows, count)
                one[position]()

    def _encode_apart(self, bound: Sequence[Bound]) -> list[tuple[bytes, ...]]:
        """Return the records of a state's kernels; none unless all of a batch is machine code."""
        encoded = [encode_records(one, self._threads) for one in bound]
        records = [record for record in encoded if record is not None]
        return records if self.width > 1 and len(records) == len(bound) else []

    def compute_state_digest(self, state: State) -> str:
        """Return the SHA-256 of all state tensors as they are now, concatenated in order."""
        digest = hashlib.sha256()
        for buffer in state._buffers[state._parity]:
            digest.update(make_reader(buffer)())
        return digest.hexdigest()

    def _allocate(self, sizes: Sequence[int]) -> list[Buffer]:
        with DRIVER_TURN:
            return [Buffer(self.device, size, dtypes.uint8).ensure_allocated() for size in sizes]

    def _prepare(self, schedule: Schedule) -> list[Call]:
        """Load the machine code; returns the kernels in order with the buffers they take."""
        runtimes = [load_executable(self.device, item) for item in schedule.executables]
        kernels = [
            schedule.natives[one.index] for one in schedule.launches if one.kind != "executable"
        ]
        self._threads = count_threads(kernels, self._threads)
        calls: list[Call] = []
        for launch in schedule.launches:
            arguments = [self._get_argument(place) for place in launch.places]
            rows = self._total if launch.is_shared else self._rows
            if launch.kind != "executable":
                kernel = schedule.natives[launch.index]
                call: Call = NativeCall(kernel, self.device, arguments, launch, rows, self._threads)
            else:
                executable = schedule.executables[launch.index]
                runtime = runtimes[launch.index]
                tiled = None
                if launch.tiled is not None:
                    other = schedule.executables[launch.tiled]
                    tiled = Tiled(runtimes[launch.tiled], (other.global_size, other.local_size))
                call = ExecutableCall(
                    self.device, executable, runtime, arguments, launch.places, rows, tiled
                )
            calls.append(call)
        return calls

    def _compute_width(self, schedule: Schedule) -> int:
        """Return how many steps a batch may have: 1 if no kernel is shared, or one not movable."""
        pairs = list(zip(self._calls, schedule.launches, strict=True))
        ports = [*self.inputs, *self.outputs]
        if (
            not any(launch.is_shared for launch in schedule.launches)
            or not all(call.is_movable for call, launch in pairs if not launch.is_shared)
            or not all(spec.rows for spec in ports)
            or self._ports.reads_states
        ):
            return 1
        own = {place for launch in schedule.launches for place in launch.places if place.is_own}
        if any(place.role != "value" for place in own):
            return 1
        own_bytes = max(1, sum(place.nbytes for place in own))
        return min(tuning.BATCH_RUNS, 1 + tuning.BATCH_OWN_BYTES // own_bytes)

    def _find_own(self, slot: int, place: Place) -> Any:
        """Return the address of a buffer that a slot of a batch has of its own."""
        if (slot, place) not in self._own:
            (self._own[slot, place],) = self._allocate([place.nbytes])
        handle = self._own[slot, place].get_buf(self.device)
        return getattr(handle, "va_addr", handle)

    def _get_argument(self, place: Place) -> Argument:
        if place.role == "old":
            return 0, place.index
        if place.role == "new":
            return 1, place.index
        buffer = self._buffers[place.role][place.index]
        if place.offset == 0 and place.nbytes == buffer.nbytes:
            return buffer
        return buffer.view(place.nbytes, dtypes.uint8, place.offset).ensure_allocated()

    def _bind(self, states: States) -> list[Bound]:
        return [
            call.bind(states) if shared is None else shared
            for call, shared in zip(self._calls, self._shared, strict=True)
        ]


def load_checked(
    graph_bytes: bytes, device: str, memory_bytes: int | None, gate: int | None
) -> CheckedGraph:
    """Return a task's graph; raises InvalidModel unless it is legal and what is said of it true."""
    graph = load_graph(graph_bytes)
    check_memory(graph, memory_bytes, _get_machine_bytes(device))
    check_gate(graph, gate)
    return graph


def _get_machine_bytes(device: str) -> int:
    """Return the memory of this machine, for a CPU; a GPU's driver says what it lacks."""
    if not device.startswith("CPU"):
        return MAX_SAFE_INTEGER
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_schedule(schedule: Schedule, vram_bytes: int) -> None:
    """Raise InvalidModel when a schedule takes more memory than was predicted for its graph."""
    fixed = sum(schedule.inputs) + sum(schedule.weights) + sum(schedule.values)
    states = sum(round_up(size) for size in schedule.states)
    if fixed + 2 * states > vram_bytes:
        raise InvalidModel(
            f"the compiled task takes {fixed + 2 * states} bytes of memory; {vram_bytes} were "
            "predicted from its graph"
        )


def _set_words(words: Mapping[str, ctypes.c_uint64], rows: Rows) -> None:
    for name, count in rows.items():
        words[name].value = count


def _stack_rows(rows: Sequence[Rows]) -> tuple[list[Mapping[str, int]], Rows]:
    """Return the first row of each step when all are concatenated, and the sum of their rows."""
    firsts: list[Mapping[str, int]] = []
    total: Rows = {}
    for one in rows:
        firsts.append(dict(total))
        for symbol, count in one.items():
            total[symbol] = total.get(symbol, 0) + count
    return firsts, total
