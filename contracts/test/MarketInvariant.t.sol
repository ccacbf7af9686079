// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {Base} from "./Base.sol";
import {Completion, Execution, Settlement, Status} from "../src/interfaces/IMarket.sol";

/// @dev Everything that moves money, in any order, by forge's choice. Owns the network it acts on.
contract MarketHandler is Base {
    uint256 internal constant EXECUTIONS = 8;

    bytes32[] internal _ids;

    function deposit(uint64 amount) external {
        fund(client, uint256(amount) + 1);
    }

    function withdraw(uint256 who, uint128 amount) external {
        address account = who % 4 == 3 ? client : node[who % 4];
        uint256 part = amount % (market.balanceOf(account) + 1);
        vm.prank(account);
        market.withdraw(part);
    }

    function ask() external {
        if (_ids.length < EXECUTIONS) _ids.push(request(uint64(_ids.length)));
    }

    function plan(uint256 which, uint16 executors) external {
        submitPlan(_pick(which), executors % 3 + 1);
    }

    function commit(uint256 which, uint256 who) external {
        Completion[] memory list = new Completion[](1);
        list[0] = Completion(_pick(which), 1, keccak256("outputs"));
        vm.prank(node[who % 3]);
        market.commitCompletions(list);
    }

    function decide(uint256 which, uint128 pay, uint128 slash, uint128 fromSlash) external {
        settle(_pick(which), makeSettlement(pay % 3.1e6, slash % 100e6, fromSlash % (slash % 100e6 + 1e6)));
    }

    function refund(uint256 which, uint16 later) external {
        vm.warp(block.timestamp + later % 30);
        market.refund(_pick(which));
    }

    function check() external view {
        assertConserved();
        uint256 open;
        for (uint256 i; i < _ids.length; ++i) {
            Execution memory execution = market.executionOf(_ids[i]);
            if (execution.status == Status.Requested || execution.status == Status.Planned) open += execution.maxPrice;
        }
        assertEq(market.totalLocked(), open);
        uint256 owed = market.balanceOf(client) + market.balanceOf(address(this));
        uint256 staked;
        for (uint256 i; i < node.length; ++i) {
            owed += market.balanceOf(node[i]);
            staked += nodes.nodeOf(node[i]).stake;
        }
        assertEq(market.totalBalances(), owed);
        assertEq(usdc.balanceOf(address(nodes)), staked);
    }

    function _pick(uint256 which) internal view returns (bytes32) {
        return _ids[which % _ids.length];
    }
}

contract MarketInvariantTest {
    MarketHandler internal handler;

    function setUp() public {
        handler = new MarketHandler();
        handler.setUp();
    }

    function targetContracts() external view returns (address[] memory list) {
        list = new address[](1);
        list[0] = address(handler);
    }

    struct FuzzSelector {
        address addr;
        bytes4[] selectors;
    }

    function targetSelectors() external view returns (FuzzSelector[] memory list) {
        list = new FuzzSelector[](1);
        list[0].addr = address(handler);
        list[0].selectors = new bytes4[](7);
        list[0].selectors[0] = MarketHandler.deposit.selector;
        list[0].selectors[1] = MarketHandler.withdraw.selector;
        list[0].selectors[2] = MarketHandler.ask.selector;
        list[0].selectors[3] = MarketHandler.plan.selector;
        list[0].selectors[4] = MarketHandler.commit.selector;
        list[0].selectors[5] = MarketHandler.decide.selector;
        list[0].selectors[6] = MarketHandler.refund.selector;
    }

    function invariant_escrow_is_conserved() external view {
        handler.check();
    }
}
