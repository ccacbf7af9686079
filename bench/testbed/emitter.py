"""Many events of the contracts on a real chain, without the executions that would cause them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from eth_abi.abi import encode
from eth_utils.abi import collapse_if_tuple

from splitup.chain.abi import ContractName, load_abi
from splitup.chain.deployment import Deployment
from splitup.chain.rpc import Rpc

_GAS: Final = 16_000_000  # of one transaction; EIP-7825 allows 2^24


@dataclass(frozen=True, slots=True)
class _Log:
    topics: tuple[bytes, ...]
    data: bytes


def make_code(topics: int, data_bytes: int) -> bytes:
    """Return EVM code that emits a log for each record of its calldata: topics, then data."""
    head = 32 * topics
    load_topics = b"".join(
        bytes([0x80 + pushed]) + _push(32 * topic) + b"\x01\x35"  # DUP position, ADD, CALLDATALOAD
        for pushed, topic in enumerate(reversed(range(topics)))
    )
    emit = _push(data_bytes) + b"\x60\x00" + bytes([0xA0 + topics])  # LOG(0, data_bytes, topics)
    copy = _push(data_bytes) + b"\x81" + _push(head) + b"\x01\x60\x00\x37"  # CALLDATACOPY to 0
    body = copy + load_topics + emit + _push(head + data_bytes) + b"\x01\x60\x02\x56"  # JUMP to 2
    begin = b"\x60\x00\x5b\x80\x36\x11\x15"  # position = 0; while CALLDATASIZE > position
    end = len(begin) + 4 + len(body)
    return begin + _push(end) + b"\x57" + body + b"\x5b\x00"


def _push(value: int) -> bytes:
    return b"\x61" + value.to_bytes(2, "big")


class Emitter:
    """Puts code in the place of contracts that emits whatever events it is told to."""

    def __init__(self, rpc: Rpc, deployment: Deployment, sender: str) -> None:
        self._rpc = rpc
        self._deployment = deployment
        self._sender = sender

    async def emit(
        self, contract: ContractName, event: str, values: Sequence[Mapping[str, Any]]
    ) -> None:
        """Emit an event once for each of its arguments, whose encodings have one length.

        Afterwards the contract has its own code again.
        """
        logs = [encode_log(contract, event, each) for each in values]
        topics, length = len(logs[0].topics), len(logs[0].data)
        assert all((len(log.topics), len(log.data)) == (topics, length) for log in logs)
        address = self._deployment.get_address(contract)
        before = await self._rpc.request("eth_getCode", address, "latest")
        code = "0x" + make_code(topics, length).hex()
        await self._rpc.request("anvil_setCode", address, code)
        each = 2_500 + (length + 32 * topics) * 50  # EIP-7623: at least 40 a byte of calldata
        batch = max(1, (_GAS - 100_000) // each)
        for start in range(0, len(logs), batch):
            data = b"".join(b"".join(log.topics) + log.data for log in logs[start : start + batch])
            transaction = {
                "from": self._sender,
                "to": address,
                "gas": hex(_GAS),
                "data": "0x" + data.hex(),
            }
            digest = await self._rpc.request("eth_sendTransaction", transaction)
            ask = ("eth_getTransactionReceipt", digest)
            while (receipt := await self._rpc.request(*ask)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert int(receipt["status"], 16) == 1
            assert len(receipt["logs"]) == len(logs[start : start + batch])
        await self._rpc.request("anvil_setCode", address, before)


def encode_log(contract: ContractName, event: str, values: Mapping[str, Any]) -> _Log:
    """Return the topics and data of an event; hexadecimal strings stand for bytes."""
    topic, entry = next(
        (topic, entry)
        for topic, entry in load_abi(contract).events.items()
        if entry["name"] == event
    )
    indexed = [item for item in entry["inputs"] if item["indexed"]]
    plain = [item for item in entry["inputs"] if not item["indexed"]]
    topics = [encode([collapse_if_tuple(item)], [_to_abi(item, values)]) for item in indexed]
    data = encode(
        [collapse_if_tuple(item) for item in plain], [_to_abi(item, values) for item in plain]
    )
    return _Log((bytes.fromhex(topic[2:]), *topics), data)


def _to_abi(item: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    value = values[item["name"]]
    if item["type"] == "bytes32":
        return bytes.fromhex(value[2:])
    if item["type"] == "bytes32[]":
        return [bytes.fromhex(word[2:]) if isinstance(word, str) else word for word in value]
    return value
