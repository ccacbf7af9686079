// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MarketBase} from "./MarketBase.sol";
import {IMarket, Parameters, Settlement} from "../src/interfaces/IMarket.sol";
import {INodeRegistry} from "../src/interfaces/INodeRegistry.sol";

/// @dev What an execution was opened under holds until it is closed, and it can be settled only until its end.
contract MarketOpenExecutionsTest is MarketBase {
    function test_s08_a_settlement_after_the_end_is_refused() public {
        bytes32 id = request(1);
        expose(id, EXPOSURE);
        uint64 end = market.executionOf(id).deadline + 1 hours;
        Settlement memory s = makeSettlement(1e6, 1e6, 0.5e6); // with a slash
        bytes memory signatures = certify(3, settlementHash(id, s));
        uint96 stake = nodes.nodeOf(node[2]).stake;
        vm.warp(end);
        refuse(abi.encodeWithSelector(IMarket.DeadlinePassed.selector, id, end));
        market.settle(id, s, recorded[id], signatures);
        assertEq(nodes.nodeOf(node[2]).stake, stake);
        vm.warp(end - 1);
        market.settle(id, s, recorded[id], signatures);
        assertEq(nodes.nodeOf(node[2]).stake, stake - 1e6);
        assertConserved();
    }

    function test_s12_an_open_execution_keeps_its_fee() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        Parameters memory p = defaultParameters();
        uint256 fee = uint256(1e6) * p.feeBps / 10_000;
        p.feeBps = 1000;
        market.setParameters(p);
        settle(id, makeSettlement(1e6, 0, 0));
        assertEq(market.totalFees(), fee);
    }

    function test_s12_an_open_execution_keeps_its_reservation() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        Parameters memory p = defaultParameters();
        p.reservationBps = 10_000;
        p.slashMilli = 1_000_000;
        market.setParameters(p);
        vm.warp(market.refundableAt(id));
        market.refund(id);
        assertEq(market.balanceOf(client), 1000e6 - RESERVATION);
    }

    function test_s12_an_open_execution_keeps_its_grace() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        commitAll(id, 1);
        uint256 before = market.refundableAt(id);
        nodes.setUnbondingPeriod(40 days);
        Parameters memory p = defaultParameters();
        p.settlementGraceS = 30 days;
        market.setParameters(p);
        assertEq(market.refundableAt(id), before);
        p.settlementGraceS = 0;
        market.setParameters(p);
        assertEq(market.refundableAt(id), before);
    }

    function test_s12_unbonding_outlasts_executions_opened_under_other_parameters() public {
        bytes32 id = request(1);
        uint64 end = market.executionOf(id).deadline + 1 hours;
        Parameters memory p = defaultParameters();
        p.minDeadlineS = 1;
        p.maxDeadlineS = 10;
        p.settlementGraceS = 0;
        market.setParameters(p);
        uint64 left = end - uint64(block.timestamp);
        assertEq(market.longestExecutionS(), left);
        left += SNAPSHOT_AGE;
        refuse(abi.encodeWithSelector(INodeRegistry.PeriodInvalid.selector, left, left + 1, 90 days));
        nodes.setUnbondingPeriod(left);
        vm.warp(end); // nothing opened under the former parameters can be settled any more
        assertEq(market.longestExecutionS(), 10);
        nodes.setUnbondingPeriod(11 + SNAPSHOT_AGE);
    }
}
