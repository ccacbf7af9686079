// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MarketBase} from "./MarketBase.sol";
import {Execution, IMarket, PlanSubmission, Request, Status} from "../src/interfaces/IMarket.sol";

/// @dev Requests that a client signs while its balance is frozen, and that a committee member opens.
contract MarketSignedTest is MarketBase {
    function prepare(uint64 nonce)
        internal
        returns (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures)
    {
        r = makeRequest(nonce);
        requests[market.executionIdOf(client, nonce)] = r;
        clientSignature = signRequest(CLIENT_KEY, r);
        plan = makePlan(r, 2);
        signatures = certify(3, planHash(market.executionIdOf(client, nonce), plan));
    }

    function test_one_call_opens_an_execution_and_sets_its_plan() public {
        (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        bytes32 id = market.executionIdOf(client, 1);
        vm.prank(node[2]); // anybody may call
        require(market.openExecution(r, clientSignature, plan, signatures) == id);
        Execution memory execution = market.executionOf(id);
        require(execution.status == Status.Planned && execution.client == client);
        assertEq(execution.configuration, 1);
        assertEq(market.balanceOf(client), 1000e6 - PRICE);
        assertEq(market.totalLocked(), PRICE);
        settle(id, makeSettlement(1e6, 0, 0));
        distribute(id, 2, makeSettlement(1e6, 0, 0).payouts);
        assertEq(market.balanceOf(node[0]), 1e6);
        assertConserved();
    }

    function test_a_signature_opens_once() public {
        (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        market.openExecution(r, clientSignature, plan, signatures);
        refuse(abi.encodeWithSelector(IMarket.NonceUsed.selector, client, 1));
        market.openExecution(r, clientSignature, plan, signatures);
        r.maxPrice += 1; // another request with the same nonce
        clientSignature = signRequest(CLIENT_KEY, r);
        refuse(abi.encodeWithSelector(IMarket.NonceUsed.selector, client, 1));
        market.openExecution(r, clientSignature, plan, signatures);
    }

    function test_a15_a_signature_is_valid_for_one_request() public {
        (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        bytes memory reason = abi.encodeWithSelector(IMarket.ClientSignatureInvalid.selector, client);
        bytes memory wrongSignature = signRequest(0xBAD, r);
        refuse(reason);
        market.openExecution(r, wrongSignature, plan, signatures);
        refuse(reason);
        market.openExecution(r, "", plan, signatures);
        r.nonce = 2;
        refuse(reason);
        market.openExecution(r, clientSignature, plan, signatures);
        r.nonce = 1;
        r.steps = 2;
        refuse(reason);
        market.openExecution(r, clientSignature, plan, signatures);
        r.steps = 1;
        r.client = node[0];
        refuse(abi.encodeWithSelector(IMarket.ClientSignatureInvalid.selector, node[0]));
        market.openExecution(r, clientSignature, plan, signatures);
    }

    /// @dev The client signs both wordings of one number, and the committee plans both.
    function test_s03_one_wording_of_a_request_is_opened_with_its_own_plan() public {
        (Request memory first, bytes memory firstWords, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        Request memory second = makeRequest(1);
        second.maxPrice = PRICE + 1;
        bytes memory secondWords = signRequest(CLIENT_KEY, second);
        vm.expectRevert(); // the recovered signers are no members: they signed for the other words
        market.openExecution(second, secondWords, plan, signatures);
        market.openExecution(first, firstWords, plan, signatures);
        requests[market.executionIdOf(client, 1)] = second;
        plan = makePlan(second, 2);
        signatures = certify(3, planHash(market.executionIdOf(client, 1), plan));
        refuse(abi.encodeWithSelector(IMarket.NonceUsed.selector, client, 1));
        market.openExecution(second, secondWords, plan, signatures);
    }

    function test_a16_high_s_is_refused() public {
        (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        uint256 order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141;
        uint256 s;
        assembly ("memory-safe") {
            s := mload(add(clientSignature, 64))
            mstore(add(clientSignature, 64), sub(order, s))
        }
        clientSignature[64] = clientSignature[64] == bytes1(uint8(27)) ? bytes1(uint8(28)) : bytes1(uint8(27));
        refuse(abi.encodeWithSelector(IMarket.ClientSignatureInvalid.selector, client));
        market.openExecution(r, clientSignature, plan, signatures);
    }

    function test_the_snapshot_must_be_one_of_the_stored_ones() public {
        (Request memory r,, PlanSubmission memory plan,) = prepare(1);
        r.snapshotRoot = keccak256("another");
        bytes memory clientSignature = signRequest(CLIENT_KEY, r);
        refuse(abi.encodeWithSelector(IMarket.SnapshotUnknown.selector, 1, keccak256("another")));
        market.openExecution(r, clientSignature, plan, "");
        (r.snapshotSequence, r.snapshotRoot) = (2, 0); // no snapshot yet
        refuse(abi.encodeWithSelector(IMarket.SnapshotUnknown.selector, 2, bytes32(0)));
        market.openExecution(r, clientSignature, plan, "");
        bytes memory signatures;
        (r, clientSignature, plan, signatures) = prepare(1);
        bytes32 root = keccak256("newer");
        committee.submitSnapshot(2, 1, root, certify(3, snapshotHash(1, 2, root)));
        market.openExecution(r, clientSignature, plan, signatures); // an older snapshot is accepted
    }

    function test_a_frozen_balance_is_for_signed_requests_only() public {
        uint64 until = uint64(block.timestamp + 1 hours);
        vm.prank(client);
        market.freeze(until);
        assertEq(market.frozenUntil(client), until);
        bytes memory frozen = abi.encodeWithSelector(IMarket.Frozen.selector, client, until);
        refuse(frozen);
        vm.prank(client);
        market.withdraw(1);
        refuse(frozen);
        vm.prank(client);
        market.requestExecution(MODEL, 1, 0, 0, PRICE, uint64(block.timestamp + 60), 5, 800);
        (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        market.openExecution(r, clientSignature, plan, signatures);
        vm.warp(until);
        vm.prank(client);
        market.withdraw(1000e6 - PRICE);
    }

    function test_a_freeze_can_only_be_extended_and_is_bounded() public {
        uint256 time = block.timestamp;
        bytes4 kind = IMarket.FreezeInvalid.selector;
        refuse(abi.encodeWithSelector(kind, time, time + 1, time + 30 days));
        vm.prank(client);
        market.freeze(uint64(time));
        refuse(abi.encodeWithSelector(kind, time + 30 days + 1, time + 1, time + 30 days));
        vm.prank(client);
        market.freeze(uint64(time + 30 days + 1));
        vm.prank(client);
        market.freeze(uint64(time + 100));
        refuse(abi.encodeWithSelector(kind, time + 100, time + 101, time + 30 days));
        vm.prank(client);
        market.freeze(uint64(time + 100));
        vm.prank(client);
        market.freeze(uint64(time + 200));
    }

    /// @dev A client cannot spend its balance twice, whatever it signs. Members do not certify two requests that
    /// compete for one balance; if they did, the second call would revert without any effect.
    function test_a_missing_balance_reverts_without_any_effect() public {
        (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        vm.prank(client);
        market.withdraw(1000e6 - PRICE);
        market.openExecution(r, clientSignature, plan, signatures);
        (r, clientSignature, plan, signatures) = prepare(2);
        uint256 locked = nodes.nodeOf(node[0]).locked;
        refuse(abi.encodeWithSelector(IMarket.BalanceTooSmall.selector, client, 0, PRICE));
        market.openExecution(r, clientSignature, plan, signatures);
        require(market.executionOf(market.executionIdOf(client, 2)).status == Status.Unknown);
        assertEq(nodes.nodeOf(node[0]).locked, locked);
        assertConserved();
        fund(client, PRICE); // it can be opened once the balance suffices
        market.openExecution(r, clientSignature, plan, signatures);
    }

    function test_a_signed_request_obeys_the_same_rules() public {
        market.setPaused(true);
        (Request memory r, bytes memory clientSignature, PlanSubmission memory plan, bytes memory signatures) =
            prepare(1);
        refuse(abi.encodeWithSelector(IMarket.RequestsPaused.selector));
        market.openExecution(r, clientSignature, plan, signatures);
        market.setPaused(false);
        vm.warp(r.deadline - 4); // four seconds are less than the minimum of five
        refuse(
            abi.encodeWithSelector(
                IMarket.DeadlineInvalid.selector, r.deadline, block.timestamp + 5, block.timestamp + 1 days
            )
        );
        market.openExecution(r, clientSignature, plan, signatures);
    }
}
