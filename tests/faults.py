"""Every fault and attack that SplitUp has to survive, and the tests that show it.

    python -m tests.faults [--list] [ROW…] [options of pytest, such as -nauto]      # make faults

A test belongs to the rows that its name begins with: ``test_f03_f09_…`` to F03 and F09. Tests of
the contracts are found the same way. The command runs them and prints one line for each row. A row
whose tests fail, or that has none, ends it with 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
CONTRACTS: Final = ROOT / "contracts"

ROWS: Final = {
    # faults: F
    "F01": "a node dies while it computes",
    "F02": "a node dies between storing its log and reporting",
    "F03": "a process dies between writing down what it signs and sending it",
    "F04": "a node is suspended, replaced, and comes back late",
    "F05": "two processes use one data directory",
    "F06": "one member is down",
    "F07": "more members are down than a quorum can miss",
    "F08": "the network between members is cut and heals",
    "F09": "messages come twice, late or in another order",
    "F10": "a third of the messages is lost, the rest is slow",
    "F11": "a connection is open at one end only",
    "F12": "the chain's RPC does not answer for a minute",
    "F13": "an RPC is behind, or two contradict each other",
    "F14": "the chain reorganises within the confirmations",
    "F15": "the chain reorganises beyond the confirmations",
    "F16": "a transaction is dropped before it is mined",
    "F17": "fees rise while a transaction waits",
    "F18": "the account's nonce was used elsewhere, or has a gap",
    "F19": "a transaction reverts",
    "F20": "the object store is overloaded or slow",
    "F21": "the object store sends truncated or altered bytes",
    "F22": "a presigned URL expires during the transfer",
    "F23": "the disk is full, or the journal's end is torn",
    "F24": "the clock is wrong, or set back",
    "F25": "a worker crashes, hangs or runs out of memory",
    "F26": "a node is killed in the middle of a text",
    # attacks and bad input: A
    "A01": "a model or a task that carries a pickle",
    "A02": "a task with an operation that is not allowed",
    "A03": "an index outside its table",
    "A04": "a graph that is cyclic, incomplete, huge or very deep",
    "A05": "shapes that overflow or ask for too much memory",
    "A06": "model files with hostile headers",
    "A07": "a small file that unpacks to a large one",
    "A08": "NaN, infinity and negative zero in results",
    "A09": "lengths that lie, bodies that do not end",
    "A10": "another object than was granted, or one written twice",
    "A11": "presigned URLs that are weak, live long or leave their prefix",
    "A12": "secrets in logs, arguments or readable files",
    "A13": "an endpoint that leads into the operator's own network",
    "A14": "a contract that asks the client to fetch a URL",
    "A15": "a signed message used again elsewhere",
    "A16": "malleable signatures and weak keys",
    "A17": "a forged seed or a bad point of a curve",
    "A18": "a member that withholds its share of a random value",
    "A19": "a member that signs two things for one slot",
    "A20": "as many lying members as are tolerated",
    "A21": "a node that copies, guesses, withholds or computes something cheaper",
    "A22": "a node that checks itself, or pretends to be many",
    "A23": "reentrancy, odd tokens and forced ether",
    "A24": "dust, rounding, unbounded lists, registrations in front of others",
    "A25": "floods, slow senders and malformed bodies",
    # attacks on the whole market: S
    "S01": "a copy of a served model, registered at price 0",
    "S02": "an executor that says how many steps others are paid for",
    "S03": "a client that makes honest members sign twice",
    "S04": "a small graph that takes minutes or all memory to compile",
    "S05": "operators that have a determinism class to themselves",
    "S06": "a faulty dealing whose complaint comes too late",
    "S07": "a node that commits to one value and sends another",
    "S08": "retired members that slash through an execution left open",
    "S09": "an order to verify with a number of steps that nobody signed",
    "S10": "a worker that leaves its sandbox",
    "S11": "throw-away keys that use up what is bounded",
    "S12": "an owner that changes open executions",
    "S13": "a hostile tokenizer",
    "S14": "a lie that is worth more than it costs",
    "S15": "arithmetic that wraps around, used as an index",
    "S16": "padding of what a lookup reads",
    "S17": "a value with two symbolic axes",
    "S18": "a kernel cache with somebody else's code",
    "S19": "an executor that empties its own stake",
    "S20": "a message that costs more to refuse than to send",
    "S21": "a cache or a clock that tells one key what another one asked",
    "S22": "a right that was decided when the program began",
    "S23": "an address of another network inside a public one",
    "S24": "slow connections that take every place",
    "S25": "evidence judged by a key that the reporter chose",
    "S26": "an exported model that takes over or ends who runs it",
    "S27": "one caller that takes all calls and sessions of a worker",
    "S28": "a message that becomes far larger, or stays, in memory",
    "S29": "one node that takes a relay from all others",
    "S30": "images that keep the one reader from others",
    "S31": "a few addresses that hold all sessions of an adapter host",
    "S32": "one execution that takes all memory for tensors in chunks",
    "S33": "a long text that holds up all streams of a model",
    "S34": "a stored manifest that costs a gateway at anybody's request",
    "S35": "answers that another key reads or stops, or that fill a server's memory",
    "S36": "a key whose requests take all leases, the queue or the times to come back",
    "S37": "a chat template that takes all memory",
    "S38": "one execution whose tensors leave no room for those of others",
    "S39": "a node that reports times to its client for ever",
    "S40": "answers about progress that hold up a client, or put the blame on others",
    "S41": "silent validators or members, and a task of so many steps that time runs out",
    "S42": "evidence of the largest execution, too large for its message or its fields",
    "S43": "answers told to some members before each proposal, until no round is left",
    "S44": "a member that tells others something new before each proposal, by its own",
    "S45": "a member that tells others different results of a task that it recomputed",
    "S46": "executions so large that their payouts fit no transaction together",
    "S47": "a node that may take its stake out before it is judged, as an old snapshot names it",
    "S48": "a member that says different things to others, of which a proposal shows only one",
    "S49": "a member whose statements, proposals or large messages keep all others busy",
    "S50": "a large tensor that is announced again and again, and each time fetched",
    "S51": "a producer that stores nothing, for which all its readers would be replaced",
    "S52": "a log of zeros that becomes a thousand times larger when it is read",
    "S53": "a client that gives tasks away, or makes them fail, after it has what it wants",
    "S54": "an RPC endpoint whose answer is none, or has no end, and ends who reads it",
    "S55": "a byte for which an adapter host starts a process, and ends another's session",
    "S56": "a key whose slow readers keep the files of private models from all others",
    "S57": "a file of weights of a few kilobytes that takes hours to read",
    "S60": "a client that gives a node tasks, or takes some, so that it can commit to nothing",
    "S61": "a client that takes a task away, or makes it fail, before its last steps are stored",
    "S62": "a client that signs nothing: its inputs are in its log alone",
    "S63": "a client that ends it for some executors, and goes on with others",
    "S64": "a key that takes all sessions or connections of a server of devices",
    "S65": "words of strangers that control a terminal, or begin lines of a log",
    "S66": "a key that reads many pages of the explorer, or those of many models",
    "S67": "a manifest of many ports and edges",
    "S68": "outputs of a model whose names are paths",
    "S69": "a client that replaces all nodes, and ends it for the next ones after fewer steps",
    "S70": "thousands of takeovers, which members go through twenty times a second",
    "S71": "takeovers that a node has forgotten, which hide others from it",
    "S72": "a task of large outputs, which is faster than the store",
    "S73": "a task that is taken over, whose past inputs are fetched all at once",
    "S74": "a task of many large ports, or steps of them that are put together",
    "S75": "another user of the machine, who holds the locks of all accounts",
    "S76": "a folder of somebody else, whose network a user's key would sign for",
    "S77": "logs that fill the disk of a member",
    "S78": "thousands of takeovers, for each of which nodes write to all members",
    "S79": "an order that nobody signed, for which a node fetches and parses a manifest",
    "S80": "hundreds of numbers of steps, for each of which members look at all tasks",
    "S81": "thousands of takeovers, for each of which nodes look through the whole graph",
    "S82": "a thousand tasks taken over, for each of which a node asks the chain all the time",
    "S83": "probes in quick succession, whose answers take a node far longer than the probes",
    "S84": "strangers' keys, for each of which a gateway asks the chain at once",
    "S85": "a member that requested the release of its bond before it became one",
    "S86": "a node that names an operator which allows it no more",
    "S87": "a request for more steps than can be paid, for which all leases were to be as large",
    "S88": "an API key's long texts, by which requests of others count as too late",
    "S89": "a downloaded model that names its reader's own files, to have them published",
    "S90": "a model whose tokens are texts of megabytes",
    "S91": "a stranger's model that ends servers, or that they pay ahead for",
    "S92": "a stranger's task that no machine passes, for which no new node would stake",
    "S93": "a model whose name is given to a dearer one, while a server sells the first",
    "S94": "hundreds of models that nobody uses, for which members forget the others",
    "S95": "a model with another one's tasks, and false words about them",
    "S96": "executions that nobody uses, which reserve all stakes until their deadline",
    "S97": "a server that redirects its clients elsewhere",
    "S98": "thousands of models that nobody uses, all of which a new node would try",
    "S99": "signed requests that get no plan, and take the places of others",
    "S100": "a registered model without files, before which nodes load nothing else",
    "S101": "thousands of registered tasks that nobody wants, for which nodes load no others",
    "S102": "signed requests that get no plan, about which members write each other every second",
    "S103": "a stranger's chat template that ends the tokenizer of another model",
    "S104": "an API key's texts and grammars, for which all other texts wait",
    "S105": "a request for thousands of embeddings, for whose answer all others wait",
    "S106": "requests that cannot be answered, for which a server opens executions",
    "S107": "executions between a client and its own node, for which nodes load its models first",
    "S108": "registered models without manifests, which members ask gateways for again and again",
    "S109": "a downloaded adapter that leads to another one, to have that merged and published",
    "S110": "a link in the current folder, through which a command writes elsewhere",
    "S111": "an API key's large bodies, for whose parsing all other requests wait",
    "S112": "results and completions before the draw, which fill all members' memory",
    "S113": "executions left open, about each of which a node asks the chain all the time",
    "S114": "a member that lists tasks which do not exist, so that nodes load no new model",
    "S115": "a member's attestations about what no draw asks, which fill the others' memory",
    "S116": "a member's long answers, and those that come too soon, which stop nodes and clients",
    "S117": "long bodies of strangers, and large ones of known parties, which keep a server busy",
    "S118": "commitments filled with what nobody signed, which fill all members' memory",
    "S119": "an account with many keys, each of which stores as much as an account may",
    "S120": "a device's large messages, for whose decoding all others wait",
    "S121": "arguments of thousands of calls, which stop a server and fill its memory",
    "S122": "an API key's large requests, which fill a server's memory while they wait",
    "S123": "a link in a folder where somebody joins a network, which leads to another file",
    "S124": "an answer of thousands of objects, which is read again for each of its tokens",
    "S125": "large plans and snapshots, which a member encodes for each who asks",
    "S128": "a server or host that gives another model or adapter the id that was asked for",
    "S129": "a pattern in a model's configuration that takes forever to match",
    "S130": "an ONNX file of a megabyte that takes hours to read",
    "S131": "a page that counts again, for each who looks, which nodes hold each task",
    "S132": "an exported model whose steps fill the memory of whoever runs it",
    "S133": "a model's configuration of a kilobyte that takes gigabytes to look at",
}

_PYTHON: Final = re.compile(r"^(?:async )?def (test_(?:[fas]\d{2,3}_)+\w*)\(", re.MULTILINE)
_SOLIDITY: Final = re.compile(r"^    function (test_(?:[fas]\d{2,3}_)+\w*)\(", re.MULTILINE)
_ROW: Final = re.compile(r"[fas]\d{2,3}(?=_)")


@dataclass(slots=True)
class Outcome:
    """How the tests of one name ended."""

    seconds: float = 0.0
    failed: bool = False
    skipped: bool = False
    ran: bool = False


@dataclass(eq=False)
class Recorder:
    """A plugin of pytest that adds up the reports of each test, whatever its parameters.

    Of the files that pytest collects it runs ``wanted``. Given the tests' own names, pytest would
    run none at all where one file is skipped as a whole, since something optional is missing.
    """

    wanted: frozenset[str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid.partition("[")[0] in self.wanted]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            for test in self.wanted:
                if test.startswith(f"{report.nodeid}::"):
                    self.outcomes.setdefault(test, Outcome()).skipped = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        outcome = self.outcomes.setdefault(name, Outcome())
        outcome.seconds += report.duration
        outcome.failed |= report.failed
        outcome.skipped |= report.skipped
        outcome.ran |= report.when == "call" and report.passed


def find_tests() -> dict[str, list[str]]:
    """Return for every row its tests: ids of pytest, and ``forge::NAME``."""
    found: dict[str, list[str]] = {row: [] for row in ROWS}
    for path in sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("extras/*/*/**/test_*.py")]):
        for name in _PYTHON.findall(path.read_text()):
            _add(found, name, f"{path.relative_to(ROOT)}::{name}")
    for path in sorted((CONTRACTS / "test").glob("*.t.sol")):
        for name in _SOLIDITY.findall(path.read_text()):
            _add(found, name, f"forge::{name}")
    return found


def _add(found: dict[str, list[str]], name: str, test: str) -> None:
    for row in _ROW.findall(name[: _find_end(name)]):
        found.setdefault(row.upper(), []).append(test)  # one that is not in ROWS shows, too


def _find_end(name: str) -> int:
    match = re.match(r"test_(?:[fas]\d{2,3}_)+", name)
    return match.end() if match else 0


def run_forge(names: Sequence[str]) -> dict[str, Outcome]:
    """Run tests of the contracts; names that forge does not run are missing in the result."""
    forge = CONTRACTS / "node_modules" / ".bin" / "forge"
    if not names or not forge.exists():
        return {}
    pattern = rf"^({'|'.join(names)})\("
    command = [str(forge), "test", "--json", "--match-test", pattern]
    result = subprocess.run(command, cwd=CONTRACTS, capture_output=True, text=True)
    try:
        suites = json.loads(result.stdout)
    except json.JSONDecodeError:
        print(result.stderr[-2000:], file=sys.stderr)
        return {}
    outcomes = {}
    for suite in suites.values():
        seconds = 0.0 if not suite["test_results"] else _seconds(suite["duration"])
        for signature, test in suite["test_results"].items():
            failed = test["status"] != "Success"
            share_s = seconds / len(suite["test_results"])
            outcomes[f"forge::{signature.partition('(')[0]}"] = Outcome(share_s, failed, ran=True)
    return outcomes


def _seconds(text: str) -> float:
    """Return the seconds of a duration such as "1s 203ms 5µs"."""
    units = {"m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}
    parts = re.findall(r"([\d.]+)\s*(ms|µs|us|ns|m|s)", text)
    return sum(float(number) * units[unit] for number, unit in parts)


def judge(tests: Sequence[str], outcomes: dict[str, Outcome]) -> tuple[str, float]:
    """Return the result of a row and its seconds."""
    known = [outcomes[test] for test in tests if test in outcomes]
    seconds = sum(outcome.seconds for outcome in known)
    if not tests:
        return "no test", seconds
    if any(outcome.failed for outcome in known):
        return "FAILED", seconds
    if len(known) < len(tests):
        return "not run", seconds
    return ("passed" if all(outcome.ran for outcome in known) else "skipped"), seconds


def print_row(row: str, result: str, seconds: float, tests: Iterable[str]) -> None:
    names = [test.rpartition("::")[2] for test in tests]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = f"{names[0]}{more}" if names else ""
    print(f"{row}  {result:8}{seconds:8.1f} s  {ROWS.get(row, 'not in ROWS')}\n     {first}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that are named, or all; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as F04 or S11; default: all")
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    options, others = parser.parse_known_args(arguments)
    found = find_tests()
    rows = [row.upper() for row in options.rows] or sorted(
        found, key=lambda r: ("FAS".find(r[0]), r)
    )
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"there is no row {', '.join(unknown)}; write pytest's options as -nauto")
    tests = [test for row in rows for test in found.get(row, [])]
    if options.list:
        for row in rows:
            print(f"{row}  {ROWS.get(row, 'not in ROWS')}", *found.get(row, []), sep="\n     ")
        return 0
    recorder = Recorder(frozenset(test for test in tests if not test.startswith("forge::")))
    files = sorted({test.partition("::")[0] for test in recorder.wanted})
    if files:
        pytest.main(["-q", "--no-header", "-m", "", *others, *files], plugins=[recorder])
    forge = sorted({test.removeprefix("forge::") for test in tests if test.startswith("forge::")})
    outcomes = recorder.outcomes | run_forge(forge)
    results = {row: judge(found.get(row, []), outcomes) for row in rows}
    for row, (result, seconds) in results.items():
        print_row(row, result, seconds, found.get(row, []))
    bad = [row for row, (result, _) in results.items() if result != "passed"]
    print(f"{len(results) - len(bad)} of {len(results)} rows passed", *bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
