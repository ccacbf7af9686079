"""Compile tinygrad's host programs for any CPU of this architecture and write the JSON file."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tinygrad.device import Device
from tinygrad.helpers import Context
from tinygrad.runtime import ops_cpu
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

BASELINE: Final = {"x86_64": "x86-64"}  # the oldest CPU of the architecture


def generate(architecture: str) -> dict[str, Any]:
    """Return the file's content, by what tinygrad compiles when its CPU device is opened."""
    objects: dict[str, str] = {}
    baseline = ClangCompiler([architecture, BASELINE[architecture]])
    compile_program = ops_cpu.do_to_program

    def record(ast: Any, renderer: Any) -> Any:
        program = compile_program(ast, renderer)
        source = program.src[2].arg
        objects[ast.key.hex()] = base64.b64encode(baseline.compile(source)).decode()
        return program

    with patch.object(ops_cpu, "do_to_program", record), Context(DEV="CPU:X86", CCACHE=0):
        Device["CPU"]
    return {"tinygrad": importlib.metadata.version("tinygrad"), "objects": objects}


if __name__ == "__main__":
    name = platform.machine().lower()
    path = Path(__file__).parent / f"{name}.json"
    path.write_text(json.dumps(generate(name), indent=1, sort_keys=True) + "\n")
    print(path)
