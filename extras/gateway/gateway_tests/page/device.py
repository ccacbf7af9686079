"""What the private page computes on a device, run in Node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.page_build import run_node

_SCRIPT = Path(__file__).with_name("device.mjs")


def run_on_device(program: str, given: Any) -> Any:
    """Return what a program, the body of a JavaScript function, returns; see ``device.mjs``."""
    return json.loads(run_node(str(_SCRIPT), program, stdin=json.dumps(given)))
