"""What costs most a byte: every door through which strangers' bytes come, and the worst to send.

    PYTHONPATH=.:node:oracle:deploy python -m tests.fuzz.costs [--kib 64]

A door takes bytes and returns, or raises its error for bad input. Bytes that are no hostile JSON
are in ``tests.fuzz.binary_doors``. Each door of JSON gets every filling at each place of its form:
wrong entries, unknown keys, brackets, escapes, long numbers. The table tells the costliest of each,
in processor time and in memory that Python allocates, for one byte sent.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import importlib
import json
import pkgutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import ValidationError
from splitup_private.split.messages import decode_binary, decode_text

import splitup.messages
from splitup.core import limits
from splitup.core.codec import parse_json
from splitup.core.errors import SplitUpError
from splitup.core.records import LaxRecord
from splitup.core.tensors import parse_safetensors
from splitup.crypto.jws import sign_jws, verify_jws
from splitup.crypto.keys import generate_identity
from splitup.graph import manifest_rules
from splitup.graph.ir import parse_graph
from splitup.graph.manifest_rules import load_manifest
from splitup.graph.self_test_vectors import load_vectors
from tests.fuzz.binary_doors import find_binary_doors

_MODULES: Final = (
    *("splitup.net.chunked_messages", "splitup.protocol.committee.peer_messages"),
    *("splitup_gateway.http_server", "splitup.graph.self_test_vectors", "splitup_edge.program"),
)
_SHAPES: Final = (  # of the fillings, those that a check of types can tell apart
    *("[0, …]", "[0.5, …]", '["aa", …]', "[[], …]", "[{}, …]", '{"1000":0, …}', "hexadecimal"),
    *("base64", "half of a character", "rows of tensors"),
)
_FORMS: Final = ('"%x":0', '"%x":[]', '"%d":"a"', '":%x":0')  # of keys and values of an object
_DEPTH: Final = 2  # of the places that are filled: records within records
_RUNS: Final = 3  # of which the fastest counts
_ENOUGH: Final = 64 * limits.KIB  # bytes that all runs of a small input read together
Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """What the costliest input of a door costs; ``errors`` is the most that pydantic collected."""

    door: str
    us: float  # of processor time, a byte
    slowest: str
    memory: float  # bytes a byte
    largest: str
    errors: int = 0


def make_fillings(size: int) -> dict[str, str]:
    """Return values in JSON of about ``size`` bytes, by name."""

    def repeat(item: str) -> str:
        return "[" + ",".join([item] * (size // (len(item.encode()) + 1))) + "]"

    def number(form: str) -> str:
        count = size // len(form % 0x10000)
        return "{" + ",".join(form % (index + 0x1000) for index in range(count)) + "}"

    items = ("0", "257", "0.5", "-0", "1e9", "true", '""', '"aa"', '"āa"', '":"')
    lists = ("[]", "{}", "[0]", "[0,0]", '{"a":0}', '{"a":0,"b":0}', "[[[[0]]]]")
    return {
        **{f"[{item}, …]": repeat(item) for item in (*items, *lists)},
        **{f"{{{form % 4096}, …}}": number(form) for form in _FORMS},
        "one key again and again": "{" + ",".join(['"a":0'] * (size // 6)) + "}",
        "deep brackets": "[" * (size // 2) + "]" * (size // 2),
        "brackets to the limit": repeat("[" * 60 + "]" * 60),
        "objects to the limit": repeat('{"a":' * 60 + "0" + "}" * 60),
        "brackets in a string": '"' + "[{" * (size // 2) + '"',
        "escapes": '"' + '\\"' * (size // 2) + '"',
        "escaped characters": '"' + "\\u0101" * (size // 6) + '"',
        "a wide string": '"' + "a" * size + '\\ud83d\\ude00"',
        "half of a character": repeat('"\\ud800"'),
        "a string without an end": '"' + "a" * size,
        "hexadecimal": '"0x' + "0" * size + '"',
        "base64": '"' + "A" * (size // 4 * 4) + '"',
        "a long number": "1" * size,
        "long numbers": repeat("1" * 4_000),
        "rows of tensors": repeat('{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'),
    }


@functools.cache
def find_kinds() -> tuple[type[LaxRecord], ...]:
    """Return the classes of records that come from outside as a whole, not as a part of one."""
    for module in pkgutil.iter_modules(splitup.messages.__path__, "splitup.messages."):
        importlib.import_module(module.name)
    for name in _MODULES:
        importlib.import_module(name)
    found: dict[type[LaxRecord], None] = {}
    pending: list[type[LaxRecord]] = [LaxRecord]
    while pending:
        for kind in pending.pop().__subclasses__():
            if kind not in found and not kind.__module__.startswith("tests."):
                found[kind] = None
                pending.append(kind)
    parts = {part for kind in found for part in _find_own_parts(kind)}
    return tuple(kind for kind in found if kind.model_fields and kind not in parts)


def _find_own_parts(kind: type[LaxRecord]) -> Iterator[type[LaxRecord]]:
    for info in kind.model_fields.values():
        yield from (part for part in _find_parts(info.annotation) if part is not kind)


def _find_parts(annotation: Any) -> Iterator[type[LaxRecord]]:
    if isinstance(annotation, type) and issubclass(annotation, LaxRecord):
        yield annotation
    for part in get_args(annotation):
        yield from _find_parts(part)


def find_places(kind: type[LaxRecord], depth: int = _DEPTH) -> Iterator[Place]:
    """Return the places of a class's form, those of lists' first entries and of parts with them."""
    yield ()
    for name, info in kind.model_fields.items():
        alias = info.validation_alias if isinstance(info.validation_alias, str) else name
        yield (alias,)
        yield (alias, 0)
        for part in dict.fromkeys(_find_parts(info.annotation)) if depth else ():
            for place in find_places(part, depth - 1):
                yield (alias, *place)
                yield (alias, 0, *place)


def put(place: Place, value: Any) -> Any:
    """Return a value at its place."""
    for part in reversed(place):
        value = [value] if part == 0 else {part: value}
    return value


def measure(work: Callable[[], object], size: int) -> tuple[float, float]:
    """Return microseconds and bytes of memory for each of ``size`` bytes; ends at an error."""
    return measure_us(work, size), measure_memory(functools.partial(run_to_error, work), size)


def measure_us(work: Callable[[], object], size: int, runs: int = _RUNS) -> float:
    """Return microseconds of processor time for each of ``size`` bytes: the fastest run's.

    Small inputs run more often: the time of a single one is too short to be measured.
    """

    def run() -> float:
        begun = time.process_time()
        run_to_error(work)
        return time.process_time() - begun

    return min(run() for _ in range(max(runs, _ENOUGH // size))) * 1e6 / size


def run_to_error(work: Callable[[], object]) -> None:
    """Run what may refuse its input."""
    with contextlib.suppress(SplitUpError, ValueError, RecursionError):
        work()


def measure_memory(work: Callable[[], object], size: int) -> float:
    """Return bytes of memory for each of ``size`` bytes."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / size


def measure_ordinary(size: int) -> float:
    """Return the microseconds of ``json.loads`` for a byte of an ordinary document."""
    row = {"node": "0x" + "5a" * 20, "rtt_ms": 12, "resident": ["7" * 64], "determinism": "CPU:X86"}
    data = json.dumps([row] * (size // len(json.dumps(row))))
    return measure(lambda: json.loads(data), len(data))[0]


def find_doors() -> dict[str, Callable[[str], Callable[[], object]]]:
    """Return the doors that take bytes; each makes the work from a filling."""

    def read(parse: Callable[[bytes], object]) -> Callable[[str], Callable[[], object]]:
        def prepare(filling: str) -> Callable[[], object]:
            data = filling.encode()
            return lambda: parse(data)

        return prepare

    def read_token(filling: str) -> Callable[[], object]:
        token = _make_token(filling)
        return lambda: verify_jws(token, typ="t", audience="a", now_s=1_000)

    def read_manifest(data: bytes) -> None:
        manifest_rules._refused.clear()  # or only the first one would be read
        load_manifest(data)

    return {
        "JSON of any route": read(parse_json),
        "a signed request": read_token,
        "a manifest": read(read_manifest),
        "a graph": read(parse_graph),
        "reference vectors": read(lambda data: load_vectors(data, "0" * 64, ())),
        "a header of safetensors": read(
            lambda data: parse_safetensors(len(data).to_bytes(8, "little") + data)
        ),
        "split inference": read(decode_text),
        "split inference, binary": read(
            lambda data: decode_binary(len(data).to_bytes(4, "little") + data)
        ),
    }


def _make_token(filling: str) -> str:
    """Return a token of a key that was just made, as anybody can, with a filling in its body."""
    token = sign_jws(generate_identity(), typ="t", audience="a", body={}, now_s=1_000)
    header, payload, signature = token.split(".")
    claims = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).decode()
    claims = claims.replace('"body":{}', f'"body":{{"x":{filling}}}')
    packed = base64.urlsafe_b64encode(claims.encode()).rstrip(b"=").decode()
    return f"{header}.{packed}.{signature}"  # the signature is looked at last


def _find_worst(door: str, found: dict[str, tuple[float, float]], errors: int = 0) -> Cost:
    slowest = max(found, key=lambda name: found[name][0])
    largest = max(found, key=lambda name: found[name][1])
    return Cost(door, found[slowest][0], slowest, found[largest][1], largest, errors)


def count_errors(kind: type[LaxRecord], value: Any) -> int:
    """Return how many errors pydantic collects in a decoded value."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        error.errors(include_url=False, include_input=False)  # as who tells the first one does
        return error.error_count()
    except (SplitUpError, ValueError):
        pass
    return 0


def measure_kind(
    kind: type[LaxRecord], values: dict[str, tuple[Any, float, float]], size: int
) -> Cost:
    """Return the cost of a class: that of parsing a filling, and of validating it somewhere."""
    found, errors = {}, 0

    def validate() -> None:
        nonlocal errors
        errors = max(errors, count_errors(kind, value))

    for place in find_places(kind):
        for name, (filling, us, memory) in values.items():
            value = put(place, filling)
            more_us, more_memory = measure(validate, size)
            where = ".".join(map(str, place)) or "the whole"
            found[f"{name} as {where}"] = us + more_us, memory + more_memory
    return _find_worst(kind.__name__, found, errors)


def measure_inputs(
    read: Callable[[bytes], object], inputs: dict[str, bytes]
) -> dict[str, tuple[float, float]]:
    """Return microseconds and bytes of memory for each byte of each input."""
    return {
        name: measure(functools.partial(read, data), len(data)) for name, data in inputs.items()
    }


def find_costs(size: int) -> Iterator[Cost]:
    """Measure all doors with fillings of about ``size`` bytes."""
    fillings = make_fillings(size)
    values = {}
    for door, prepare in find_doors().items():
        found = {}
        for name, filling in fillings.items():
            found[name] = measure(prepare(filling), len(filling.encode()))
        yield _find_worst(door, found)
        if door == "JSON of any route":
            parsed = found
    for door, (read, inputs) in find_binary_doors(size).items():
        yield _find_worst(door, measure_inputs(read, inputs))
    for name in _SHAPES:
        with contextlib.suppress(ValueError):
            values[name] = parse_json(fillings[name]), *parsed[name]
    for kind in find_kinds():
        yield measure_kind(kind, values, size)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.costs")
    parser.add_argument("--kib", type=int, default=64, help="bytes of an input, in KiB")
    options = parser.parse_args()
    size = options.kib * limits.KIB
    print(f"json.loads of an ordinary document: {measure_ordinary(size):.4f} µs a byte")
    print("| door | µs a byte | for | bytes a byte | for | errors |\n|---|---|---|---|---|---|")
    for cost in find_costs(size):
        print(
            f"| {cost.door} | {cost.us:.3f} | `{cost.slowest}` | {cost.memory:.1f} "
            f"| `{cost.largest}` | {cost.errors} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
