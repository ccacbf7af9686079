// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";

/// @dev What the committee costs, in snapshots/Committee.json: writes as whole transactions with their 21 k,
/// the two checks as calls by another contract, without.
contract CommitteeGasTest is Base {
    function record(string memory name) internal {
        vm.snapshotGasLastCall("Committee", name);
    }

    function test_gas_of_the_committee() public {
        bytes32 root = keccak256("root");
        bytes memory key = blsKey(GROUP_SECRET);
        confirmKey(key, 1);
        record("confirmGroupKey");
        committee.resetMembers(makeMembers());
        confirmKey(key, 3);
        record("confirmGroupKey, the deciding vote");
        for (uint64 sequence = 1; sequence <= 65; ++sequence) {
            committee.submitSnapshot(sequence, 1, root, certify(3, snapshotHash(2, sequence, root)));
            if (sequence == 1) record("submitSnapshot, the first");
        }
        record("submitSnapshot");
        committee.requireQuorum(root, certify(3, root));
        record("requireQuorum");
        bytes memory message = abi.encode(root, root, root, uint64(1), root);
        committee.verifyRandomness(message, blsSign(GROUP_SECRET, message));
        record("verifyRandomness");
    }

    /// @dev The largest committee takes over the key: what is posted and checked stays below a transaction's bound.
    function test_gas_of_thirty_one_members() public {
        bytes32 root = keccak256("root");
        bytes memory key = blsKey(GROUP_SECRET);
        confirmKey(key, 3);
        makeMemberKeys(31);
        committee.setMembers(makeMembers());
        record("setMembers, 31 members");
        vm.prank(vm.addr(memberKeys[findSeated()]));
        committee.postDealing(dealing());
        record("postDealing, for 31 members");
        for (uint256 i; i < 20; ++i) {
            confirm(i, key);
        }
        confirm(20, key);
        record("confirmGroupKey, 31 members, the deciding vote");
        assertEq(committee.configuration(), 2);
        assertEq(committee.quorum(), 21);
        committee.submitSnapshot(1, 1, root, certify(21, snapshotHash(2, 1, root)));
        record("submitSnapshot, 31 members, the first");
        committee.requireQuorum(root, certify(21, root));
        record("requireQuorum, 31 members");
    }

    function confirm(uint256 place, bytes memory key) internal {
        vm.prank(vm.addr(memberKeys[place]));
        committee.confirmGroupKey(keccak256(key), key);
    }

    /// @dev The place among 31 of a member that sits among the four, too.
    function findSeated() internal view returns (uint256 place) {
        while (!committee.isMember(vm.addr(memberKeys[place]))) ++place;
    }

    /// @dev As long as one for 31 members: 21 commitments and 31 sealed shares, hardly a zero among its bytes.
    function dealing() internal pure returns (bytes memory data) {
        data = new bytes(7471);
        for (uint256 i; i < data.length; ++i) {
            data[i] = "a";
        }
    }
}
