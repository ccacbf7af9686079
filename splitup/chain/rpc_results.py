"""What the results of an endpoint's methods look like (Ethereum's execution-apis).

An endpoint is a server of somebody else's. A result that is anything else would fail wherever its
parts are read, as an error of ours, which ends a node or a member.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

_DIGITS: Final = re.compile(r"0x[0-9a-fA-F]*+")
_Check = Callable[[Any], bool]


def _is_number(value: Any, digits: int = 64) -> bool:
    return _is_hex(value) and 2 < len(value) <= 2 + digits


def _is_hex(value: Any) -> bool:
    return isinstance(value, str) and _DIGITS.fullmatch(value) is not None


def _is_data(value: Any) -> bool:
    return _is_hex(value) and not len(value) % 2


def _is_of(nbytes: int, value: Any) -> bool:
    return _is_hex(value) and len(value) == 2 + 2 * nbytes


def _optional(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _object(**fields: _Check) -> _Check:
    parts = fields.items()
    return lambda value: isinstance(value, dict) and all(ok(value.get(n)) for n, ok in parts)


_COUNT: Final = partial(_is_number, digits=16)  # of blocks, of gas, of seconds
_HASH: Final = partial(_is_of, 32)
_ADDRESS: Final = partial(_is_of, 20)
_LOGS: Final = _list_of(
    _object(
        address=_ADDRESS,
        topics=_list_of(_HASH),
        data=_is_data,
        blockNumber=_COUNT,
        blockHash=_HASH,
        logIndex=_COUNT,
        transactionHash=_HASH,
    )
)
_BLOCK: Final = _optional(
    _object(
        number=_COUNT,
        hash=_HASH,
        parentHash=_HASH,
        timestamp=_COUNT,
        baseFeePerGas=_optional(_is_number),
    )
)
_RECEIPT: Final = _optional(
    _object(
        transactionHash=_HASH,
        blockNumber=_COUNT,
        blockHash=_HASH,
        gasUsed=_COUNT,
        status=_COUNT,
        to=_optional(_ADDRESS),
        contractAddress=_optional(_ADDRESS),
        logs=_LOGS,
    )
)
_RESULTS: Final[Mapping[str, _Check]] = {
    **dict.fromkeys(("eth_blockNumber", "eth_estimateGas", "eth_getTransactionCount"), _COUNT),
    **dict.fromkeys(("eth_chainId", "eth_gasPrice", "eth_getBalance"), _is_number),
    "eth_maxPriorityFeePerGas": _is_number,
    **dict.fromkeys(("eth_call", "eth_getCode"), _is_data),
    **dict.fromkeys(("eth_getBlockByHash", "eth_getBlockByNumber"), _BLOCK),
    "eth_getLogs": _LOGS,
    "eth_getTransactionReceipt": _RECEIPT,
    "eth_sendRawTransaction": _HASH,
}


def check_result(method: str, result: Any) -> None:
    """Raise ValueError for what cannot be the result of a method."""
    check = _RESULTS.get(method)
    if check is not None and not check(result):
        raise ValueError(f"the answer is not what {method} returns")
