// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

// An account and an amount in one word, account << 96 | micro-USDC: a list of them costs half the
// calldata of a list of structs, and its order is the order of the accounts.

/// @notice Returns account and amount as one word.
function toWord(address account, uint96 amount) pure returns (bytes32) {
    return bytes32(uint256(uint160(account)) << 96 | amount);
}

/// @notice Returns the account of a word.
function accountOf(bytes32 word) pure returns (address) {
    return address(bytes20(word)); // forge-lint: disable-line(unsafe-typecast) the upper 160 bits are wanted
}

/// @notice Returns the amount of a word, in micro-USDC.
function amountOf(bytes32 word) pure returns (uint96) {
    return uint96(uint256(word)); // the lower 96 bits are wanted
}

/// @notice Returns keccak256 of the words one after another: EIP-712's encoding of bytes32[].
function hashWords(bytes32[] calldata words) pure returns (bytes32) {
    return keccak256(abi.encodePacked(words));
}
