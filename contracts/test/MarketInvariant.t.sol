// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {MarketBase} from "./MarketBase.sol";
import {
    Execution, ExecutionHistory, PlanSubmission, Request, Settlement, Status
} from "../src/interfaces/IMarket.sol";
import {accountOf, amountOf, pack} from "../src/libraries/AccountAmount.sol";

/// @dev The calls that move money; forge chooses their order and arguments. The handler owns the network. Nodes 0 and
/// 1 are honest, node 2 is not: settlements slash only node 2.
contract MarketHandler is MarketBase {
    uint256 internal constant EXECUTIONS = 12;

    bytes32[] internal _ids;
    mapping(bytes32 executionId => uint32) internal _planned; // number of executors in the plan
    mapping(bytes32 executionId => bytes32) internal _commitments;
    mapping(bytes32 executionId => bytes32[]) internal _own; // packed entries of the nodes' own commitments
    mapping(bytes32 executionId => Settlement) internal _settlements;
    mapping(bytes32 executionId => uint256) internal _distributions; // successful ones
    uint256 internal _earned; // by node 0, out of prices
    uint256 internal _withdrawn; // by node 0

    function deposit(uint64 amount) external {
        fund(client, uint256(amount) + 1);
    }

    function withdraw(uint256 who, uint128 amount) external {
        address account = who % 4 == 3 ? client : node[who % 4];
        uint256 part = amount % (market.balanceOf(account) + 1);
        vm.prank(account);
        market.withdraw(part);
        if (account == node[0]) _withdrawn += part;
    }

    function freeze(uint16 later) external {
        vm.prank(client);
        market.freeze(uint64(block.timestamp + later % 20));
    }

    function requestOne() external {
        if (_ids.length < EXECUTIONS) _ids.push(request(uint64(_ids.length)));
    }

    function submit(uint256 which, uint16 executors) external {
        bytes32 id = _pick(which);
        uint32 count = executors % 3 + 1;
        submitPlan(id, count);
        _planned[id] = count;
    }

    function openSigned(uint16 executors) external {
        require(_ids.length < EXECUTIONS);
        Request memory r = makeRequest(uint64(_ids.length));
        bytes32 id = market.executionIdOf(client, r.nonce);
        requests[id] = r;
        uint32 count = executors % 3 + 1;
        PlanSubmission memory plan = makePlan(r, count);
        market.openExecution(r, signRequest(CLIENT_KEY, r), plan, certify(3, planHash(id, plan)));
        _ids.push(id);
        _planned[id] = count;
    }

    function commitOne(uint256 which, uint256 who) external {
        bytes32 id = _pick(which);
        commit(node[who % 3], id);
        _own[id].push(pack(node[who % 3], EXPOSURE));
    }

    function commitMany(uint256 which) external {
        bytes32 id = _pick(which);
        commitAll(id, _planned[id]);
        _commitments[id] = keccak256("commitments");
    }

    function decide(uint256 which, uint96 pay, uint96 slash, uint96 reward) external {
        bytes32 id = _pick(which);
        Settlement memory s = makeSettlement(pay % 3.1e6, slash % 100e6, reward % (slash % 100e6 + 1e6));
        settle(id, s);
        _settlements[id].payouts = s.payouts;
    }

    function distributeOne(uint256 which) external {
        _distribute(_pick(which));
    }

    function wait(uint16 later) external {
        vm.warp(block.timestamp + later % 90);
    }

    function refund(uint256 which) external {
        market.refund(_pick(which));
    }

    function collect() external {
        market.collectFees();
    }

    function check() external view {
        assertConserved();
        uint256 open_;
        uint256[3] memory exposed;
        for (uint256 i; i < _ids.length; ++i) {
            bytes32 id = _ids[i];
            Execution memory execution = market.executionOf(id);
            if (execution.status == Status.Requested || execution.status == Status.Planned) open_ += execution.maxPrice;
            if (execution.status == Status.Settled && !execution.released) open_ += _payout(id);
            require(_distributions[id] <= 1, "paid twice");
            if (execution.released) continue;
            for (uint256 k; k < _planned[id] && execution.certified; ++k) {
                exposed[k] += EXPOSURE;
            }
            for (uint256 k; k < _own[id].length; ++k) {
                for (uint256 n; n < 3; ++n) {
                    if (accountOf(_own[id][k]) == node[n]) exposed[n] += EXPOSURE;
                }
            }
        }
        assertEq(market.totalLocked(), open_);
        uint256 owed = market.balanceOf(client) + market.balanceOf(address(this));
        uint256 staked;
        for (uint256 i; i < node.length; ++i) {
            owed += market.balanceOf(node[i]);
            staked += nodes.nodeOf(node[i]).stake;
            assertEq(nodes.nodeOf(node[i]).locked, exposed[i]);
        }
        for (uint256 i; i < 4; ++i) {
            owed += market.balanceOf(vm.addr(memberKeys[i]));
        }
        assertEq(market.totalBalances(), owed);
        assertEq(usdc.balanceOf(address(nodes)), staked);
        assertEq(market.balanceOf(node[0]) + _withdrawn, _earned); // each payout exactly once
        assertEq(nodes.nodeOf(node[0]).stake, NODE_STAKE); // honest nodes keep their stakes
        assertEq(nodes.nodeOf(node[1]).stake, NODE_STAKE);
    }

    /// @dev After any sequence of calls: every execution can be closed, and every account can withdraw its balance.
    function finish() external {
        for (uint256 i; i < _ids.length; ++i) {
            bytes32 id = _ids[i];
            Status status = market.executionOf(id).status;
            if (status == Status.Requested || status == Status.Planned) {
                uint256 refundable = market.refundableAt(id);
                if (block.timestamp < refundable) vm.warp(refundable);
                market.refund(id);
            }
            if (_planned[id] > 0 && !market.executionOf(id).released) _distribute(id);
        }
        assertEq(market.totalLocked(), 0);
        for (uint256 i; i < node.length; ++i) {
            assertEq(nodes.nodeOf(node[i]).locked, 0);
        }
        uint256 until = market.frozenUntil(client);
        if (block.timestamp < until) vm.warp(until);
        market.collectFees();
        _drain(client);
        _drain(address(this));
        for (uint256 i; i < 4; ++i) {
            if (i < 3) _drain(node[i]);
            _drain(vm.addr(memberKeys[i]));
        }
        assertEq(market.totalBalances(), 0);
        require(usdc.balanceOf(address(market)) < 4, "more than the remainder of a division is left");
    }

    function _drain(address account) internal {
        uint256 balance = market.balanceOf(account);
        if (balance == 0) return;
        vm.prank(account);
        market.withdraw(balance);
    }

    function _distribute(bytes32 id) internal {
        Settlement memory s = _settlements[id];
        PlanSubmission memory plan = makePlan(requests[id], _planned[id]);
        ExecutionHistory memory history = makeHistory(id, plan, _commitments[id], s.payouts);
        history.own = _own[id];
        market.distribute(toList(history));
        ++_distributions[id];
        _earned += _payout(id);
    }

    function _payout(bytes32 id) internal view returns (uint256) {
        bytes32[] storage payouts = _settlements[id].payouts;
        return payouts.length == 0 ? 0 : amountOf(payouts[0]);
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
        list[0].selectors = new bytes4[](13);
        list[0].selectors[0] = MarketHandler.deposit.selector;
        list[0].selectors[1] = MarketHandler.withdraw.selector;
        list[0].selectors[2] = MarketHandler.requestOne.selector;
        list[0].selectors[3] = MarketHandler.submit.selector;
        list[0].selectors[4] = MarketHandler.commitOne.selector;
        list[0].selectors[5] = MarketHandler.decide.selector;
        list[0].selectors[6] = MarketHandler.refund.selector;
        list[0].selectors[7] = MarketHandler.freeze.selector;
        list[0].selectors[8] = MarketHandler.openSigned.selector;
        list[0].selectors[9] = MarketHandler.commitMany.selector;
        list[0].selectors[10] = MarketHandler.distributeOne.selector;
        list[0].selectors[11] = MarketHandler.collect.selector;
        list[0].selectors[12] = MarketHandler.wait.selector;
    }

    function invariant_money_and_stake_are_conserved() external view {
        handler.check();
    }

    function afterInvariant() external {
        handler.finish();
    }
}
