// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MarketBase} from "./MarketBase.sol";
import {Execution, IMarket, Request, Status, Terms} from "../src/interfaces/IMarket.sol";

/// @dev Requests that are signed against a frozen balance and opened by a member.
contract MarketSignedTest is MarketBase {
    function prepare(uint64 nonce) internal returns (Request memory r, bytes memory own, Terms memory terms, bytes memory all) {
        r = makeRequest(nonce);
        requests[market.executionIdOf(client, nonce)] = r;
        own = signRequest(CLIENT_KEY, r);
        terms = makeTerms(r, 2);
        all = certify(3, planHash(market.executionIdOf(client, nonce), terms));
    }

    function test_one_call_opens_and_plans() public {
        (Request memory r, bytes memory own, Terms memory terms, bytes memory all) = prepare(1);
        bytes32 id = market.executionIdOf(client, 1);
        vm.prank(node[2]); // anybody may bring it
        require(market.openExecution(r, own, terms, all) == id);
        Execution memory execution = market.executionOf(id);
        require(execution.status == Status.Planned && execution.client == client && execution.executorCount == 2);
        assertEq(execution.configuration, 1);
        assertEq(market.balanceOf(client), 1000e6 - PRICE);
        assertEq(market.totalLocked(), PRICE);
        settle(id, makeSettlement(1e6, 0, 0));
        distribute(id, 2, makeSettlement(1e6, 0, 0).payouts);
        assertEq(market.balanceOf(node[0]), 1e6);
        assertConserved();
    }

    function test_a_signature_opens_once() public {
        (Request memory r, bytes memory own, Terms memory terms, bytes memory all) = prepare(1);
        market.openExecution(r, own, terms, all);
        refuse(abi.encodeWithSelector(IMarket.NonceUsed.selector, client, 1));
        market.openExecution(r, own, terms, all);
        r.maxPrice += 1; // the same number with other words
        own = signRequest(CLIENT_KEY, r);
        refuse(abi.encodeWithSelector(IMarket.NonceUsed.selector, client, 1));
        market.openExecution(r, own, terms, all);
    }

    function test_a15_a_signature_is_for_its_words_only() public {
        (Request memory r, bytes memory own, Terms memory terms, bytes memory all) = prepare(1);
        bytes memory reason = abi.encodeWithSelector(IMarket.ClientSignatureInvalid.selector, client);
        bytes memory stranger = signRequest(0xBAD, r);
        refuse(reason);
        market.openExecution(r, stranger, terms, all);
        refuse(reason);
        market.openExecution(r, "", terms, all);
        r.nonce = 2;
        refuse(reason);
        market.openExecution(r, own, terms, all);
        r.nonce = 1;
        r.steps = 2;
        refuse(reason);
        market.openExecution(r, own, terms, all);
        r.steps = 1;
        r.client = node[0];
        refuse(abi.encodeWithSelector(IMarket.ClientSignatureInvalid.selector, node[0]));
        market.openExecution(r, own, terms, all);
    }

    function test_a16_high_s_is_refused() public {
        (Request memory r, bytes memory own, Terms memory terms, bytes memory all) = prepare(1);
        uint256 order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141;
        uint256 s;
        assembly ("memory-safe") {
            s := mload(add(own, 64))
            mstore(add(own, 64), sub(order, s))
        }
        own[64] = own[64] == bytes1(uint8(27)) ? bytes1(uint8(28)) : bytes1(uint8(27));
        refuse(abi.encodeWithSelector(IMarket.ClientSignatureInvalid.selector, client));
        market.openExecution(r, own, terms, all);
    }

    function test_the_snapshot_must_be_remembered() public {
        (Request memory r,, Terms memory terms,) = prepare(1);
        r.snapshotRoot = keccak256("another");
        bytes memory own = signRequest(CLIENT_KEY, r);
        refuse(abi.encodeWithSelector(IMarket.SnapshotUnknown.selector, 1, keccak256("another")));
        market.openExecution(r, own, terms, "");
        (r.snapshotSequence, r.snapshotRoot) = (2, 0); // no snapshot yet
        refuse(abi.encodeWithSelector(IMarket.SnapshotUnknown.selector, 2, bytes32(0)));
        market.openExecution(r, own, terms, "");
        bytes memory all;
        (r, own, terms, all) = prepare(1);
        bytes32 root = keccak256("newer");
        committee.submitSnapshot(2, 1, root, certify(3, snapshotHash(1, 2, root)));
        market.openExecution(r, own, terms, all); // an older one will do
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
        market.requestExecution(MODEL, 1, 0, 0, PRICE, uint64(block.timestamp + 60), 5);
        (Request memory r, bytes memory own, Terms memory terms, bytes memory all) = prepare(1);
        market.openExecution(r, own, terms, all);
        vm.warp(until);
        vm.prank(client);
        market.withdraw(1000e6 - PRICE);
    }

    function test_a_freeze_only_lengthens_and_ends() public {
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

    /// @dev The bound on double spending: whatever a client signs, its balance is spent once. Members see
    /// to it that no two certified requests compete for a balance; if they did, the second would fail
    /// whole, and nothing of it would stay.
    function test_a_missing_balance_fails_cleanly() public {
        (Request memory r, bytes memory own, Terms memory terms, bytes memory all) = prepare(1);
        vm.prank(client);
        market.withdraw(1000e6 - PRICE);
        market.openExecution(r, own, terms, all);
        (r, own, terms, all) = prepare(2);
        uint256 locked = nodes.nodeOf(node[0]).locked;
        refuse(abi.encodeWithSelector(IMarket.BalanceTooSmall.selector, client, 0, PRICE));
        market.openExecution(r, own, terms, all);
        require(market.executionOf(market.executionIdOf(client, 2)).status == Status.Unknown);
        assertEq(nodes.nodeOf(node[0]).locked, locked);
        assertConserved();
        fund(client, PRICE); // and it opens when the money is there after all
        market.openExecution(r, own, terms, all);
    }

    function test_a_signed_request_obeys_the_same_rules() public {
        market.setPaused(true);
        (Request memory r, bytes memory own, Terms memory terms, bytes memory all) = prepare(1);
        refuse(abi.encodeWithSelector(IMarket.RequestsPaused.selector));
        market.openExecution(r, own, terms, all);
        market.setPaused(false);
        vm.warp(r.deadline - 4); // four seconds are too few
        refuse(
            abi.encodeWithSelector(
                IMarket.DeadlineInvalid.selector, r.deadline, block.timestamp + 5, block.timestamp + 1 days
            )
        );
        market.openExecution(r, own, terms, all);
    }
}
