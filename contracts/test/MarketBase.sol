// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";
import {ExecutionHistory} from "../src/interfaces/IMarket.sol";
import {accountOf, pack} from "../src/libraries/AccountAmount.sol";

/// @dev The network of Base, whose committee also has a group key and one snapshot.
abstract contract MarketBase is Base {
    bytes32 internal constant SALT = keccak256("another root");

    function setUp() public virtual override {
        super.setUp();
        confirmKey(blsKey(GROUP_SECRET), 3);
        bytes32 root = keccak256("snapshot");
        committee.submitSnapshot(1, 1, root, certify(3, snapshotHash(1, 1, root)));
    }

    function refuse(bytes memory reason) internal {
        vm.expectRevert(reason);
    }

    function refuseDistribute(bytes memory reason, ExecutionHistory memory history) internal {
        ExecutionHistory[] memory histories = toList(history);
        refuse(reason);
        market.distribute(histories);
    }

    function commitAll(bytes32 id, uint32 count) internal {
        commitAll(id, makeExposures(count));
    }

    function commitAll(bytes32 id, bytes32[] memory exposures) internal {
        bytes32 root = keccak256("commitments");
        uint256[] memory before = new uint256[](exposures.length);
        for (uint256 i; i < exposures.length; ++i) {
            before[i] = nodes.nodeOf(accountOf(exposures[i])).locked;
        }
        market.commitExecution(id, root, exposures, certify(3, commitmentsHash(id, root, exposures)));
        recorded[id].commitments = root;
        for (uint256 i; i < exposures.length; ++i) {
            address account = accountOf(exposures[i]);
            recorded[id].exposures.push(pack(account, uint96(nodes.nodeOf(account).locked - before[i])));
        }
    }

    /// @dev Plans an execution and locks these stakes of all three nodes; the third is the one that settlements slash.
    function expose(bytes32 id, uint96 exposure) internal {
        submitPlan(id, 3);
        bytes32[] memory exposures = makeExposures(3);
        exposures[2] = pack(node[2], exposure);
        commitAll(id, exposures);
    }

    /// @dev Credits a settlement's payouts and releases the exposures, as `recorded` knows them.
    function distributeAll(bytes32 id, bytes32[] memory payouts) internal {
        ExecutionHistory memory history = recorded[id];
        history.payouts = payouts;
        market.distribute(toList(history));
    }

    function toList(ExecutionHistory memory history) internal pure returns (ExecutionHistory[] memory histories) {
        histories = new ExecutionHistory[](1);
        histories[0] = history;
    }
}
