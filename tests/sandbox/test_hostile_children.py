"""Every process that computes what strangers wrote, with hostile code in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import pytest

from splitup.sandbox.child import Child, make_command
from tests.sandbox.attempts import Target
from tests.sandbox.target import check_reached

FORKS = {  # these compile, in forks that are confined as they are
    *("splitup.backend.compiler.compile_server", "splitup.client.private.private_process"),
    "splitup_oracle.member.recompute_process",
}
CHILDREN = {
    "splitup_private.adapters.host_process": "Applying.answer",
    "splitup.backend.compiler.compile_server": "answer",
    "splitup.client.private.private_process": "Tasks.answer",
    "splitup.client.text.tokenizer_process": "_Library.answer",
    "splitup_edge.confined_program": "_Text.answer",
    "splitup_oracle.member.recompute_process": "answer",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine")
@pytest.mark.parametrize("module", CHILDREN)
def test_s10_hostile_code_reaches_nothing(module: str, target: Target) -> None:
    asked = make_command("splitup.sandbox.confinement")
    lacks = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    arguments = [module, CHILDREN[module], json.dumps(target)]
    with closing(Child("tests.sandbox.hostile_child", arguments, device="CPU:X86")) as child:
        answer, _ = child.ask({"run": 0, "task": 0}, timeout_s=60, max_bytes=0)
    reached = answer["reached"]
    assert (reached.pop("fork", None) is None) == (module not in FORKS)
    check_reached(reached, "; ".join(lacks))
