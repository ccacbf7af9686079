"""What starting a program costs: CPU seconds of importing what it runs, median of seven processes.

``python -m bench.measure.starts``; run it twice, because the first writes Python's bytecode.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Final

ROUNDS: Final = 7
PROGRAMS: Final = {
    "a node's daemon": "splitup_node.cli.app splitup_node.daemon",
    "a member's daemon": "splitup_oracle.cli.app splitup_oracle.member.service",
    "splitup status": "splitup.cli.verbs splitup.cli.commands.network splitup.devnet.commands",
    "splitup receipt": "splitup.cli.verbs splitup.cli.commands.receipt splitup.chain.sender "
    "splitup.client.market.settlement_evidence",
    "splitup-node status": "splitup_node.cli.app splitup_node.owner_facts",
    "splitup --help": "splitup.cli.verbs",
}


def measure(modules: str) -> float:
    """Return the CPU seconds, user and system, of a process that imports modules."""
    process = subprocess.Popen([sys.executable, "-c", f"import {', '.join(modules.split())}"])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, modules
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    for name, modules in PROGRAMS.items():
        median = statistics.median(measure(modules) for _ in range(ROUNDS))
        print(f"{name:20} {median:.2f} s")
