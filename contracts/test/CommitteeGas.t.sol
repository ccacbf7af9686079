// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";

/// @dev Gas of the committee's functions, in snapshots/Committee.json. Writes are whole transactions, with the 21 k
/// that every transaction costs; the two checks are calls from another contract, without.
contract CommitteeGasTest is Base {
    function recordGas(string memory name) internal {
        vm.snapshotGasLastCall("Committee", name);
    }

    function test_gas_of_the_committee() public {
        bytes32 root = keccak256("root");
        bytes memory key = blsKey(GROUP_SECRET);
        confirmKey(key, 1);
        recordGas("confirmGroupKey");
        committee.resetMembers(makeMembers());
        confirmKey(key, 3);
        recordGas("confirmGroupKey, the deciding vote");
        for (uint64 sequence = 1; sequence <= 65; ++sequence) {
            committee.submitSnapshot(sequence, 1, root, certify(3, snapshotHash(2, sequence, root)));
            if (sequence == 1) recordGas("submitSnapshot, the first");
        }
        recordGas("submitSnapshot");
        committee.requireQuorum(root, certify(3, root));
        recordGas("requireQuorum");
        bytes memory message = abi.encode(root, root, root, uint64(1), root);
        committee.verifyRandomness(message, blsSign(GROUP_SECRET, message));
        recordGas("verifyRandomness");
    }

    /// @dev A handover to the largest committee: every call stays below the gas limit of a transaction.
    function test_gas_of_thirty_one_members() public {
        bytes32 root = keccak256("root");
        bytes memory key = blsKey(GROUP_SECRET);
        confirmKey(key, 3);
        makeMemberKeys(31);
        committee.setMembers(makeMembers());
        recordGas("setMembers, 31 members");
        vm.prank(vm.addr(memberKeys[findCurrentMember()]));
        committee.postDealing(dealing());
        recordGas("postDealing, for 31 members");
        for (uint256 i; i < 20; ++i) {
            confirm(i, key);
        }
        confirm(20, key);
        recordGas("confirmGroupKey, 31 members, the deciding vote");
        assertEq(committee.configuration(), 2);
        assertEq(committee.quorum(), 21);
        committee.submitSnapshot(1, 1, root, certify(21, snapshotHash(2, 1, root)));
        recordGas("submitSnapshot, 31 members, the first");
        committee.requireQuorum(root, certify(21, root));
        recordGas("requireQuorum, 31 members");
    }

    function confirm(uint256 position, bytes memory key) internal {
        vm.prank(vm.addr(memberKeys[position]));
        committee.confirmGroupKey(keccak256(key), key);
    }

    /// @dev Returns the position in memberKeys of a current member.
    function findCurrentMember() internal view returns (uint256 position) {
        while (!committee.isMember(vm.addr(memberKeys[position]))) ++position;
    }

    /// @dev As long as a dealing for 31 members, which has 21 commitments and 31 encrypted shares. It has no zero
    /// bytes, because those cost less gas.
    function dealing() internal pure returns (bytes memory data) {
        data = new bytes(7471);
        for (uint256 i; i < data.length; ++i) {
            data[i] = "a";
        }
    }
}
