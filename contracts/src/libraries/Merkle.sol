// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @title Merkle proofs that a leaf is at a stated position
/// @notice The trees of `splitup/crypto/merkle.py`: an inner node is SHA-256(left ‖ right), and a level of odd length
/// is padded with one zero node. Leaves are hashes of more than 64 bytes, so no leaf can be passed off as an inner
/// node.
library Merkle {
    /// @notice Returns whether a leaf is at a position of a tree.
    /// @dev The tree's depth follows from `count`, so the loop has at most 64 rounds.
    /// @param root Root of the tree.
    /// @param count Number of leaves.
    /// @param index Position of the leaf, from 0.
    /// @param leaf The leaf's hash.
    /// @param proof The siblings on the path from the leaf to the root.
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

    /// @dev Returns the number of levels above the leaves: the bit length of count - 1.
    function _depth(uint64 count) private pure returns (uint256 depth) {
        for (uint64 rest = count - 1; rest != 0; rest >>= 1) {
            ++depth;
        }
    }
}
