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
}
