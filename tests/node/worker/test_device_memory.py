"""What drivers say of a device's memory: a library with NVML's functions, and amdgpu's files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from splitup_node.tasks.loaded_tasks import LoadedTasks
from splitup_node.worker import device_memory
from splitup_node.worker.device_memory import DeviceMemory, find_memory
from splitup_node.worker.supervisor import Supervisor
from splitup_node.worker.worker_pool import Workers

from splitup.core.errors import Unavailable
from splitup.sandbox.child import make_environment
from splitup.storage.task_cache import TaskCache

GB = 10**9
# Two cards of 24 and 96 GB; a third says nothing of its memory. A file holds what is used, in GB.
NVML = """
#include <stdio.h>
#include <string.h>
struct memory { unsigned long long total, free, used; };
static const unsigned long long sizes[] = {24, 96, 0};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index > 2) return 2;
  *handle = (void *)&sizes[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  if (strcmp(uuid, "GPU-96")) return 6;
  *handle = (void *)&sizes[1];
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
  unsigned long long size = *(unsigned long long *)handle, used = 0;
  FILE *file = fopen(USED, "r");
  if (!size) return 3;
  if (file) { if (fscanf(file, "%llu", &used) != 1) used = 0; fclose(file); }
  memory->total = size * 1000000000; memory->used = used * 1000000000;
  memory->free = memory->total - memory->used;
  return 0;
}
"""


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a library with NVML's functions in place of the driver's; return the file it reads."""
    source, library, file = (tmp_path / name for name in ("nvml.c", "libnvml.so", "used"))
    source.write_text(NVML)
    compiler = shutil.which("cc") or ""
    define = f'-DUSED="{file}"'
    subprocess.run(
        [compiler, "-shared", "-fPIC", define, str(source), "-o", str(library)], check=True
    )
    monkeypatch.setattr(device_memory, "_NVML", str(library))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return file


needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@needs_cc
def test_nvidias_library_says_what_is_used(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_environment(used)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as NVML counts cards"
    assert find_memory("CUDA") == find_memory("NV:0") == DeviceMemory(24 * GB, 24 * GB)
    used.write_text("20")
    assert find_memory("CUDA:1") == find_memory("CUDA:1:PTX") == DeviceMemory(96 * GB, 76 * GB)
    assert find_memory("CUDA:2") is None and find_memory("CUDA:3") is None
    assert find_memory("") == DeviceMemory(96 * GB, 76 * GB), "the largest here"
    for visible, wanted in (("1,0", 96), ("GPU-96", 96), (" 1 ,GPU-0", 96), ("0", 24)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        memory = find_memory("CUDA:0")
        assert memory is not None and memory.total_bytes == wanted * GB
        assert find_memory("NV:1") == DeviceMemory(96 * GB, 76 * GB), "NV does not read it"
    for visible in ("", "-1", "GPU-0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert find_memory("CUDA") is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_memory, "_NVML", str(tmp_path / "missing.so"))
    monkeypatch.setattr(device_memory, "_SYSFS", tmp_path)
    for device in ("CUDA", "NV:1", "AMD", "CL", "CL:1", "WEBGPU", "HEXAGON"):
        assert find_memory(device) is None
    host = find_memory("CPU:X86")
    assert host is not None and host.total_bytes > 0 and host.free_bytes is None
    assert find_memory("") == find_memory("METAL") == host


def make_amd(sysfs: Path) -> None:
    """Lay out a processor, a card of 16 GB, one that says nothing, and one of 24 GB as node 10."""
    nodes = sysfs / device_memory._AMD_TOPOLOGY
    for node, gpu, minor in ((0, 0, 0), (1, 51, 129), (2, 52, 130), (10, 60, 128)):
        folder = nodes / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu}\n")
        (folder / "properties").write_text(f"cpu_cores_count 0\ndrm_render_minor {minor}\n")
    for minor, total, taken in ((129, 16, 3), (128, 24, 24)):
        folder = sysfs / f"class/drm/renderD{minor}/device"
        folder.mkdir(parents=True)
        (folder / "mem_info_vram_total").write_text(f"{total * GB}\n")
        (folder / "mem_info_vram_used").write_text(f"{taken * GB}\n")


def test_amds_driver_says_what_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cards are numbered as tinygrad does: by the topology's numbers, not by names of files."""
    make_amd(tmp_path)
    monkeypatch.setattr(device_memory, "_SYSFS", tmp_path)
    assert find_memory("AMD") == find_memory("AMD:0:LLVM") == DeviceMemory(16 * GB, 13 * GB)
    assert find_memory("AMD:1") is None, "a card that says nothing keeps its number"
    assert find_memory("AMD:2") == DeviceMemory(24 * GB, 0)
    assert find_memory("AMD:3") is None


@needs_cc
@pytest.mark.asyncio
async def test_a_node_loads_no_task_where_other_programs_take_the_memory(
    used: Path, tmp_path: Path
) -> None:
    """It offers what is free of both: of its own share, and of the device."""

    def use(gigabytes: int) -> None:
        used.write_text(str(gigabytes))

    supervisors = [Supervisor(tmp_path, memory_bytes=20 * GB, device=f"CUDA:{n}") for n in (0, 1)]
    for number, supervisor in enumerate(supervisors):
        supervisor.report = {"device": f"CUDA:{number}"}  # as its worker would say
        supervisor.is_running = True

    async def fetch_manifest(model_id: str) -> Any:
        return SimpleNamespace(
            tasks=[SimpleNamespace(task_id="11" * 32, label="a task", vram_bytes=19 * GB)]
        )

    cache = cast(TaskCache, SimpleNamespace(fetch_manifest=fetch_manifest))
    loaded_tasks = LoadedTasks(Workers(supervisors), cache)
    assert loaded_tasks.free_bytes == 20 * GB
    use(10)
    assert loaded_tasks._list_free() == [14 * GB, 20 * GB], "the other card has room"
    use(80)
    supervisors[0].memory_bytes = 0
    assert loaded_tasks.free_bytes == 16 * GB
    with pytest.raises(Unavailable, match=r"16000000000 of .* free, as other programs use the dev"):
        await loaded_tasks.ensure("0x" + "11" * 32, 0)
