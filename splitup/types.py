"""Names for plain values that must not be mixed up.

Formats are enforced where values enter (``splitup.wire``); inside, the type is the promise.
"""

from __future__ import annotations

from typing import NewType

Address = NewType("Address", str)  # Ethereum account, "0x" + 40 lower-case hex digits
Bytes32 = NewType("Bytes32", str)  # "0x" + 64 lower-case hex digits
Digest = NewType("Digest", str)  # SHA-256, 64 lower-case hex digits
MicroUsdc = NewType("MicroUsdc", int)  # 10^-6 USDC, the token's own unit
