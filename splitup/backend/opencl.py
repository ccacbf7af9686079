"""What tinygrad lacks for OpenCL: views into a buffer, and what a driver's bytes depend on."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from tinygrad.runtime import ops_cl
from tinygrad.runtime.autogen import opencl as cl

from splitup.core.errors import Unavailable
from splitup.graph.memory import BUFFER_ALIGNMENT


class _View(cl.cl_mem):  # type: ignore[misc]
    """A part of a buffer, which keeps the whole in memory until it is released."""

    _type_ = cl.cl_mem._type_

    def __del__(self) -> None:
        cl.clReleaseMemObject(self)


@functools.cache
def install() -> None:
    """Give tinygrad's OpenCL devices views, and copies that have ended when they return."""
    ops_cl.CLAllocator._offset = _make_view
    ops_cl.CLAllocator._copyin = _copy_in


def _copy_in(allocator: Any, buffer: Any, data: memoryview) -> None:
    address = ctypes.cast((ctypes.c_char * len(data)).from_buffer(data), ctypes.c_void_p)
    queue, is_blocking = allocator.dev.queue, True
    ops_cl.check(
        cl.clEnqueueWriteBuffer(queue, buffer, is_blocking, 0, len(data), address, 0, None, None)
    )


def _make_view(allocator: Any, buffer: Any, size: int, offset: int) -> _View:
    region = cl.cl_buffer_region(origin=offset, size=size)
    kind, flags = cl.CL_BUFFER_CREATE_TYPE_REGION, cl.CL_MEM_READ_WRITE
    status = ctypes.c_int32()
    made = cl.clCreateSubBuffer(buffer, flags, kind, ctypes.byref(region), status)
    ops_cl.check(status.value)
    return ctypes.cast(made, _View)


def describe(device: Any) -> str:
    """Return the name of an opened device and its driver's version, which compiles the kernels.

    Raises Unavailable when views cannot begin where tasks have values in memory.
    """
    bits = ctypes.c_uint32()
    what = cl.CL_DEVICE_MEM_BASE_ADDR_ALIGN
    ops_cl.check(cl.clGetDeviceInfo(device.cl_dev, what, 4, ctypes.byref(bits), None))
    if bits.value > 8 * BUFFER_ALIGNMENT:
        raise Unavailable(
            f"the OpenCL driver of {device.device_name} allows views at multiples of "
            f"{bits.value // 8} bytes only, and tasks need {BUFFER_ALIGNMENT}; "
            "use DEV=CUDA, DEV=AMD or DEV=WEBGPU on this machine"
        )
    return f"{device.device_name}, driver {device.driver_version}"
