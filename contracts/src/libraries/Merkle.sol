// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @title Merkle proofs that state a position
/// @notice The trees of `splitup/crypto/merkle.py`: inner nodes are SHA-256(left ‖ right), a level of
/// odd length is filled up with zero. Leaves hash more than 64 bytes, so that none is an inner node.
library Merkle {
    /// @notice Whether `leaf` is number `index` of the `count` leaves under `root`.
    /// @dev The depth follows from `count`, which bounds the loop by 64.
    function isLeaf(bytes32 root, uint64 count, uint64 index, bytes32 leaf, bytes32[] calldata proof)
        internal
        pure
        returns (bool)
    {
        if (index >= count || proof.length != _depth(count)) return false;
        bytes32 node = leaf;
        for (uint256 i; i < proof.length; ++i) {
            bytes32 sibling = proof[i];
            node = sha256(index & 1 == 1 ? bytes.concat(sibling, node) : bytes.concat(node, sibling));
            index >>= 1;
        }
        return node == root;
    }

    /// @dev The bits of count - 1.
    function _depth(uint64 count) private pure returns (uint256 depth) {
        for (uint64 rest = count - 1; rest != 0; rest >>= 1) {
            ++depth;
        }
    }
}
