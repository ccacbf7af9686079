// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MarketBase} from "./MarketBase.sol";
import {ICommittee} from "../src/interfaces/ICommittee.sol";
import {
    ExecutionHistory,
    IMarket,
    Parameters,
    Payment,
    PlanSubmission,
    Request,
    Settlement,
    Status
} from "../src/interfaces/IMarket.sol";
import {pack} from "../src/libraries/AccountAmount.sol";

contract MarketSettlementTest is MarketBase {
    function test_settle_decides_payouts_and_distribute_credits_them() public {
        bytes32 id = request(1);
        expose(id, 100e6);
        Settlement memory s = makeSettlement(1e6, 100e6, 30e6);
        settle(id, s);
        assertEq(market.balanceOf(node[0]), 0); // decided, not yet credited
        assertEq(market.balanceOf(node[1]), 30e6); // rewards at once
        assertEq(market.balanceOf(client), 999e6 - 0.01e6); // one per cent is the fee
        assertEq(market.balanceOf(address(this)), 70e6); // the treasury
        assertEq(nodes.nodeOf(node[2]).stake, NODE_STAKE - 100e6);
        assertEq(market.totalLocked(), 1e6);
        assertEq(market.totalFees(), 0.01e6);
        assertConserved();
        distributeAll(id, s.payouts);
        assertEq(market.balanceOf(node[0]), 1e6);
        assertEq(market.totalLocked(), 0);
        assertEq(nodes.nodeOf(node[0]).locked, 0);
        assertEq(nodes.nodeOf(node[2]).locked, 0);
        assertConserved();
        vm.prank(node[1]);
        market.withdraw(30e6);
        assertEq(usdc.balanceOf(node[1]), 30e6);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Settled));
        market.settle(id, s, recorded[id], signatures);
    }

    function test_distribute_pays_once_and_only_what_was_decided() public {
        bytes32 id = request(1);
        bytes32[] memory none = new bytes32[](0);
        PlanSubmission memory plan = makePlan(requests[id], 2);
        bytes memory reason = abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Requested);
        refuseDistribute(reason, makeHistory(id, plan, 0, none));
        submitPlan(id, 2);
        Settlement memory s = makeSettlement(1e6, 0, 0);
        settle(id, s);
        bytes memory mismatch = abi.encodeWithSelector(IMarket.RecordMismatch.selector, id);
        refuseDistribute(mismatch, makeHistory(id, plan, 0, none));
        refuseDistribute(mismatch, makeHistory(id, plan, SALT, s.payouts));
        s.payouts[0] = pack(node[0], 2e6);
        refuseDistribute(mismatch, makeHistory(id, plan, 0, s.payouts));
        s.payouts[0] = pack(node[0], 1e6);
        market.distribute(toList(makeHistory(id, plan, 0, s.payouts)));
        reason = abi.encodeWithSelector(IMarket.AlreadyDistributed.selector, id);
        refuseDistribute(reason, makeHistory(id, plan, 0, s.payouts));
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 65, 64));
        market.distribute(new ExecutionHistory[](65));
    }

    function test_distribute_releases_the_exposures_of_refunded_executions() public {
        bytes32 id = request(1);
        bytes32 never = request(2); // never gets a plan
        submitPlan(id, 2);
        commitAll(id, 2);
        vm.warp(block.timestamp + 60 + 1 hours);
        market.refund(id);
        market.refund(never);
        PlanSubmission memory plan = makePlan(requests[id], 2);
        bytes32[] memory payouts = makeSettlement(3e6, 0, 0).payouts;
        market.distribute(toList(makeHistory(id, plan, keccak256("commitments"), payouts)));
        assertEq(market.balanceOf(node[0]), 0); // after a refund the stated payouts are ignored
        assertEq(nodes.nodeOf(node[0]).locked, 0);
        assertEq(nodes.nodeOf(node[1]).locked, 0);
        plan = makePlan(requests[never], 2);
        bytes memory mismatch = abi.encodeWithSelector(IMarket.RecordMismatch.selector, never);
        refuseDistribute(mismatch, makeHistory(never, plan, 0, payouts));
        assertConserved();
    }

    function test_payouts_above_the_locked_price_are_refused() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        Settlement memory s = makeSettlement(PRICE + 1, 0, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.Overpaid.selector, id, PRICE + 1, PRICE));
        market.settle(id, s, recorded[id], signatures);
        settle(id, makeSettlement(PRICE, 0, 0)); // leaves nothing for a fee
        assertEq(market.totalFees(), 0);
        assertConserved();
    }

    function test_slashing_ones_own_node_loses_money() public {
        bytes32 id = request(1);
        expose(id, 100e6);
        Settlement memory s = makeSettlement(0, 100e6, 100e6); // node, validator and client are one party
        settle(id, s);
        assertEq(market.balanceOf(node[1]), 80e6);
        assertEq(market.balanceOf(address(this)), 20e6);
        assertConserved();
    }

    function test_rewards_are_scaled_down_when_less_stake_is_left() public {
        bytes32 id = request(1);
        expose(id, 10e6 - FLOOR); // as a validator it is exposed with the floor
        Settlement memory s = makeSettlement(1e6, 100e6, 30e6);
        s.rewards = new Payment[](2);
        s.rewards[0] = Payment(node[1], 30e6);
        s.rewards[1] = Payment(client, 10e6);
        settle(id, s);
        assertEq(market.balanceOf(node[1]), 6e6);
        assertEq(market.balanceOf(client), 999e6 - 0.01e6 + 2e6);
        assertEq(market.balanceOf(address(this)), 2e6);
        require(market.conserved());
    }

    function test_s08_a_settlement_that_slashes_needs_the_recorded_exposures() public {
        bytes32 id = request(1);
        expose(id, EXPOSURE);
        Settlement memory s = makeSettlement(1e6, NODE_STAKE, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        ExecutionHistory memory other = recorded[id];
        other.exposures = makeExposures(3);
        other.exposures[2] = pack(node[2], NODE_STAKE);
        refuse(abi.encodeWithSelector(IMarket.RecordMismatch.selector, id));
        market.settle(id, s, other, signatures);
        ExecutionHistory memory none;
        refuse(abi.encodeWithSelector(IMarket.RecordMismatch.selector, id));
        market.settle(id, s, none, signatures);
        market.settle(id, s, recorded[id], signatures);
        assertEq(nodes.nodeOf(node[2]).stake, NODE_STAKE - EXPOSURE - FLOOR);
        assertConserved();
    }

    function test_s08_nobody_is_slashed_before_commitments() public {
        bytes32 id = request(1);
        submitPlan(id, 3);
        settle(id, makeSettlement(1e6, NODE_STAKE, 0));
        assertEq(nodes.nodeOf(node[2]).stake, NODE_STAKE);
    }

    function test_s12_an_open_execution_keeps_the_treasurys_share() public {
        bytes32 id = request(1);
        expose(id, 100e6);
        Parameters memory p = defaultParameters();
        p.treasuryBps = 1;
        market.setParameters(p);
        settle(id, makeSettlement(0, 100e6, 100e6));
        assertEq(market.balanceOf(node[1]), 80e6);
    }

    function test_settle_takes_what_is_left_of_a_stake() public {
        uint96 most = NODE_STAKE - RESERVE;
        bytes32 id = request(1);
        expose(id, most);
        vm.prank(address(market)); // 21 verifications at once took more than the reserve
        nodes.slash(makeSlash(node[2], RESERVE + FLOOR), makeSlash(node[2], RESERVE));
        uint256 before = usdc.balanceOf(address(market));
        settle(id, makeSettlement(1e6, type(uint96).max, 0));
        assertEq(nodes.nodeOf(node[2]).stake, 0);
        assertEq(market.balanceOf(address(this)), most - FLOOR);
        assertEq(usdc.balanceOf(address(market)), before + most - FLOOR);
    }

    function makeSlash(address account, uint96 amount) internal pure returns (bytes32[] memory list) {
        list = new bytes32[](1);
        list[0] = pack(account, amount);
    }

    function test_settle_checks_status_quorum_and_contents() public {
        bytes32 id = request(1);
        Settlement memory s = makeSettlement(1e6, 0, 0);
        bytes memory signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StatusInvalid.selector, id, Status.Requested));
        market.settle(id, s, recorded[id], signatures);
        expose(id, EXPOSURE);
        s.payouts[0] = pack(client, 1e6); // not what was signed
        vm.expectRevert();
        market.settle(id, s, recorded[id], signatures);
        s = makeSettlement(1e6, 0, 0);
        s.steps = 2;
        signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.StepsInvalid.selector, 2, 1));
        market.settle(id, s, recorded[id], signatures);
        s = makeSettlement(1e6, 0, 0);
        s.payouts = new bytes32[](2);
        s.payouts[0] = pack(node[0], 1);
        s.payouts[1] = pack(node[0], 1);
        signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.PayoutsNotAscending.selector, node[0], node[0]));
        market.settle(id, s, recorded[id], signatures);
        s = makeSettlement(1e6, 1e6, 1e6);
        s.rewards[0].to = address(0);
        signatures = certify(3, settlementHash(id, s));
        refuse(abi.encodeWithSelector(IMarket.AddressMissing.selector));
        market.settle(id, s, recorded[id], signatures);
    }

    function test_a24_settle_is_bounded() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        Settlement memory s;
        s.payouts = new bytes32[](2049);
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 2049, 2048));
        market.settle(id, s, recorded[id], "");
        s.payouts = new bytes32[](0);
        s.slashes = new bytes32[](257);
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 257, 256));
        market.settle(id, s, recorded[id], "");
        s.slashes = new bytes32[](0);
        s.rewards = new Payment[](257);
        refuse(abi.encodeWithSelector(IMarket.TooMany.selector, 257, 256));
        market.settle(id, s, recorded[id], "");
    }

    function test_a24_the_largest_execution_fits_a_transaction() public {
        uint256 count = 1024;
        bytes32 id = request(1);
        Request memory r = requests[id];
        PlanSubmission memory plan = makePlan(r, 0);
        plan.executors = uint32(count);
        bytes32[] memory exposures = new bytes32[](count);
        Settlement memory s = makeSettlement(0, 0, 0);
        s.payouts = new bytes32[](2 * count);
        for (uint160 i; i < 2 * count; ++i) {
            address account = address(0x10001 + i);
            if (i < count) {
                joinNode(account);
                exposures[i] = pack(account, EXPOSURE);
            }
            s.payouts[i] = pack(account, 1000);
        }
        bytes memory signatures = certify(3, planHash(id, plan));
        uint256 before = gasleft();
        market.submitCompletePlan(r, plan, signatures);
        require(before - gasleft() < 250_000, "plan"); // the same as for the smallest plan
        signatures = certify(3, commitmentsHash(id, SALT, exposures));
        before = gasleft();
        market.commitExecution(id, SALT, exposures, signatures);
        require(before - gasleft() < 1 << 24, "commitments");
        signatures = certify(3, settlementHash(id, s));
        before = gasleft();
        market.settle(id, s, recorded[id], signatures);
        require(before - gasleft() < 1 << 24, "settle");
        ExecutionHistory memory history = makeHistory(id, plan, 0, s.payouts);
        (history.commitments, history.exposures) = (SALT, exposures);
        ExecutionHistory[] memory histories = toList(history);
        for (uint256 left = 2 * count; left > 0; left -= left < 384 ? left : 384) {
            before = gasleft();
            market.distribute(histories);
            require(before - gasleft() < 1 << 24, "distribute");
            assertEq(nodes.nodeOf(address(0x10001)).locked, 0);
        }
        assertEq(market.balanceOf(address(0x10001)), 1000);
        assertEq(market.balanceOf(address(0x10800)), 1000);
        refuse(abi.encodeWithSelector(IMarket.AlreadyDistributed.selector, id));
        market.distribute(histories);
        assertEq(market.totalLocked(), 0);
        assertConserved();
    }

    function test_members_share_the_fees_equally() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        settle(id, makeSettlement(1e6 + 300, 0, 0));
        assertEq(market.totalFees(), 10_003);
        market.collectFees(1);
        for (uint256 i; i < 4; ++i) {
            assertEq(market.balanceOf(vm.addr(memberKeys[i])), 2_500);
        }
        assertEq(market.totalFees(), 3); // left for the next time
        assertConserved();
    }

    function test_fees_go_to_the_members_that_earned_them() public {
        bytes32 id = request(1);
        submitPlan(id, 1);
        uint256[] memory first = memberKeys;
        for (uint256 i; i < 4; ++i) {
            memberKeys[i] = 0xC1 + i;
        }
        sortMemberKeys();
        committee.resetMembers(makeMembers()); // configuration 2
        memberKeys = first;
        settle(id, makeSettlement(1e6, 0, 0));
        assertEq(market.feesOf(1), 10_000);
        assertEq(market.feesOf(2), 0);
        market.collectFees(2);
        assertEq(market.totalFees(), 10_000);
        market.collectFees(1);
        assertEq(market.balanceOf(vm.addr(first[3])), 2_500);
        assertEq(market.totalFees(), 0);
        assertConserved();
        refuse(abi.encodeWithSelector(ICommittee.ConfigurationUnknown.selector, 3));
        market.collectFees(3);
    }
}
