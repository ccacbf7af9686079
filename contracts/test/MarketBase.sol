// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";
import {Completion, ExecutionHistory} from "../src/interfaces/IMarket.sol";

/// @dev The network of Base, whose committee also has a group key and one snapshot.
abstract contract MarketBase is Base {
    function setUp() public virtual override {
        super.setUp();
        confirmKey(blsKey(GROUP_SECRET), 3);
        bytes32 root = keccak256("snapshot");
        committee.submitSnapshot(1, 1, root, certify(3, snapshotHash(1, 1, root)));
    }

    function refuse(bytes memory reason) internal {
        vm.expectRevert(reason);
    }

    function commit(address account, bytes32 id) internal {
        Completion[] memory list = new Completion[](1);
        list[0] = Completion(id, 1, keccak256("outputs"), EXPOSURE);
        vm.prank(account);
        market.commitCompletions(list);
    }

    function commitAll(bytes32 id, uint32 count) internal {
        commitAll(id, makeExposures(count));
    }

    function commitAll(bytes32 id, bytes32[] memory exposures) internal {
        bytes32 root = keccak256("commitments");
        market.commitExecution(id, root, exposures, certify(3, commitmentsHash(id, root, exposures)));
    }

    function toList(ExecutionHistory memory history) internal pure returns (ExecutionHistory[] memory histories) {
        histories = new ExecutionHistory[](1);
        histories[0] = history;
    }
}
