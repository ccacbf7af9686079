"""OpenCL: kernels that take a buffer and an offset into it, bound to memory once.

OpenCL's own views of a buffer begin at multiples of what the driver says, 512 bytes on some GPUs.
So there are none: each kernel takes for every buffer the number of elements that it skips. A step's
rows, or those of one execution in a batch, may begin at any element.

tinygrad sets all arguments again for every launch. Here every launch has a kernel object of its
own, whose arguments are set when it is bound or when they change.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tinygrad.device import TinyELF
from tinygrad.dtype import AddrSpace
from tinygrad.renderer.cstyle import OpenCLRenderer
from tinygrad.runtime import ops_cl
from tinygrad.runtime.autogen import opencl as cl

from splitup.backend.buffers import COPIED_APART_BYTES, release_in_turn, release_with
from splitup.backend.compiler.launch_sizes import LaunchTerms, compute_sizes


@dataclass(frozen=True, slots=True)
class OpenClRegion:
    """Bytes of an OpenCL buffer, from an offset on."""

    buffer: Any
    offset: int = 0

    def __add__(self, nbytes: int) -> OpenClRegion:
        return OpenClRegion(self.buffer, self.offset + nbytes)


@functools.cache
def install() -> None:
    """Give tinygrad's OpenCL devices this module's memory and kernels."""
    allocator = ops_cl.CLAllocator
    allocate = allocator._alloc
    allocator._alloc = lambda self, size, options: OpenClRegion(allocate(self, size, options))
    allocator._free = lambda self, region, options: release_in_turn(
        cl.clReleaseMemObject, region.buffer
    )
    allocator._offset = lambda self, region, size, offset: region + offset
    allocator._copyin = _copy_in
    allocator._copyout = _copy_out
    OpenCLRenderer.render_kernel = _render_kernel
    ops_cl.CLProgram = OpenClKernel  # what a device that is opened from now on loads kernels with


_generate: Final = OpenCLRenderer.render_kernel
_OFFSET: Final = re.compile(r"const ulong (\w+)_from")
_VECTOR: Final = re.compile(r"\(__global [a-z]+([0-9]+)\*\)\(\(?(\w+)")


def _render_kernel(
    renderer: Any, name: str, lines: list[str], buffers: Any, uops: Any, prefix: Any = None
) -> str:
    """Return a kernel's source; behind its other arguments it takes an offset for each buffer."""
    taken = [buffer for buffer, (uop, _) in buffers if uop.addrspace is not AddrSpace.ALU]
    renderer.extra_args = [f"const ulong {buffer}_from" for buffer in taken]
    skips = [f"  {buffer} += {buffer}_from;" for buffer in taken]
    return str(_generate(renderer, name, [*skips, *lines], buffers, uops, prefix))


def describe(device: Any) -> str:
    """Return the name of an opened device and its driver's version, which compiles the kernels."""
    return f"{device.device_name}, driver {device.driver_version}"


# ---- memory ------------------------------------------------------------------------------------


def _copy_in(allocator: Any, region: OpenClRegion, data: memoryview) -> None:
    """Copy to the device; little data may still be on its way when this returns."""
    waits = len(data) >= COPIED_APART_BYTES
    source = (ctypes.c_char * len(data)).from_buffer_copy(data)
    address = ctypes.cast(source, ctypes.c_void_p)
    queue, at = allocator.dev.queue, region.offset
    done = cl.clEnqueueWriteBuffer(
        queue, region.buffer, waits, at, len(data), address, 0, None, None
    )
    ops_cl.check(done)
    if not waits:
        allocator.dev.pending_copyin.append(source)


def _copy_out(allocator: Any, target: memoryview, region: OpenClRegion) -> None:
    """Wait for the device and copy from it."""
    address = ctypes.cast((ctypes.c_char * len(target)).from_buffer(target), ctypes.c_void_p)
    queue, at = allocator.dev.queue, region.offset
    done = cl.clEnqueueReadBuffer(
        queue, region.buffer, True, at, len(target), address, 0, None, None
    )
    ops_cl.check(done)
    allocator.dev.pending_copyin.clear()


# ---- kernels -----------------------------------------------------------------------------------


class OpenClKernel(ops_cl.CLProgram):  # type: ignore[misc]
    """A kernel that tinygrad generated as OpenCL C, compiled by the driver."""

    is_movable = True  # to other regions, after it was bound, that are as aligned as it needs

    def __init__(self, device: Any, source: TinyELF) -> None:
        # tinygrad builds a program, asks for its binary and builds that, which takes twice as long
        self.dev, self.signature = device, source.signature
        status, text = ctypes.c_int32(), ops_cl.to_char_p_p([source.lib])
        self.program = cl.clCreateProgramWithSource(device.context, 1, text, None, status)
        ops_cl.check(status.value)
        if cl.clBuildProgram(self.program, 1, device.cl_dev, None, ops_cl.BP_CB(), None):
            device.cl_compiler.compile(source.lib.decode())  # raises with the driver's reason
            raise RuntimeError(f"the OpenCL driver does not build kernel {source.name}")
        self._name = source.name.encode()
        self.buffers = [
            (place, slot, dtype.itemsize)
            for place, (_, slot, dtype, shape) in enumerate(source.signature)
            if shape
        ]
        widths = _find_widths(source.lib.decode())
        self.alignments = {
            slot: width * item_bytes
            for (_, slot, item_bytes), width in zip(self.buffers, widths, strict=True)
        }
        self.variables = [
            (place, slot - len(self.buffers))
            for place, (_, slot, _, shape) in enumerate(source.signature)
            if not shape
        ]

    def __call__(
        self,
        *regions: OpenClRegion,
        global_size: Sequence[int] = (1, 1, 1),
        local_size: Sequence[int] | None = None,
        vals: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """Run it as tinygrad does, for what computes without a ``TaskProgram``."""
        words = {str(place): ctypes.c_uint64(value) for place, value in enumerate(vals)}
        self.make_launch(LaunchTerms(regions, words, global_size, local_size))()

    def create(self) -> Any:
        """Return a new kernel object, which has arguments of its own."""
        status = ctypes.c_int32()
        handle = cl.clCreateKernel(self.program, self._name, status)
        ops_cl.check(status.value)
        return handle

    def make_launch(self, terms: LaunchTerms) -> OpenClLaunch:
        """Return a launch on certain memory, of so many groups for the values of the variables."""
        return OpenClLaunch(self, terms)


def _find_widths(source: str) -> list[int]:
    """Return the most elements of each buffer that a kernel loads or stores at once."""
    widths = dict.fromkeys(_OFFSET.findall(source), 1)
    for width, buffer in _VECTOR.findall(source):
        widths[buffer] = max(widths[buffer], int(width))
    return list(widths.values())


class Address:
    """A buffer argument of a launch, which may be set to another region."""

    __slots__ = ("_handle", "_item_bytes", "_places", "_region")

    def __init__(
        self, handle: Any, places: tuple[int, int], item_bytes: int, region: OpenClRegion
    ) -> None:
        self._handle, self._places, self._item_bytes = handle, places, item_bytes
        self._region = region
        self.value = region

    @property
    def value(self) -> OpenClRegion:
        """Return the region."""
        return self._region

    @value.setter
    def value(self, region: OpenClRegion) -> None:
        self._region = region
        buffer, skipped = self._places
        _set_argument(self._handle, buffer, region.buffer)
        _set_argument(self._handle, skipped, ctypes.c_uint64(region.offset // self._item_bytes))


class OpenClLaunch:
    """One launch of a kernel, with a kernel object of its own."""

    def __init__(self, kernel: OpenClKernel, terms: LaunchTerms) -> None:
        handle = kernel.create()
        release_with(self, cl.clReleaseKernel, handle)
        self._kernel, self._handle, self._queue = kernel, handle, kernel.dev.queue
        self._terms, self._variables = terms, list(terms.variables.values())
        self._values: tuple[int, ...] | None = None
        self._sizes: tuple[Any, ...] = ()
        behind = len(kernel.signature)
        self.addresses = [
            Address(handle, (place, behind + number), item_bytes, terms.regions[slot])
            for number, (place, slot, item_bytes) in enumerate(kernel.buffers)
        ]

    def __call__(self) -> None:
        """Run it after all that was launched before."""
        values = tuple(variable.value for variable in self._variables)
        if values != self._values:
            self._bind(values)
        count, sizes, threads = self._sizes
        done = cl.clEnqueueNDRangeKernel(
            self._queue, self._handle, count, None, sizes, threads, 0, None, None
        )
        if done:
            ops_cl.check(done)

    def _bind(self, values: tuple[int, ...]) -> None:
        """Set what depends on the variables."""
        for place, number in self._kernel.variables:
            _set_argument(self._handle, place, ctypes.c_int32(values[number]))
        named = dict(zip(self._terms.variables, values, strict=True))
        groups = compute_sizes(self._terms.groups, named) or ()
        threads = compute_sizes(self._terms.threads, named)
        if threads is not None:
            groups = tuple(group * thread for group, thread in zip(groups, threads, strict=True))
        words = ctypes.c_size_t * len(groups)
        self._sizes = len(groups), words(*groups), None if threads is None else words(*threads)
        self._values = values

    def join(self, launches: Sequence[OpenClLaunch]) -> Callable[[], None]:
        """Return what runs these in order."""

        def run() -> None:
            for launch in launches:
                launch()

        return run


def _set_argument(handle: Any, place: int, value: Any) -> None:
    size = ctypes.sizeof(value)
    ops_cl.check(cl.clSetKernelArg(handle, place, size, ctypes.byref(value)))
