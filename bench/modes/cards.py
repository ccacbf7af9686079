"""Kernels of every family, of ONNX and of quantised weights, for cards that are not here.

    python -m bench.modes.cards FOLDER    # compiles the task graphs of a folder for DEV

The kernels are generated and compiled, not run; bench/reports/gpus.md has the tables. A target
needs its compiler: NVRTC for CUDA (``pip install 'splitup[cuda]'``), nvJitLink for PTX (``pip
install nvidia-nvjitlink-cu12``, and NVJITLINK_PATH), LLVM 19 for AMD (``apt install libllvm19``,
and LLVM_PATH). One that is missing is left out of the tables.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from splitup_deploy.cutting.build import build, parse_size
from splitup_deploy.frontends.source_model import Sizes

from bench.economics.report import fill
from bench.report import ROOT, Bar, Report, describe_machine, say
from bench.testbed.run_python import run_python
from splitup.backend.compiler.schedule import compile_graph
from splitup.backend.devices import cuda
from splitup.backend.devices.device_choice import select_device
from splitup.core.errors import SplitUpError
from splitup.demo.models import find_example
from splitup.graph.manifest import get_task_key
from splitup.graph.rules import load_graph
from tests.deploy import checkpoints, hybrids, mixtures, moes
from tests.deploy.ggufs import save_gguf
from tests.deploy.onnxes import save_vision

PAGE: Final = ROOT / "bench/reports/gpus.md"
TARGETS: Final = {  # what DEV is set to, by the name in the tables
    "sm_75": "NULL:CUDA:sm_75",
    "sm_86": "NULL:CUDA:sm_86",
    "sm_90": "NULL:CUDA:sm_90",
    "sm_90 (PTX)": "NULL:PTX:sm_90",
    "gfx1100": "NULL:AMDLLVM:gfx1100",
    "gfx942": "NULL:AMDLLVM:gfx942",
}
_WHOLE: Final = 10**9
_CONFIGS: Final = ROOT / "tests" / "deploy" / "configs"
_LARGE: Final = (  # row, configuration, size of a task
    ("Llama 70B, tasks of 12 GB", "llama-70b.json", "12GB"),
    ("Llama 70B, tasks of 24 GB", "llama-70b.json", "24GB"),
    ("Mixtral 8x22B, tasks of 24 GB", "mixtral-8x22b.json", "24GB"),
)
_FORMS: Final = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
_SPILLS: Final = re.compile(rb"(\d+) bytes stack frame, (\d+) bytes spill stores")
_REGISTERS: Final = re.compile(rb"Used (\d+) registers")


# ---- what is compiled --------------------------------------------------------------------------


def write_graphs(folder: Path) -> None:
    """Write one task graph of each form of each model as ROW/NAME.json."""
    for row, model, target in iter_models(folder):
        is_text = target == _WHOLE and model.suffix != ".onnx"
        compiled = build(str(model), target, sizes=Sizes(chunk=8) if is_text else None)
        stored = {blob.key: blob for blob in compiled.blobs}
        forms: dict[str, str] = {}
        for task in compiled.manifest.tasks:  # block 3 attention has the kernels of block 4's
            forms.setdefault(re.sub(r"\d+", "", task.label), task.task_id)
        (folder / row).mkdir(exist_ok=True)
        for number, task_id in enumerate(forms.values()):
            data = b"".join(stored[get_task_key(task_id)].open())
            (folder / row / f"{model.stem}-{number}.json").write_bytes(data)


def iter_models(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield the row of the tables, the model and the size of its tasks."""
    sources = folder / "models"
    sources.mkdir()
    for row, cases in (
        ("dense families", checkpoints.CASES),
        ("families with experts", mixtures.CASES),
        ("recurrent families", hybrids.CASES),
    ):
        for name, case in cases.items():
            checkpoints.save_checkpoint(sources / name, case)
            yield row, sources / name, _WHOLE
    for name, config in moes.CASES.items():
        moes.save_moe(sources / name, config)
        yield "families with experts", sources / name, _WHOLE
    for form in _FORMS:
        path = sources / f"{form}.gguf"
        config = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
        save_gguf(path, config, forms={"": form, "token_embd": form})
        yield "quantised weights", path, _WHOLE
    save_vision(sources / "picture.onnx")
    yield "ONNX, pictures", sources / "picture.onnx", _WHOLE
    yield "packages-4m", find_example(), _WHOLE
    for row, name, size in _LARGE:
        yield row, _CONFIGS / name, parse_size(size)


# ---- compiling ---------------------------------------------------------------------------------


def compile_all(folder: Path) -> dict[str, Any]:
    """Compile the graphs of a folder for this process's device; return what is known by row."""
    said = _listen_to_nvrtc()
    device = select_device().device
    rows: dict[str, Any] = {}
    for path in sorted(folder.glob("*/*.json")):
        row = rows.setdefault(path.parent.name, {"kernels": {}, "failed": []})
        try:
            schedule = compile_graph(load_graph(path.read_bytes()), device)
        except SplitUpError as error:
            row["failed"].append(f"{path.stem}: {error}")
            continue
        for one in schedule.executables:
            row["kernels"][one.code] = measure(one.code, said)
    return {
        name: {
            "kernels": len(row["kernels"]),
            "failed": row["failed"],
            "registers": max((one["registers"] for one in row["kernels"].values()), default=0),
            "spilling": sum(one["spilled"] > 0 for one in row["kernels"].values()),
            "spilled": max((one["spilled"] for one in row["kernels"].values()), default=0),
            "local": max((one["local"] for one in row["kernels"].values()), default=0),
        }
        for name, row in rows.items()
    }


def measure(code: bytes, said: Mapping[bytes, bytes]) -> dict[str, int]:
    """Return registers, and bytes of spills and of local memory per thread, of a kernel."""
    if b".vgpr_count" in code:  # AMD: a note of the code object, in MessagePack
        return {
            "registers": _read_number(code, b".vgpr_count"),
            "spilled": 4 * _read_number(code, b".vgpr_spill_count"),
            "local": _read_number(code, b".private_segment_fixed_size"),
        }
    log = said.get(code, b"")
    used, frame = _REGISTERS.search(log), _SPILLS.search(log)
    return {
        "registers": int(used[1]) if used else 0,
        "spilled": int(frame[2]) if frame else 0,
        "local": int(frame[1]) if frame else 0,
    }


def _read_number(code: bytes, name: bytes) -> int:
    """Return the number that follows a name in MessagePack."""
    start = code.index(name) + len(name)
    kind = code[start]
    if kind < 0x80:
        return kind
    sizes = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I"}
    (number,) = struct.unpack_from(sizes[kind], code, start + 1)
    return int(number)


def _listen_to_nvrtc() -> dict[bytes, bytes]:
    """Have NVIDIA's compilers say what kernels take; return what they said, by machine code."""
    said: dict[bytes, bytes] = {}
    if not os.environ.get("DEV", "").startswith(("NULL:CUDA", "NULL:PTX")):
        return said
    cuda.install()
    from tinygrad.runtime.autogen import nvjitlink, nvrtc
    from tinygrad.runtime.support import compiler_cuda as compilers

    def compile_source(self: Any, source: str) -> bytes:
        program = nvrtc.nvrtcProgram()
        text = source.encode()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel", 0, None, None)
        options = [*self.compile_options, "--ptxas-options=-v"]
        given = compilers.to_char_p_p([option.encode() for option in options])
        compilers.nvrtc_check(nvrtc.nvrtcCompileProgram(program, len(options), given), program)
        check = compilers.nvrtc_check
        code = compilers._get_bytes(program, nvrtc.nvrtcGetCUBIN, nvrtc.nvrtcGetCUBINSize, check)
        said[code] = compilers._get_bytes(
            program, nvrtc.nvrtcGetProgramLog, nvrtc.nvrtcGetProgramLogSize, check
        )
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return bytes(code)

    def link(self: Any, source: str) -> bytes:
        handle, check = nvjitlink.nvJitLinkHandle(), compilers.jitlink_check
        options = [f"-arch={self.arch}".encode(), b"-Xptxas=-v", b"-verbose"]
        given = compilers.to_char_p_p(options)
        check(nvjitlink.nvJitLinkCreate(handle, len(options), given), handle)
        text = compilers.PTXCompiler.compile(self, source)
        kind = nvjitlink.NVJITLINK_INPUT_PTX
        check(nvjitlink.nvJitLinkAddData(handle, kind, text, len(text), b"kernel"), handle)
        check(nvjitlink.nvJitLinkComplete(handle), handle)
        code, log = (
            compilers._get_bytes(handle, get, size, check)
            for get, size in (
                (nvjitlink.nvJitLinkGetLinkedCubin, nvjitlink.nvJitLinkGetLinkedCubinSize),
                (nvjitlink.nvJitLinkGetInfoLog, nvjitlink.nvJitLinkGetInfoLogSize),
            )
        )
        check(nvjitlink.nvJitLinkDestroy(handle))
        said[code] = log
        return bytes(code)

    compilers.NVRTCCompiler.compile = compile_source
    compilers.NVPTXCompiler.compile = link
    return said


# ---- the tables --------------------------------------------------------------------------------


async def compile_for(target: str, folder: Path) -> dict[str, Any]:
    """Compile for a target in a process of its own; "error" says why it is not there."""
    say(f"compiling for {target}")
    env = {"DEV": TARGETS[target], "NULL_ALLOW_COPYOUT": "1"}
    found: dict[str, Any] = json.loads(
        await run_python("-m", "bench.modes.cards", str(folder), env=env)
    )
    if "error" in found:
        say(f"  {found['error']}")
    return found


def make_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page: kernels that compile, and what they take."""
    there = {name: rows for name, rows in found.items() if "error" not in rows}
    names = list(next(iter(there.values()))) if there else []
    machine = describe_machine()

    def draw(get: Callable[[dict[str, Any]], str]) -> str:
        lines = [f"| kernels of | {' | '.join(there)} |", "|---" * (1 + len(there)) + "|"]
        lines += [
            f"| {name} | {' | '.join(get(rows[name]) for rows in there.values())} |"
            for name in names
        ]
        return "\n".join(lines)

    def count(row: dict[str, Any]) -> str:
        failed = f", **{len(row['failed'])} tasks failed**" if row["failed"] else ""
        return f"{row['kernels']}{failed}"

    def take(row: dict[str, Any]) -> str:
        spills = f"{row['spilling']} spill ≤ {row['spilled']} B" if row["spilling"] else "none"
        return f"{row['registers']}; {spills}; {row['local']} B"

    missing = ", ".join(name for name in found if name not in there)
    note = f"Commit `{machine['commit']}`."
    note += f" Not compiled, because the compiler was missing: {missing}." if missing else ""
    return {"compiled": f"{draw(count)}\n\n{note}", "taken": draw(take)}


async def run(quick: bool) -> Report:
    """Compile for all targets, and write the page; for one of them where it is ``quick``."""
    with tempfile.TemporaryDirectory(prefix="splitup-bench-") as name:
        await asyncio.to_thread(write_graphs, Path(name))
        targets = list(TARGETS)[: 1 if quick else None]
        found = {target: await compile_for(target, Path(name)) for target in targets}
    if not quick:
        PAGE.write_text(fill(PAGE.read_text(), make_tables(found)))
    bars = [
        Bar(
            f"tasks that do not compile for {name}",
            None if "error" in rows else float(sum(len(row["failed"]) for row in rows.values())),
            "",
            at_most=0.0,
            note=str(rows.get("error", "")),
        )
        for name, rows in found.items()
    ]
    return Report(bars, found)


def main() -> None:
    """Print what is known of the kernels of a folder's graphs, or the error."""
    try:
        found = compile_all(Path(sys.argv[1]))
    except Exception as error:  # tinygrad raises anything where a compiler is missing
        found = {"error": str(error) or type(error).__name__}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
