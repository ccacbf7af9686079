"""The contracts' ABI: calls, results, events and custom errors, as plain Python values.

bytesN values are "0x…" strings, ``bytes`` are bytes, addresses are lower-case strings, structs and
several named results are dictionaries by name. Reads the artifacts that ``contracts/compile.py``
writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

from eth_abi import decoding, registry
from eth_abi.codec import ABICodec
from eth_abi.exceptions import DecodingError, EncodingError
from eth_utils.abi import (
    collapse_if_tuple,
    event_abi_to_log_topic,
    function_abi_to_4byte_selector,
)

from splitup.core.errors import InvalidInput

ContractName = Literal["usdc", "committee", "bonds", "nodes", "models", "market"]
ARTIFACTS: Final[Mapping[ContractName, str]] = {
    "usdc": "TestUSDC",  # the real USDC answers the same functions, save mint
    "committee": "Committee",
    "bonds": "Bonds",
    "nodes": "NodeRegistry",
    "models": "ModelRegistry",
    "market": "Market",
}
CONTRACTS: Final = tuple(ARTIFACTS)
_PANIC: Final = "4e487b71"  # Panic(uint256)
_ERROR: Final = "08c379a0"  # Error(string)

Component = Mapping[str, Any]  # one entry of an ABI's JSON: name, type, components, indexed


class _LenientString(decoding.StringDecoder):
    """Decodes strings that are not UTF-8, too: anybody can store one in a contract.

    Those of one value have no more characters than it has bytes. Contracts write each once, but an
    endpoint's answer may refer to one again and again.
    """

    def __init__(self) -> None:
        super().__init__(handle_string_errors="replace")  # type: ignore[no-untyped-call]

    def decode(self, stream: Any) -> str:
        text: str = super().decode(stream)  # type: ignore[no-untyped-call]
        stream.characters = getattr(stream, "characters", 0) + len(text)
        if stream.characters > stream.getbuffer().nbytes:
            raise DecodingError("a string is referred to more than once")
        return text


def _make_codec() -> ABICodec:
    lenient = registry.registry.copy()  # type: ignore[no-untyped-call]
    lenient.unregister_decoder("string")
    is_string = registry.BaseEquals("string")  # type: ignore[no-untyped-call]
    lenient.register_decoder(is_string, _LenientString, label="string")
    return ABICodec(lenient)


_CODEC: Final = _make_codec()


@dataclass(frozen=True, slots=True)
class RevertReason:
    """Why a call reverted: a custom error's name and arguments, or a plain text."""

    name: str
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ContractAbi:
    """One contract's interface. Functions, events and errors have unique names in SplitUp."""

    contract: ContractName
    bytecode: bytes
    constructor: Component
    functions: Mapping[str, Component]
    events: Mapping[str, Component]  # by topic, "0x…"
    errors: Mapping[str, Component]  # by selector, 8 hex digits

    def encode_call(self, function: str, args: Sequence[Any]) -> str:
        """Return the call data as "0x…"; raise InvalidInput for arguments that do not fit."""
        entry = self.functions.get(function)
        if entry is None:
            raise InvalidInput(f"contract {self.contract} has no function {function}")
        selector = function_abi_to_4byte_selector(entry)  # type: ignore[arg-type]
        where = f"{self.contract}.{function}"
        return "0x" + (selector + _encode(entry["inputs"], args, where)).hex()

    def encode_constructor(self, args: Sequence[Any]) -> str:
        """Return bytecode and constructor arguments as "0x…"."""
        encoded = _encode(self.constructor.get("inputs", ()), args, f"{self.contract} constructor")
        return "0x" + (self.bytecode + encoded).hex()

    def decode_constructor(self, data: str) -> dict[str, Any] | None:
        """Return the arguments by name, None when the data has other code than this version's."""
        raw = bytes.fromhex(data[2:])
        if not raw.startswith(self.bytecode):
            return None
        inputs = self.constructor.get("inputs", ())
        try:
            values = _decode(inputs, raw[len(self.bytecode) :])
        except DecodingError:
            return None
        return {item["name"]: value for item, value in zip(inputs, values, strict=True)}

    def decode_result(self, function: str, data: bytes) -> Any:
        """Return a call's value: None, the only value, or a dictionary (a tuple when unnamed).

        Raises DecodingError.
        """
        outputs = self.functions[function]["outputs"]
        values = _decode(outputs, data)
        if len(values) <= 1:
            return values[0] if values else None
        names = [output["name"] for output in outputs]
        return dict(zip(names, values, strict=True)) if all(names) else values

    def decode_log(self, topics: Sequence[str], data: bytes) -> tuple[str, dict[str, Any]] | None:
        """Return (event name, arguments), or None for an event that is not in the ABI.

        Raises DecodingError.
        """
        entry = self.events.get(topics[0]) if topics else None
        if entry is None:
            return None
        indexed = [item for item in entry["inputs"] if item["indexed"]]
        if len(indexed) != len(topics) - 1:
            raise DecodingError(f"{entry['name']} has not {len(topics)} topics")
        plain = [item for item in entry["inputs"] if not item["indexed"]]
        values = dict(zip((i["name"] for i in plain), _decode(plain, data), strict=True))
        for item, topic in zip(indexed, topics[1:], strict=True):
            values[item["name"]] = _decode([item], bytes.fromhex(topic[2:]))[0]
        return entry["name"], {item["name"]: values[item["name"]] for item in entry["inputs"]}


@cache
def load_abi(contract: ContractName) -> ContractAbi:
    """Read a contract's artifact from the package."""
    path = files("splitup.chain") / "artifacts" / f"{ARTIFACTS[contract]}.json"
    artifact = json.loads(path.read_text("utf-8"))
    entries: list[dict[str, Any]] = artifact["abi"]

    def pick(kind: str) -> list[dict[str, Any]]:
        return [entry for entry in entries if entry["type"] == kind]

    return ContractAbi(
        contract=contract,
        bytecode=bytes.fromhex(artifact["bytecode"][2:]),
        constructor=next(iter(pick("constructor")), {}),
        functions={entry["name"]: entry for entry in pick("function")},
        events={"0x" + event_abi_to_log_topic(e).hex(): e for e in pick("event")},  # type: ignore[arg-type]
        errors={function_abi_to_4byte_selector(e).hex(): e for e in pick("error")},  # type: ignore[arg-type]
    )


def decode_revert(data: str) -> RevertReason | None:
    """Decode revert data ("0x…") against every contract: one may revert inside another's call."""
    selector, payload = data[2:10], data[10:]
    try:
        body = bytes.fromhex(payload)
        if selector == _ERROR:
            return RevertReason("Error", {"reason": _decode([{"type": "string"}], body)[0]})
        if selector == _PANIC:
            return RevertReason("Panic", {"code": _decode([{"type": "uint256"}], body)[0]})
        for contract in CONTRACTS:
            entry = load_abi(contract).errors.get(selector)
            if entry is not None:
                values = _decode(entry["inputs"], body)
                names = [item["name"] for item in entry["inputs"]]
                return RevertReason(entry["name"], dict(zip(names, values, strict=True)))
    except (DecodingError, ValueError):
        return None  # revert data is whatever the called code returned
    return None


# ---- values ------------------------------------------------------------------------------------


def _encode(components: Sequence[Component], values: Sequence[Any], where: str) -> bytes:
    if len(values) != len(components):
        raise InvalidInput(f"{where} takes {len(components)} arguments, not {len(values)}")
    try:
        converted = [_to_abi(c, v) for c, v in zip(components, values, strict=True)]
        return _CODEC.encode([collapse_if_tuple(dict(c)) for c in components], converted)
    except (EncodingError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InvalidInput(f"{where}: an argument does not fit its type: {error}") from None


def _decode(components: Sequence[Component], data: bytes) -> tuple[Any, ...]:
    """Return the values; raise DecodingError, also for numbers that no place in ``data`` has."""
    try:
        values = _CODEC.decode([collapse_if_tuple(dict(c)) for c in components], data)
    except (OverflowError, ValueError) as error:
        raise DecodingError(str(error)) from None
    return tuple(_from_abi(c, v) for c, v in zip(components, values, strict=True))


def _to_abi(component: Component, value: Any) -> Any:
    kind: str = component["type"]
    if kind.endswith("]"):
        item = {**component, "type": kind[: kind.rindex("[")]}
        return [_to_abi(item, element) for element in value]
    if kind == "tuple":
        members = component["components"]
        if isinstance(value, Mapping):
            value = [value[member["name"]] for member in members]
        return tuple(_to_abi(m, v) for m, v in zip(members, value, strict=True))
    if kind.startswith("bytes") and isinstance(value, str):
        return bytes.fromhex(value.removeprefix("0x"))
    return value


def _from_abi(component: Component, value: Any) -> Any:
    kind: str = component["type"]
    if kind.endswith("]"):
        item = {**component, "type": kind[: kind.rindex("[")]}
        return tuple(_from_abi(item, element) for element in value)
    if kind == "tuple":
        members = component["components"]
        return {m["name"]: _from_abi(m, v) for m, v in zip(members, value, strict=True)}
    if kind == "address":
        return value.lower()
    if kind.startswith("bytes") and kind != "bytes":
        return "0x" + value.hex()
    return value
