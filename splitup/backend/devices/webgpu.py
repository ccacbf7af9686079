"""WebGPU by Dawn: memory with views, and one submission per step.

tinygrad's own runtime for it makes a pipeline, its layouts and a uniform buffer for every launch,
never frees the latter, has no views into a buffer and does not notice when memory is short. Here
all that a kernel needs is made once, and a step is one list of dispatches.

Dawn comes from the package ``dawn-python``, or from ``$WEBGPU_PATH``. It finds GPUs by Vulkan; on a
machine without a Vulkan driver a software one is used, SwiftShader, where it is installed beside
the Python packages (``make`` does so).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from tinygrad.device import Program, TinyELF
from tinygrad.renderer.wgsl import WGSLRenderer
from tinygrad.uop.ops import Ops

from splitup.backend.buffers import release_in_turn, release_with
from splitup.backend.compiler.launch_sizes import LaunchTerms, compute_sizes
from splitup.core.errors import Unavailable

_SOFTWARE_DRIVER: Final = "swiftshader"  # a folder beside the Python packages
_DRIVER_LISTS: Final = ("/etc/vulkan/icd.d", "/usr/share/vulkan/icd.d", "/usr/local/share/vulkan")
_WORD: Final = 4  # buffers, views and copies are multiples of so many bytes


class WebGpuRegion(NamedTuple):
    """Bytes of a WebGPU buffer."""

    buffer: Any
    offset: int
    nbytes: int


@functools.cache
def install() -> None:
    """Find Dawn and a Vulkan driver, and give tinygrad's WebGPU devices this module's runtime.

    Raises Unavailable when there is no Dawn.
    """
    _find_libraries()
    from tinygrad.runtime import ops_webgpu

    allocator = ops_webgpu.WebGpuAllocator
    allocator._alloc = _allocate
    allocator._free = lambda self, region, options: release_in_turn(self.dev.free, region.buffer)
    allocator._offset = lambda self, region, size, offset: WebGpuRegion(
        region.buffer, region.offset + offset, size
    )
    allocator._copyin = _copy_in
    allocator._copyout = _copy_out
    # WGSL allows a sine that is wrong by 2^-11: with none, tinygrad generates one of its own
    WGSLRenderer.code_for_op = {
        op: code for op, code in WGSLRenderer.code_for_op.items() if op is not Ops.SIN
    }
    WGSLRenderer.render_kernel = _render_kernel
    ops_webgpu.WebGPUProgram = Kernel  # what a device that is opened from now on loads kernels with


_generate: Final = WGSLRenderer.render_kernel


def _render_kernel(renderer: Any, name: str, lines: Any, buffers: Any, *rest: Any) -> str:
    """Return a kernel's source, with plain loads from buffers that it does not write.

    WGSL has no types of less than 32 bits. tinygrad reads and writes the words that hold them
    atomically, and atomic loads are several times slower.
    """
    source = str(_generate(renderer, name, lines, buffers, *rest))
    for buffer, _ in buffers:
        plain = re.sub(rf"atomicLoad\(&({buffer}\[[^\[\]]*\])\)", r"\1", source)
        if f"&{buffer}[" not in plain:
            source = plain.replace(f"{buffer}:array<atomic<u32>>", f"{buffer}:array<u32>")
    return source


def _find_libraries() -> None:
    if not os.environ.get("WEBGPU_PATH"):
        found = importlib.util.find_spec("pydawn")
        names = {"Linux": f"libwebgpu_dawn_{platform.machine()}.so"}
        names["Darwin"] = f"libwebgpu_dawn_{platform.machine()}.dylib"
        name = names.get(platform.system(), "")
        if found is None or found.origin is None or not name:
            raise Unavailable("WebGPU needs Dawn: pip install dawn-python, or set WEBGPU_PATH")
        os.environ["WEBGPU_PATH"] = str(Path(found.origin).parent / "lib" / name)
    if platform.system() != "Linux":
        return
    software = Path(sysconfig.get_path("purelib")) / _SOFTWARE_DRIVER
    if not any(any(Path(folder).glob("*.json")) for folder in _DRIVER_LISTS):
        drivers = software / "vk_swiftshader_icd.json"
        if drivers.exists():
            os.environ.setdefault("VK_ICD_FILENAMES", str(drivers))
    # Dawn loads it by its name, and a library that is loaded already is found by it
    for vulkan in ("libvulkan.so.1", str(software / "libvulkan.so.1")):
        with suppress(OSError):
            ctypes.CDLL(vulkan, ctypes.RTLD_GLOBAL)
            return


def describe(device: Any) -> str:
    """Return the adapter of an opened device and its driver's version.

    Kernels for a processor's adapter get no memory that threads share: barriers take it long.
    """
    from tinygrad.runtime import ops_webgpu
    from tinygrad.runtime.autogen import webgpu

    info = webgpu.WGPUAdapterInfo()
    webgpu.wgpuDeviceGetAdapterInfo(device.device_res, info)
    fields = (info.vendor, info.architecture, info.device, info.description)
    name = " ".join(text for field in fields if (text := ops_webgpu.from_wgpu_str(field)))
    if info.adapterType == webgpu.WGPUAdapterType_CPU:
        WGSLRenderer.has_shared = False
    webgpu.wgpuAdapterInfoFreeMembers(info)
    with suppress(importlib.metadata.PackageNotFoundError):
        name += f", dawn {importlib.metadata.version('dawn-python')}"
    return f"{name} on {platform.machine()}"


# ---- memory ------------------------------------------------------------------------------------


class _Checked:
    """Turns what goes wrong on a device within the block into an exception."""

    def __init__(self, device: Any, *, is_memory: bool = False) -> None:
        self._device, self._is_memory = device, is_memory

    def __enter__(self) -> None:
        from tinygrad.runtime.autogen import webgpu

        webgpu.wgpuDevicePushErrorScope(self._device.device_res, webgpu.WGPUErrorFilter_Validation)
        if self._is_memory:
            filter_ = webgpu.WGPUErrorFilter_OutOfMemory
            webgpu.wgpuDevicePushErrorScope(self._device.device_res, filter_)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        said = [self._device.pop_error() for _ in range(1 + self._is_memory)]
        if kind is None and any(said):
            error = MemoryError if self._is_memory else RuntimeError
            raise error("; ".join(filter(None, said)))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _WORD) * _WORD


def _allocate(allocator: Any, size: int, options: Any) -> WebGpuRegion:
    from tinygrad.runtime.autogen import webgpu

    usage = webgpu.WGPUBufferUsage_CopyDst | webgpu.WGPUBufferUsage_CopySrc
    usage |= webgpu.WGPUBufferUsage_Storage
    return WebGpuRegion(_create_buffer(allocator.dev, size, usage), 0, size)


def _create_buffer(device: Any, size: int, usage: int) -> Any:
    from tinygrad.runtime.autogen import webgpu

    wanted = webgpu.WGPUBufferDescriptor(size=_round_up(size), usage=usage)
    with _Checked(device, is_memory=True):
        return webgpu.wgpuDeviceCreateBuffer(device.device_res, wanted)


def _copy_in(allocator: Any, region: WebGpuRegion, data: memoryview) -> None:
    _write(allocator.dev, region.buffer, region.offset, bytes(data) + bytes(-len(data) % _WORD))


def _write(device: Any, buffer: Any, offset: int, data: bytes) -> None:
    from tinygrad.runtime.autogen import webgpu

    webgpu.wgpuQueueWriteBuffer(device.queue, buffer, offset, data, len(data))


def _copy_out(allocator: Any, target: memoryview, region: WebGpuRegion) -> None:
    from tinygrad.runtime import ops_webgpu
    from tinygrad.runtime.autogen import webgpu

    device, size = allocator.dev, _round_up(region.nbytes)
    usage = webgpu.WGPUBufferUsage_CopyDst | webgpu.WGPUBufferUsage_MapRead
    staging = _create_buffer(device, size, usage)
    try:
        with _Checked(device):
            encoder = webgpu.wgpuDeviceCreateCommandEncoder(
                device.device_res, webgpu.WGPUCommandEncoderDescriptor()
            )
            webgpu.wgpuCommandEncoderCopyBufferToBuffer(
                encoder, region.buffer, region.offset, staging, 0, size
            )
            _submit(device, encoder)
        target[:] = ops_webgpu.buf_to_mv(staging)[: target.nbytes]
    finally:
        device.free(staging)


def _submit(device: Any, encoder: Any) -> None:
    """Hand what was encoded to the device."""
    from tinygrad.runtime.autogen import webgpu

    commands = webgpu.wgpuCommandEncoderFinish(encoder, webgpu.WGPUCommandBufferDescriptor())
    webgpu.wgpuQueueSubmit(device.queue, 1, (webgpu.WGPUCommandBuffer * 1)(commands))
    webgpu.wgpuCommandBufferRelease(commands)
    webgpu.wgpuCommandEncoderRelease(encoder)


# ---- kernels -----------------------------------------------------------------------------------


class Kernel(Program):  # type: ignore[misc]
    """A kernel that tinygrad generated as WGSL, compiled by the driver.

    Its bindings are those of tinygrad's generator: infinity, buffers, variables. A binding begins
    at a multiple of 256 bytes, so none can be moved by rows.
    """

    is_movable = False

    def __init__(self, device: Any, source: TinyELF) -> None:
        from tinygrad.runtime import ops_webgpu
        from tinygrad.runtime.autogen import webgpu

        self.device = device
        kinds = [*("Storage" if shape else "Uniform" for *_, shape in source.signature)]
        entries = [
            webgpu.WGPUBindGroupLayoutEntry(
                binding=place,
                visibility=webgpu.WGPUShaderStage_Compute,
                buffer=webgpu.WGPUBufferBindingLayout(
                    type=getattr(webgpu, f"WGPUBufferBindingType_{kind}")
                ),
            )
            for place, kind in enumerate(["Uniform", *kinds])
        ]
        code = webgpu.WGPUShaderModuleWGSLDescriptor(
            code=ops_webgpu.to_wgpu_str(source.lib.decode()),
            chain=webgpu.WGPUChainedStruct(sType=webgpu.WGPUSType_ShaderSourceWGSL),
        )
        link = ctypes.cast(ctypes.pointer(code), ctypes.POINTER(webgpu.struct_WGPUChainedStruct))
        with _Checked(device):
            self.layout = webgpu.wgpuDeviceCreateBindGroupLayout(
                device.device_res,
                webgpu.WGPUBindGroupLayoutDescriptor(
                    entryCount=len(entries),
                    entries=(webgpu.WGPUBindGroupLayoutEntry * len(entries))(*entries),
                ),
            )
            layout = webgpu.wgpuDeviceCreatePipelineLayout(
                device.device_res,
                webgpu.WGPUPipelineLayoutDescriptor(
                    bindGroupLayoutCount=1,
                    bindGroupLayouts=(webgpu.WGPUBindGroupLayout * 1)(self.layout),
                ),
            )
            module = webgpu.wgpuDeviceCreateShaderModule(
                device.device_res, webgpu.WGPUShaderModuleDescriptor(nextInChain=link)
            )
            self.pipeline = webgpu.wgpuDeviceCreateComputePipeline(
                device.device_res,
                webgpu.WGPUComputePipelineDescriptor(
                    layout=layout,
                    compute=webgpu.WGPUComputeState(
                        module=module, entryPoint=ops_webgpu.to_wgpu_str(source.name)
                    ),
                ),
            )
        webgpu.wgpuShaderModuleRelease(module)
        webgpu.wgpuPipelineLayoutRelease(layout)
        release_with(self, webgpu.wgpuComputePipelineRelease, self.pipeline)
        release_with(self, webgpu.wgpuBindGroupLayoutRelease, self.layout)

    def make_launch(self, terms: LaunchTerms) -> Dispatch:
        """Return a launch on certain memory, of so many groups for the values of the variables.

        How many threads a group has is in the kernel's source.
        """
        return Dispatch(self, terms)


class Dispatch(NamedTuple):
    """One launch of a kernel, for ``join``."""

    kernel: Kernel
    terms: LaunchTerms

    def join(self, dispatches: Sequence[Dispatch]) -> Submission:
        """Return what runs these in order, in one submission."""
        return Submission(dispatches)

    def __call__(self) -> None:
        """Run this alone."""
        self.join([self])()


class Submission:
    """Kernels that run one after the other on certain memory, with one call of the driver."""

    def __init__(self, dispatches: Sequence[Dispatch]) -> None:
        self._device = dispatches[0].kernel.device
        self._dispatches = tuple(dispatches)
        words = {id(word): word for one in dispatches for word in one.terms.variables.values()}
        self._variables = [(word, self._make_uniform()) for word in words.values()]
        self._written: list[int] = []
        self._infinity = self._make_uniform()
        _write(self._device, self._infinity, 0, bytes(ctypes.c_float(float("inf"))))
        uniforms = {id(word): uniform for word, uniform in self._variables}
        with _Checked(self._device):
            self._groups = [self._bind(one, uniforms) for one in dispatches]

    def _make_uniform(self) -> Any:
        from tinygrad.runtime.autogen import webgpu

        usage = webgpu.WGPUBufferUsage_Uniform | webgpu.WGPUBufferUsage_CopyDst
        uniform = _create_buffer(self._device, _WORD, usage)
        release_with(self, self._device.free, uniform)
        return uniform

    def _bind(self, dispatch: Dispatch, uniforms: Mapping[int, Any]) -> Any:
        from tinygrad.runtime.autogen import webgpu

        bound = [WebGpuRegion(self._infinity, 0, _WORD), *dispatch.terms.regions]
        words = dispatch.terms.variables.values()
        bound += [WebGpuRegion(uniforms[id(word)], 0, _WORD) for word in words]
        entries = [
            webgpu.WGPUBindGroupEntry(
                binding=place, buffer=one.buffer, offset=one.offset, size=_round_up(one.nbytes)
            )
            for place, one in enumerate(bound)
        ]
        group = webgpu.wgpuDeviceCreateBindGroup(
            self._device.device_res,
            webgpu.WGPUBindGroupDescriptor(
                layout=dispatch.kernel.layout,
                entryCount=len(entries),
                entries=(webgpu.WGPUBindGroupEntry * len(entries))(*entries),
            ),
        )
        release_with(self, webgpu.wgpuBindGroupRelease, group)
        return group

    def __call__(self) -> None:
        """Run them; raises RuntimeError when the driver refuses."""
        from tinygrad.runtime.autogen import webgpu

        values = [word.value for word, _ in self._variables]
        if values != self._written:
            for value, (_, uniform) in zip(values, self._variables, strict=True):
                _write(self._device, uniform, 0, value.to_bytes(_WORD, "little"))
            self._written = values
        with _Checked(self._device):
            encoder = webgpu.wgpuDeviceCreateCommandEncoder(
                self._device.device_res, webgpu.WGPUCommandEncoderDescriptor()
            )
            pass_ = webgpu.wgpuCommandEncoderBeginComputePass(
                encoder, webgpu.WGPUComputePassDescriptor()
            )
            for one, group in zip(self._dispatches, self._groups, strict=True):
                numbers = {name: word.value for name, word in one.terms.variables.items()}
                sizes = compute_sizes(one.terms.groups, numbers) or ()
                webgpu.wgpuComputePassEncoderSetPipeline(pass_, one.kernel.pipeline)
                webgpu.wgpuComputePassEncoderSetBindGroup(pass_, 0, group, 0, None)
                webgpu.wgpuComputePassEncoderDispatchWorkgroups(pass_, *sizes)
            webgpu.wgpuComputePassEncoderEnd(pass_)
            webgpu.wgpuComputePassEncoderRelease(pass_)
            _submit(self._device, encoder)
