// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MarketBase} from "./MarketBase.sol";

/// @dev From some moment on no member and no owner acts any more. Everybody else gets back what is theirs, each by
/// calls of its own or of anybody's, with nothing but events.
contract MarketStalledTest is MarketBase {
    address internal constant ANYBODY = address(0xA11);

    function recover(bytes32 id) internal {
        vm.warp(market.refundableAt(id));
        vm.prank(ANYBODY);
        market.refund(id);
        if (recorded[id].planRoot != 0) {
            vm.prank(ANYBODY);
            distributeAll(id, new bytes32[](0));
        }
        vm.warp(market.frozenUntil(client) > block.timestamp ? market.frozenUntil(client) : block.timestamp);
        uint256 kept = recorded[id].planRoot != 0 ? RESERVATION : 0; // the treasury's
        vm.prank(client);
        market.withdraw(1000e6 - kept);
        assertEq(usdc.balanceOf(client), 1000e6 - kept);
        for (uint256 i; i < 3; ++i) {
            vm.prank(node[i]);
            nodes.requestUnstake();
        }
        vm.warp(block.timestamp + UNBONDING);
        for (uint256 i; i < 3; ++i) {
            vm.prank(node[i]);
            nodes.withdrawStake();
            assertEq(usdc.balanceOf(node[i]), NODE_STAKE);
        }
        assertEq(usdc.balanceOf(address(market)) + usdc.balanceOf(address(nodes)), kept);
    }

    function test_a_committee_that_stalls_before_the_plan_keeps_nothing() public {
        recover(request(1));
    }

    function test_a_committee_that_stalls_after_the_plan_keeps_nothing() public {
        bytes32 id = request(1);
        submitPlan(id, 3);
        recover(id);
    }

    function test_a_committee_that_stalls_after_the_commitments_keeps_nothing() public {
        bytes32 id = request(1);
        submitPlan(id, 3);
        commitAll(id, 3);
        recover(id);
    }

    /// @dev The longest that a client's money is kept: by a freeze of 30 days and a pause, which stops requests only.
    function test_a_stalled_owner_keeps_nothing() public {
        bytes32 id = request(1);
        vm.prank(client);
        market.freeze(uint64(block.timestamp + 30 days));
        market.setPaused(true);
        recover(id);
    }
}
