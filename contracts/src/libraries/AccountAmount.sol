// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {IMarket} from "../interfaces/IMarket.sol";

// An account and an amount packed into 32 bytes: account << 96 | micro-USDC. A list of them needs half the calldata
// of a list of structs, and sorting the list sorts it by account.

/// @notice Packs an account and an amount in micro-USDC.
function pack(address account, uint96 amount) pure returns (bytes32) {
    return bytes32(uint256(uint160(account)) << 96 | amount);
}

/// @notice Returns the account of a packed entry.
function accountOf(bytes32 packed) pure returns (address) {
    return address(bytes20(packed)); // forge-lint: disable-line(unsafe-typecast) the upper 160 bits are the account
}

/// @notice Returns the amount of a packed entry, in micro-USDC.
function amountOf(bytes32 packed) pure returns (uint96) {
    return uint96(uint256(packed)); // the lower 96 bits are the amount
}

/// @notice Returns keccak256 of the concatenated items, which is EIP-712's encoding of a bytes32[].
function hashList(bytes32[] calldata items) pure returns (bytes32) {
    return keccak256(abi.encodePacked(items));
}

/// @notice Returns the sum of payouts, in micro-USDC. Reverts unless their accounts ascend, each named once.
function sumPayouts(bytes32[] calldata payouts) pure returns (uint256 sum) {
    address previous;
    for (uint256 i; i < payouts.length; ++i) {
        bytes32 payout = payouts[i];
        address account = accountOf(payout);
        require(account > previous, IMarket.PayoutsNotAscending(previous, account));
        previous = account;
        sum += amountOf(payout);
    }
}
