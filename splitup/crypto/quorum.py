"""Signatures for the contracts: EIP-712 structs, ECDSA signatures, quorum certificates.

The same checks as ``Committee.requireQuorum``, byte for byte. bytes32 values are
"0x…" strings, struct hashes are 32 bytes, addresses are lower-case.

Source: EIP-712 (typed structured data), EIP-2 (low s), Solidity's contract ABI.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import coincurve
from eth_abi.abi import encode
from eth_utils.crypto import keccak

from splitup.core.errors import BadSignature, InvalidInput

SIGNATURE_BYTES: Final = 65  # r (32) | s (32) | v (1), v = 27 or 28
_HALF_ORDER: Final = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
_DOMAIN_TYPE: Final = keccak(
    text="EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)
_NAME: Final = keccak(text="SplitUp")
_VERSION: Final = keccak(text="1")
_SNAPSHOT_TYPE: Final = keccak(
    text="Snapshot(uint64 configuration,uint64 sequence,uint64 epoch,bytes32 root)"
)
_PLAN_TYPE: Final = keccak(
    text="Plan(uint64 configuration,bytes32 executionId,bytes32 requestHash,bytes32 planRoot,"
    "bytes32 seed,uint32 executors)"
)
_REQUEST_TYPE: Final = keccak(
    text="Request(address client,bytes32 modelId,uint32 steps,bytes32 inputsDigest,"
    "bytes32 clientKey,uint96 maxPrice,uint64 deadline,uint64 nonce,uint64 snapshotSequence,"
    "bytes32 snapshotRoot,uint16 verifyBps)"
)
_COMMITMENTS_TYPE: Final = keccak(
    text="Commitments(bytes32 executionId,bytes32 root,bytes32[] exposures)"
)
_SETTLEMENT_TYPE: Final = keccak(text="Settlement(bytes32 executionId,bytes32 settlementHash)")
_SETTLEMENT_ABI: Final = "(uint32,bytes32,bytes32[],(address,uint96)[],bytes32[])"
_MAX_AMOUNT: Final = 2**96 - 1
_ZERO: Final = "0x" + "00" * 32


# ---- containers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Domain:
    """The EIP-712 domain: one chain, one contract (the Committee; for clients the Market)."""

    chain_id: int
    committee: str


@dataclass(frozen=True, slots=True)
class Payment:
    """A credit of a settlement, from the slashed stake or from the locked price."""

    account: str
    amount_micro_usdc: int
    from_slash: bool = False


@dataclass(frozen=True, slots=True)
class Slash:
    """The most stake that a settlement takes from a node."""

    node: str
    amount_micro_usdc: int


@dataclass(frozen=True, slots=True)
class Settlement:
    """The committee's decision about one execution, as the Market contract takes it."""

    steps: int
    evidence_root: str
    payments: tuple[Payment, ...] = ()
    slashes: tuple[Slash, ...] = ()

    def to_abi(self) -> tuple[Any, ...]:
        """Return the nested tuple that ``Market.settle`` takes as its second argument.

        What an account gets from the price is one word, and so is what a node loses; the contract
        takes both in ascending order.
        """
        payouts: Counter[str] = Counter()
        for payment in self.payments:
            if not payment.from_slash:
                payouts[payment.account] += payment.amount_micro_usdc
        return (
            self.steps,
            _bytes32(self.evidence_root),
            tuple(pack_word(to, amount) for to, amount in sorted(payouts.items())),
            tuple((p.account, p.amount_micro_usdc) for p in self.payments if p.from_slash),
            tuple(sorted(pack_word(s.node, s.amount_micro_usdc) for s in self.slashes)),
        )


@dataclass(frozen=True, slots=True)
class ExecutionHistory:
    """What the chain's record of an execution binds, as ``settle`` and ``distribute`` take it."""

    execution_id: str
    request_hash: str = _ZERO
    plan_root: str = _ZERO
    seed: str = _ZERO
    commitments: str = _ZERO
    exposures: tuple[str, ...] = ()  # words
    payouts: tuple[str, ...] = ()  # words

    def to_abi(self) -> tuple[Any, ...]:
        """Return the struct as the Market contract takes it."""
        return (
            self.execution_id,
            self.request_hash,
            self.plan_root,
            self.seed,
            self.commitments,
            self.exposures,
            self.payouts,
        )


# ---- hashes ------------------------------------------------------------------------------------


def snapshot_struct_hash(configuration: int, sequence: int, epoch: int, root: str) -> bytes:
    """Return hashStruct of ``Snapshot``; the first three values are the slot of its one root."""
    types = ("bytes32", "uint64", "uint64", "uint64", "bytes32")
    return _hash_abi(types, (_SNAPSHOT_TYPE, configuration, sequence, epoch, root))


def pack_word(account: str, amount_micro_usdc: int) -> bytes:
    """Return account and amount as one word of the Market contract: account << 96 | amount."""
    if not 0 <= amount_micro_usdc <= _MAX_AMOUNT:
        raise InvalidInput(f"{amount_micro_usdc} micro-USDC do not fit 96 bits")
    return bytes.fromhex(account.removeprefix("0x")) + amount_micro_usdc.to_bytes(12, "big")


def pack_words(amounts: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return (account, micro-USDC) as words "0x…" of the Market contract, in the given order."""
    return tuple("0x" + pack_word(account, amount).hex() for account, amount in amounts)


def unpack_word(word: str) -> tuple[str, int]:
    """Return (account, micro-USDC) of a word "0x…" of the Market contract."""
    data = _bytes32(word)
    return "0x" + data[:20].hex(), int.from_bytes(data[20:], "big")


def hash_exposures(exposures: Iterable[tuple[str, int]]) -> str:
    """Return what stands for ``exposures``, (executor, micro-USDC) sorted, in ``Commitments``."""
    return "0x" + keccak(b"".join(pack_word(node, amount) for node, amount in exposures)).hex()


def plan_struct_hash(
    configuration: int,
    execution_id: str,
    request_hash: str,
    plan_root: str,
    seed: str,
    executors: int,
) -> bytes:
    """Return hashStruct of ``Plan``; the first three values are the slot of its one plan.

    ``request_hash`` is that of ``request_struct_hash``; ``executors`` is how many nodes the plan
    gives work to.
    """
    types = ("bytes32", "uint64", *("bytes32",) * 4, "uint32")
    words = (execution_id, request_hash, plan_root, seed)
    return _hash_abi(types, (_PLAN_TYPE, configuration, *words, executors))


def request_struct_hash(*words: Any) -> bytes:
    """Return hashStruct of ``Request``, the Market contract's request hash.

    ``words`` are in the order of its type. A client signs it in the domain of the Market:
    Domain(chain id, market's address).
    """
    types = ("bytes32", "address", "bytes32", "uint32", "bytes32", "bytes32", "uint96", "uint64")
    return _hash_abi((*types, "uint64", "uint64", "bytes32", "uint16"), (_REQUEST_TYPE, *words))


def commitments_struct_hash(execution_id: str, root: str, exposures_hash: str) -> bytes:
    """Return hashStruct of ``Commitments``: all executors are bound by ``root``.

    ``exposures_hash`` comes from ``hash_exposures``.
    """
    words = (_COMMITMENTS_TYPE, execution_id, root, exposures_hash)
    return _hash_abi(("bytes32",) * 4, words)


def settlement_hash(settlement: Settlement) -> str:
    """Return keccak256(abi.encode(settlement)) as "0x…"."""
    return "0x" + _hash_abi((_SETTLEMENT_ABI,), (settlement.to_abi(),)).hex()


def settlement_struct_hash(execution_id: str, settlement_hash: str) -> bytes:
    """Return hashStruct of ``Settlement``."""
    return _hash_abi(("bytes32",) * 3, (_SETTLEMENT_TYPE, execution_id, settlement_hash))


def compute_execution_id(chain_id: int, market: str, client: str, nonce: int) -> str:
    """Return the id that ``Market.requestExecution`` gives to this client's nonce."""
    types = ("uint256", "address", "address", "uint64")
    return "0x" + _hash_abi(types, (chain_id, market, client, nonce)).hex()


def compute_signing_digest(domain: Domain, struct_hash: bytes) -> bytes:
    """Return the 32 bytes that are signed: keccak256(0x1901 | domain separator | struct hash)."""
    types = ("bytes32", "bytes32", "bytes32", "uint256", "address")
    words = (_DOMAIN_TYPE, _NAME, _VERSION, domain.chain_id, domain.committee)
    return keccak(b"\x19\x01" + _hash_abi(types, words) + struct_hash)


# ---- signatures --------------------------------------------------------------------------------


def sign_quorum(private_key: bytes, domain: Domain, struct_hash: bytes) -> bytes:
    """Return the member's 65-byte signature (deterministic, RFC 6979; low s)."""
    digest = compute_signing_digest(domain, struct_hash)
    signature = coincurve.PrivateKey(private_key).sign_recoverable(digest, hasher=None)
    return signature[:64] + bytes([27 + signature[64]])


def recover_signer(domain: Domain, struct_hash: bytes, signature: bytes) -> str:
    """Return the signer; raise BadSignature for another length, a high s, a bad v or no point."""
    if len(signature) != SIGNATURE_BYTES:
        raise BadSignature(f"a quorum signature has 65 bytes, not {len(signature)}")
    if signature[64] not in (27, 28):
        raise BadSignature(f"a quorum signature ends with v = 27 or 28, not {signature[64]}")
    if int.from_bytes(signature[32:64]) > _HALF_ORDER:  # the second encoding of the same signature
        raise BadSignature("a quorum signature has s in the lower half of the group order")
    digest = compute_signing_digest(domain, struct_hash)
    recoverable = signature[:64] + bytes([signature[64] - 27])
    try:
        key = coincurve.PublicKey.from_signature_and_message(recoverable, digest, hasher=None)
    except Exception:  # the library raises a bare Exception for "no such point"
        raise BadSignature("a quorum signature recovers to no public key") from None
    return "0x" + keccak(key.format(compressed=False)[1:])[12:].hex()


def pack_signatures(signatures: Iterable[tuple[str, bytes]]) -> bytes:
    """Join (address, signature) pairs by ascending address, as the contracts take them."""
    return b"".join(signature for _, signature in sorted(signatures))


def compute_quorum_size(member_count: int) -> int:
    """Return 2f+1 for n = 3f+1."""
    return 2 * (member_count // 3) + 1


def check_quorum(
    domain: Domain,
    struct_hash: bytes,
    signatures: bytes,
    members: Collection[str],
    recover: Callable[[Domain, bytes, bytes], str] = recover_signer,
) -> tuple[str, ...]:
    """Return the signers of a packed certificate, by the contract's own rules; raise BadSignature.

    ``members`` is the committee's current configuration.
    """
    count, rest = divmod(len(signatures), SIGNATURE_BYTES)
    if rest or count > len(members):
        raise BadSignature(f"{len(signatures)} bytes are no certificate of {len(members)} members")
    if count < compute_quorum_size(len(members)):
        raise BadSignature(
            f"a certificate has {count} signatures; {compute_quorum_size(len(members))} are needed"
        )
    signers: list[str] = []
    for start in range(0, len(signatures), SIGNATURE_BYTES):
        signer = recover(domain, struct_hash, signatures[start : start + SIGNATURE_BYTES])
        if signer not in members:
            raise BadSignature(f"{signer} signed, but is no member of the committee", peer=signer)
        if signers and signer <= signers[-1]:
            raise BadSignature(f"signers must ascend strictly; {signer} does not", peer=signer)
        signers.append(signer)
    return tuple(signers)


def _hash_abi(types: tuple[str, ...], values: tuple[Any, ...]) -> bytes:
    """Return keccak256(abi.encode(values)); a bytes32 may be a string "0x…"."""
    pairs = zip(types, values, strict=True)
    raw = [_bytes32(v) if kind == "bytes32" and isinstance(v, str) else v for kind, v in pairs]
    return keccak(encode(types, raw))


def _bytes32(value: str) -> bytes:
    try:
        data = bytes.fromhex(value.removeprefix("0x"))
    except ValueError:
        data = b""
    if len(data) != 32:
        raise InvalidInput(f"not a 32-byte value: {value!r}")
    return data
