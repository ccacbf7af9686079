// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MessageHashUtils} from "@openzeppelin/contracts/utils/cryptography/MessageHashUtils.sol";
import {Request} from "../interfaces/IMarket.sol";

// What a client signs to request an execution, as EIP-712 says.

bytes32 constant DOMAIN_TYPEHASH =
    keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)");
bytes32 constant REQUEST_TYPEHASH = keccak256(
    "Request(address client,bytes32 modelId,uint32 steps,bytes32 inputsDigest,bytes32 clientKey,uint96 maxPrice,uint64 deadline,uint64 nonce,uint64 snapshotSequence,bytes32 snapshotRoot,uint16 verifyBps)"
);

/// @notice Returns a request's hashStruct.
function hashRequest(Request memory request) pure returns (bytes32) {
    return keccak256(abi.encode(REQUEST_TYPEHASH, request));
}

/// @notice Returns what is signed for a market: the domain and the request's hash.
/// @dev The domain is not cached, because a fork of the chain changes block.chainid. A signature counts on one fork
/// only.
function digestToSign(bytes32 requestHash, address market) view returns (bytes32) {
    bytes32 domain =
        keccak256(abi.encode(DOMAIN_TYPEHASH, keccak256("SplitUp"), keccak256("1"), block.chainid, market));
    return MessageHashUtils.toTypedDataHash(domain, requestHash);
}
