"""Measure every bar: ``make bench``, or ``python -m bench [--quick] [NAME…]``.

    transition  from a task's end to its successor's start, with and without verification
    split       generation over four nodes against the same kernels in one process
    prompts     a published model: long prompts over four nodes, and beside another text
    slowlink    20 to 150 ms to the nodes: ways to decode, bad links
    speculation drafts of a small model on the client against sequential, 0 to 150 ms to the nodes
    sessions    32 sessions at once; memory over 10,000 steps
    network     whole executions on a whole network, compared with the uncut model
    serve       the OpenAI API: first tokens, 32 chats, idle clients, gas
    agents      the same API: a conversation of ten turns, a restart, clients that give up
    failover    nodes killed, stopped or cut off in the middle of 1,000 tokens
    compile     registration, a 70B dry run, predicted against real memory and time, cutting
    committee   certificates, large plans, heartbeats
    money       gas, bytes of a commitment, what verification costs
    kernels     one process against the memory's bandwidth; decoded tokens computed again

A GPU is measured by ``make gpu`` (``bench.gpu``).

Progress goes to stderr, one JSON object to stdout. A bar is met or missed, never asserted: the exit
code is 1 only when a mode could not be measured. Each mode runs in a process of its own, is stopped
after its time limit, and leaves nothing behind. Its result holds the load average. ``--quick``
takes few rounds, to see that everything runs; its figures mean little.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Final

from bench.report import Report, describe_bars, describe_machine, say
from splitup.core import event_loop
from splitup.core.errors import SplitUpError
from splitup.demo.run import until_interrupted

LIMITS_S: Final = {
    "transition": 290,
    "split": 300,
    "prompts": 600,
    "slowlink": 480,
    "speculation": 300,
    "sessions": 300,
    "network": 150,
    "serve": 600,  # 32 leases open and end six times
    "agents": 420,
    "failover": 600,
    "compile": 300,
    "committee": 180,
    "money": 180,
    "kernels": 900,
}
_STOP_S: Final = 40.0  # a network has twenty processes to stop
_ONE: Final = "--one"
_QUICK: Final = "--quick"


def run_mode(name: str, quick: bool) -> dict[str, Any]:
    """Run one mode in this process."""
    work = importlib.import_module(f"bench.modes.{name}").run(quick)
    if inspect.iscoroutine(work):
        work = event_loop.run(until_interrupted(work))
    assert isinstance(work, Report)
    return work.to_dict()


def start_mode(name: str, quick: bool) -> dict[str, Any]:
    """Run one mode in a process of its own and return what it found, or its error."""
    started_s, load = time.monotonic(), os.getloadavg()[0]
    command = [sys.executable, "-m", "bench", *([_QUICK] if quick else []), _ONE, name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    error = ""
    try:
        output, _ = process.communicate(timeout=LIMITS_S[name])
    except BaseException as reason:
        output = stop(process)
        if not isinstance(reason, subprocess.TimeoutExpired):
            raise
        error = f"not done within {LIMITS_S[name]} s"
    if not error and process.returncode:
        error = f"ended with {process.returncode}"
    return {
        **(json.loads(output) if not error else {"bars": [], "figures": {}, "error": error}),
        "seconds": round(time.monotonic() - started_s, 1),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
    }


def stop(process: subprocess.Popen[str]) -> str:
    """Ask a mode to stop what it started, then kill it. Its children die with it."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=_STOP_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def main() -> None:
    """Run the named modes, or all."""
    quick = _QUICK in sys.argv
    names = [name for name in sys.argv[1:] if name != _QUICK]
    if names[:1] == [_ONE]:
        try:
            print(json.dumps(run_mode(names[1], quick)))
        except SplitUpError as error:
            raise SystemExit(f"error: {error}") from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        return
    if unknown := set(names) - set(LIMITS_S):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))}; name some of {list(LIMITS_S)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    modes: dict[str, Any] = {}
    for name in names or LIMITS_S:
        say(f"== {name}")
        try:
            modes[name] = start_mode(name, quick)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        say(describe_bars(modes[name]["bars"]) + modes[name].get("error", ""))
        say(f"{modes[name]['seconds']} s, load {modes[name]['load']}")
    bars = [bar for mode in modes.values() for bar in mode["bars"]]
    missed = [bar["bar"] for bar in bars if not bar["met"]]
    summary = {"bars": len(bars), "missed": missed}
    print(
        json.dumps(
            {"machine": describe_machine(), "quick": quick, **summary, "modes": modes}, indent=2
        )
    )
    say(f"{len(bars) - len(missed)} of {len(bars)} bars met")
    if any("error" in mode for mode in modes.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
